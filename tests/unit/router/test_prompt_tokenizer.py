"""A prompt's tokens, without a router: what is refused, and what goes to a thread."""

import threading

import pytest

from disagg.errors import ContextLengthError, RequestError
from disagg.router.chat import Chat
from disagg.router.options import RouterOptions
from disagg.router.prompt_tokenizer import INLINE_CHARS_MAX, PromptTokenizer

LIMIT = 512
LONG = "the cat sat. " * 200


class Hashes:
    """Stands for a revision, and notes where it was asked."""

    def __init__(self):
        self.asked = []

    def hashes(self, token_ids, salt):
        self.asked.append(threading.current_thread())
        return [salt + bytes([len(token_ids) % 256])]


@pytest.fixture
def make(model_dir, tokenizer):
    made = []

    def build(**options) -> PromptTokenizer:
        made.append(PromptTokenizer(RouterOptions(str(model_dir), "tiny", **options), tokenizer))
        return made[-1]

    yield build
    for one in made:
        one.close()


async def tokens(prompts, prompt, limit=LIMIT, add_special_tokens=None, revisions=()):
    return await prompts.tokens(
        prompt, "prompt", limit, b"salt", "a", add_special_tokens, revisions=revisions
    )


async def test_every_revision_names_the_blocks_of_one_tokenising(make, tokenizer):
    first, second = Hashes(), Hashes()
    ids, hashes = await tokens(make(), "the cat sat", revisions=(first, second))
    assert ids == tokenizer.encode("the cat sat")
    assert hashes == [[b"salt" + bytes([len(ids)])]] * 2
    assert first.asked == second.asked == [threading.main_thread()]


async def test_a_long_prompt_is_tokenised_and_hashed_in_a_thread(make, tokenizer):
    assert len(LONG) > INLINE_CHARS_MAX
    revision = Hashes()
    ids, _ = await tokens(make(), LONG, limit=4096, revisions=(revision,))
    assert ids == tokenizer.encode(LONG)
    (thread,) = revision.asked
    assert thread is not threading.main_thread()


@pytest.mark.parametrize("given", [None, True, False])
async def test_special_tokens_are_the_texts_own_and_not_a_templates(make, tokenizer, given):
    text, _ = await tokens(make(), "the cat", add_special_tokens=given)
    assert text == tokenizer.encode("the cat", add_special_tokens=given is not False)
    asked = Chat(({"role": "user", "content": "the cat"},))
    chat, _ = await tokens(make(), asked, add_special_tokens=given)
    assert chat == tokenizer.encode_chat(asked, add_special_tokens=bool(given))


@pytest.mark.parametrize(
    ("options", "prompt", "error", "said"),
    [
        ({"prompt_bytes_max": 10}, "the cat sat", RequestError, "has 11 bytes, at most 10"),
        ({}, (1,) * (LIMIT + 1), ContextLengthError, "is too long; 512 tokens are possible"),
        ({}, (), RequestError, "has no tokens"),
        ({}, (1, -1), RequestError, "token ids must be from 0 to"),
        (
            {"prompt_tokens_max": 2},
            (1, 2, 3),
            ContextLengthError,
            "is too long; 2 tokens are possible (limits.prompt_tokens_max)",
        ),
        # Only its tokens say that it is.
        (
            {"prompt_tokens_max": 2},
            "the cat sat",
            ContextLengthError,
            "2 are possible (limits.prompt_tokens_max)",
        ),
    ],
)
async def test_what_cannot_be_a_prompt_is_refused(make, options, prompt, error, said):
    revision = Hashes()
    with pytest.raises(error) as refused:
        await tokens(make(**options), prompt, revisions=(revision,))
    assert said in refused.value.message
    assert refused.value.param == "prompt"
    assert bool(revision.asked) == ("2 are possible" in said)
