"""Both submits of a generation are as if each had been encoded alone, whatever comes between."""

from dataclasses import replace

import pytest

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import Cancel, ToWorkerMessage
from disagg.messages.submit import PeerAddress, PullPlan, Role, Submit
from disagg.wire import session_encoder
from disagg.wire.session_codec import session_request_from_wire, session_request_to_wire
from disagg.wire.session_encoder import SessionEncoder
from disagg.wire.submit_codec import submit_to_wire
from disagg.wire.v1.session_pb2 import SessionRequest

PREFILL, DECODE = (PeerAddress(Incarnation(f"w{i}", f"e{i}"), f"h:{i}") for i in range(2))
TOKENS, HASHES = tuple(range(9)), (b"h" * 32,)
DECODES = Submit(
    RequestKey("r", 1, "router"),
    Role.DECODE,
    TOKENS,
    HASHES,
    b"salt",
    SamplingParams(max_tokens=3, stop_token_ids=(7,)),
    PREFILL,
    traceparent="trace",
)
PREFILLS = replace(DECODES, role=Role.PREFILL, peer=DECODE, pull=PullPlan(PREFILL, 4))
ALONE = replace(DECODES, role=Role.LOCAL, peer=None)


@pytest.mark.parametrize(
    "messages",
    [
        (DECODES, PREFILLS),
        (PREFILLS, DECODES),
        (DECODES, Cancel(DECODES.key, "left"), PREFILLS),
        (DECODES, PREFILLS, ALONE),
        (DECODES, replace(PREFILLS, token_ids=(*TOKENS[:-1], 99))),
        (DECODES, replace(PREFILLS, key=RequestKey("other", 1, "router"))),
        (DECODES, replace(PREFILLS, hashes=(b"o" * 32,))),
        (DECODES, replace(PREFILLS, traceparent="")),
        (DECODES, replace(PREFILLS, sampling=SamplingParams(max_tokens=3, seed=5))),
        (replace(DECODES, take_over=RequestKey("r", 0, "router")), PREFILLS),
    ],
)
def test_each_is_as_if_encoded_alone(messages: tuple[ToWorkerMessage, ...]) -> None:
    encode = SessionEncoder().encode
    assert list(map(encode, messages)) == list(map(session_request_to_wire, messages))


def test_the_second_part_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was batched behind the first one is no part of it."""
    given: list[object] = []

    def make(submit: Submit, other: SessionRequest | None = None) -> SessionRequest:
        given.append(other)
        return submit_to_wire(submit, other)

    monkeypatch.setattr(session_encoder, "submit_to_wire", make)
    encode = SessionEncoder().encode
    first = encode(DECODES)
    first.more.append(session_request_to_wire(Cancel(DECODES.key, "left")))
    second = encode(PREFILLS)
    assert given == [None, first]
    assert not second.more
    assert session_request_from_wire(second, "router") == PREFILLS
    encode(PREFILLS)
    assert given[2:] == [None], "a prompt is kept for one pair only"
