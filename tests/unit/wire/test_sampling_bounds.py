"""Numbers with which sampling would have no meaning, or no end, never reach an engine."""

from typing import Any

import pytest

from disagg.errors import ProtocolError
from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SamplingParams
from disagg.messages.submit import Role, Submit
from disagg.wire.session_codec import session_request_from_wire, session_request_to_wire

NAN, INF = float("nan"), float("inf")


def decoded(**changed: Any) -> Submit:
    submit = Submit(RequestKey("r", 1), Role.LOCAL, (5, 6), (), b"", SamplingParams(3))
    wire = session_request_to_wire(submit)
    sampling = wire.submit.sampling
    for name, value in changed.items():
        if name == "logit_bias":
            sampling.logit_bias[5] = value
        else:
            setattr(sampling, name, value)
    found = session_request_from_wire(wire)
    assert isinstance(found, Submit)
    return found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INF),
        ("top_p", 0.0),  # no token would be in the nucleus, and the next one be drawn for ever
        ("top_p", -1.0),
        ("top_p", NAN),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", NAN),
        ("presence_penalty", INF),
        ("frequency_penalty", NAN),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", INF),
        ("logit_bias", NAN),
        ("num_logprobs", 21),
        ("num_prompt_logprobs", 21),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ProtocolError) as error:
        decoded(**{field: value})
    assert error.value.param == f"SamplingParams.{field}"


def test_what_routers_send_passes() -> None:
    found = decoded(
        temperature=2.0,
        top_p=0.001,
        min_p=1.0,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=0.1,
        logit_bias=-100.0,
        num_logprobs=20,
    )
    assert found.sampling.logit_bias == ((5, -100.0),)
