"""The text of a stream is one decode of all its tokens, for every kind of decoder."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel

from disagg.router.detokenizer import REPLACEMENT, WINDOW_TOKENS_MAX, Vocabulary
from disagg.router.text_stream import StopMatcher

SPECIAL = ["<s>", "</s>", "[INST]", "[/INST]"]
SPM = ["▁", "▁▁", "▁Hello", "▁world", "lo", "▁again", ".", "\ufffd", "\n", "é"]
BYTES = [f"<0x{byte:02X}>" for byte in (0x0A, 0x20, 0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F)]
BYTE_LEVEL = [*"abĠ.ĊÃ©âĤ¬ðŁĺĢ", "Ġthe", "ĠÃ", "©Ġ", "¬âĤ", "<think>", "raw text ▁"]
WORDS = ["the", "cat", "##s", "##", ".", "'", "n't", "do", "not", "é"]
SUFFIXED = ["the</w>", "c", "at</w>", "</w>", ".</w>", "é"]
CTC = ["<pad>", "|", "a", "b", "'m", " "]

fused = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
# Not here: a Strip of the end, on which the library itself panics where the text is shorter.
DECODERS = {
    "byte_level": (BYTE_LEVEL, decoders.ByteLevel()),
    "byte_level in a sequence": (
        BYTE_LEVEL,
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    ),
    "metaspace": (SPM, decoders.Metaspace()),
    "metaspace never": (SPM, decoders.Metaspace(prepend_scheme="never")),
    "wordpiece": (WORDS, decoders.WordPiece()),
    "wordpiece as it is": (WORDS, decoders.WordPiece(cleanup=False)),
    "bpe": (SUFFIXED, decoders.BPEDecoder()),
    "ctc": (CTC, decoders.CTC()),
    "none": (WORDS, None),
    "fuse": (WORDS, decoders.Fuse()),
    "llama": (SPM + BYTES, decoders.Sequence([*fused, decoders.Strip(" ", 1, 0)])),
    "gemma": (SPM + BYTES, decoders.Sequence(fused)),
    "byte_fallback, metaspace": (
        SPM + BYTES,
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    ),
    "rewrites across tokens": (
        SPM + BYTES,
        decoders.Sequence([*fused, decoders.Replace("lo.", "LOW")]),
    ),
    "bpe, looked at": (
        SUFFIXED,
        decoders.Sequence([decoders.BPEDecoder(), decoders.Replace("c ", "k")]),
    ),
}
HELD_TO_THE_END = {"rewrites across tokens", "bpe, looked at"}


def backend(name):
    """A tokenizer of a few tokens; its last two ids stand for nothing."""
    tokens, decoder = DECODERS[name]
    core = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    core.add_special_tokens(SPECIAL)
    if decoder is not None:
        core.decoder = decoder
    return core


BACKENDS = {name: backend(name) for name in DECODERS}


def one_decode(core, prompt, ids):
    """What one decode of everything has after the prompt's own text."""
    before = core.decode(prompt)
    whole = core.decode([*prompt, *ids])
    num = 0
    while num < min(len(before), len(whole)) and before[num] == whole[num]:
        num += 1
    return whole[num:]


def stream(core, prompt, ids, vocabulary=None):
    detokenizer = (vocabulary or Vocabulary(core)).detokenizer(prompt)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def token_lists(core, max_size):
    shown = st.integers(0, core.get_vocab_size(with_added_tokens=False) - 1)
    special = st.integers(core.get_vocab_size(with_added_tokens=False), core.get_vocab_size() + 1)
    runs = st.lists(st.one_of(shown, shown, shown, special), max_size=max_size)
    repeated = st.builds(lambda one, n: [one] * n, st.one_of(shown, special), st.integers(0, 20))
    return st.lists(st.one_of(runs, repeated), max_size=3).map(
        lambda parts: [*itertools.chain(*parts)]
    )


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_pieces_join_to_one_decode_of_all_tokens(name, data):
    core, vocabulary = BACKENDS[name], Vocabulary(BACKENDS[name])
    for _ in range(2):  # texts remembered from an earlier request change nothing
        prompt = data.draw(token_lists(core, 6), "prompt")
        ids = data.draw(token_lists(core, 12), "ids")
        pieces = stream(core, prompt, ids, vocabulary)
        assert "".join(pieces) == one_decode(core, prompt, ids)


