"""The demo model's tokenizer: one token per word of the task, with a chat template."""

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence, Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from demo.task import ASSISTANT, BOS, END, EOS, PAD, SPECIAL, UNK, USER, WORD_IDS

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] in ['user', 'system'] %}" + USER + " {{ message['content'] }} "
    "{% elif message['role'] == 'assistant' %}"
    + ASSISTANT
    + " {{ message['content'] }} {{ eos_token }}"
    "{% else %}{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


def build_tokenizer(context_tokens: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer; words are parted by blanks, after ``=`` and before ``;``.

    Args:
        context_tokens: the longest sequence, recorded as ``model_max_length``.
    """
    words = Tokenizer(WordLevel(dict(WORD_IDS), unk_token=UNK))
    words.pre_tokenizer = Sequence(
        [
            Split(Regex(r"\s+"), "removed"),
            Split("=", "merged_with_previous"),
            Split(END, "isolated"),
        ]
    )
    words.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, WORD_IDS[BOS])]
    )
    words.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=context_tokens,
    )
