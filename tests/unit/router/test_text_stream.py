"""From tokens to text, delta by delta."""

import pytest

from disagg.messages.outputs import FinishReason
from disagg.messages.sampling import SamplingParams
from disagg.router.text_stream import TextReader
from disagg.routing.actions import Deliver, NewRequest

STOP_ID = 9


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_an_end_may_come_without_a_token(tokenizer, reason):
    request = NewRequest("r", (5, 6), (), b"", SamplingParams(4, stop_token_ids=(STOP_ID,)))
    reader = TextReader(request, tokenizer)
    shown = reader.piece(Deliver("r", (300,), (), FinishReason.NONE)).text
    last = reader.piece(Deliver("r", (), (), reason))
    assert (last.token_ids, last.finish_reason) == ((), reason.value)
    assert shown + last.text == tokenizer.decode([300])