@settings(deadline=None)
@given(data=st.data())
def test_any_bytes_are_decoded_as_the_library_does(data):
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(WordLevel(alphabet, unk_token="a"))
    core.decoder = decoders.ByteLevel()
    risky = st.sampled_from([*range(0xBE, 0xC4), 0xE0, 0xED, 0xEF, *range(0xF0, 0xF6), 0x80, 0x9F])
    vocabulary = Vocabulary(core)
    for _ in range(2):  # texts remembered from an earlier request change nothing
        drawn = data.draw(st.lists(st.one_of(risky, st.integers(0, 255)), max_size=24))
        prompt, ids = drawn[:4], drawn[4:]
        assert "".join(stream(core, prompt, ids, vocabulary)) == one_decode(core, prompt, ids)


@pytest.mark.parametrize("name", ["metaspace", "llama", "gemma"])
def test_a_special_token_takes_no_space(name):
    core = BACKENDS[name]
    hello, inst, again = map(core.token_to_id, ("▁Hello", "[INST]", "▁again"))
    vocabulary = Vocabulary(core)
    for specials in ([inst], [inst] * 3, [inst] * 100):
        pieces = stream(core, [hello], [*specials, again, *specials, hello], vocabulary)
        assert "".join(pieces) == " again Hello"
    # Negative control: decoded alone, as the first of a text, the word loses its space.
    assert name == "gemma" or core.decode([inst, again]) == "again"


def test_a_first_word_keeps_its_space_behind_a_prompt_and_only_there():
    core = BACKENDS["llama"]
    hello, inst, again = map(core.token_to_id, ("▁Hello", "[INST]", "▁again"))
    assert stream(core, [hello], [again]) == [" again", ""]
    assert stream(core, [hello, inst], [again]) == [" again", ""]
    assert stream(core, [hello] + [inst] * 100, [again]) == [" again", ""]
    assert stream(core, [inst], [again]) == ["again", ""]
    assert stream(core, [], [again]) == ["again", ""]


def test_a_character_of_several_bytes_comes_when_it_is_final():
    llama, byte_level = BACKENDS["llama"], BACKENDS["byte_level"]
    euro = [llama.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    hello = llama.token_to_id("▁Hello")
    assert stream(llama, [hello], [*euro, hello]) == ["", "", "", "€ Hello", ""]
    assert stream(llama, [hello], euro) == ["", "", "", "€"]
    # One bad byte turns all of its run into replacement characters, so the run had to wait.
    assert "".join(stream(llama, [hello], [*euro, euro[0], hello])) == REPLACEMENT * 4 + " Hello"
    euro = [byte_level.token_to_id(char) for char in "âĤ¬"]
    assert stream(byte_level, [], [*euro, *euro]) == ["", "", "€", "", "", "€", ""]
    assert stream(byte_level, [], euro[:2]) == ["", "", REPLACEMENT]


@pytest.mark.parametrize("name", DECODERS)
def test_work_per_token_is_bounded(name):
    core, num = BACKENDS[name], 200
    held = HELD_TO_THE_END | {"byte_level in a sequence"}  # decode once, at the end of the run

    class Counting:
        """The backend, counting the tokens it decodes."""

        num_decoded = 0

        def __getattr__(self, attribute):
            return getattr(core, attribute)

        def decode(self, ids, **settings):
            Counting.num_decoded += len(ids)
            return core.decode(ids, **settings)

    for token_id in range(core.get_vocab_size()):
        Counting.num_decoded = 0
        pieces = stream(Counting(), [], [token_id] * num)
        assert "".join(pieces) == core.decode([token_id] * num)
        assert Counting.num_decoded <= 2 * (WINDOW_TOKENS_MAX + 1) * num
        if name not in held and not core.id_to_token(token_id).startswith("<0x"):
            text = core.decode([token_id] * num)
            assert len(pieces[-1]) <= 1, text  # nothing but an unfinished character waits


@settings(deadline=None)
@given(data=st.data())
def test_a_stop_string_is_found_alike_however_the_text_is_split(data):
    text = data.draw(st.text("abc", max_size=12))
    stop = tuple(data.draw(st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))

    def cut(parts):
        matcher, shown = StopMatcher(stop), ""
        for part in parts:
            new, stopped = matcher.push(part)
            shown += new
            if stopped:
                return shown, True
        return shown + matcher.flush(), False

    bounds = [0, *cuts, len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert cut(parts) == cut([text]) == cut(list(text))


def test_every_kind_of_decoder_is_here():
    """A new kind in the library must be looked at before its text is trusted."""
    kinds = {name for name in dir(decoders) if name[0].isupper()}
    tried = set()
    for _, decoder in DECODERS.values():
        if decoder is not None:
            described = json.loads(decoder.__getstate__())
            tried |= {part["type"] for part in described.get("decoders", [described])}
    assert kinds - {"Decoder", "DecodeStream", "Sequence"} <= tried
