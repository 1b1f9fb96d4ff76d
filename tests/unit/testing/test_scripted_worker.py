"""A scripted worker answers as a real one does."""

import pytest

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import FinishReason, StepOutputs
from disagg.messages.reports import PrefillReport
from disagg.messages.sampling import SamplingParams
from disagg.messages.submit import Role, Submit
from disagg.testing.scripted_worker import ScriptedWorker

KEY = RequestKey("r", 1)


def answers(role: Role, sampling: SamplingParams, **changes: int) -> list[object]:
    worker = ScriptedWorker(Incarnation("w", "e"), lambda position: 100 + position, **changes)  # type: ignore[arg-type]
    return list(worker.answers(Submit(KEY, role, (7, 8, 9), (), b"", sampling)))


def tokens(sent: list[object]) -> list[tuple[int, tuple[int, ...], FinishReason]]:
    steps = [one for one in sent if isinstance(one, StepOutputs)]
    outputs = [output for step in steps for output in step.outputs]
    return [(one.position, one.token_ids, one.finish_reason) for one in outputs]


def test_a_prefill_part_sends_its_report_and_token_0() -> None:
    sent = answers(Role.PREFILL, SamplingParams(max_tokens=4), hit_tokens=2)
    assert sent[0] == PrefillReport(KEY, 3, 2, 1)
    assert tokens(sent) == [(3, (103,), FinishReason.NONE)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_decode_part_goes_on_to_the_end(size: int) -> None:
    sent = answers(Role.DECODE, SamplingParams(max_tokens=4), tokens_per_step=size)
    steps = tokens(sent)
    assert len(steps) == len(sent) == -(-4 // size)
    assert [token for _, ids, _ in steps for token in ids] == [103, 104, 105, 106]
    assert [finish for *_, finish in steps][:-1] == [FinishReason.NONE] * (len(steps) - 1)
    assert steps[-1][2] is FinishReason.LENGTH


def test_a_stop_token_ends_it_within_a_step() -> None:
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(104,))
    sent = answers(Role.LOCAL, sampling, tokens_per_step=3)
    assert tokens(sent) == [(3, (103, 104), FinishReason.STOP)]
