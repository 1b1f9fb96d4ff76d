"""Nothing can follow by the request's grammar, found where token 0 is drawn: the hand-over ends."""

import pytest

from disagg.messages.identity import RequestKey
from disagg.messages.outputs import StepOutputs
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.session import EndReason, PartEnded
from disagg.messages.submit import Role, Submit
from disagg.routing.exclusions import first_cause
from disagg.scheduling.actions import ToRouter
from disagg.scheduling.step import StepResult
from tests.unit.scheduling.test_progress import LAYOUTS, D, P, Pair

WHY = "no answer can match it"


def prefill(pair: Pair, error: str) -> None:
    core = pair.cores[P]
    num_idle = 0
    while num_idle < 2:  # the first call may only reserve
        step, actions = core.next_step(pair.now_ms)
        pair.carry(P, actions)
        num_idle = 0 if step else num_idle + 1
        if step is None:
            continue
        reads, pair.reads = pair.reads, []
        pair.land(reads)
        samples = [SampledToken(7, error=error) if part.sampling else None for part in step.slices]
        pair.carry(P, core.on_step_done(pair.now_ms, StepResult(step.step_id, tuple(samples))))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_parts_end_and_hold_nothing(layout: str) -> None:
    pair = Pair(LAYOUTS[layout], 64)
    pair.submit()
    prefill(pair, WHY)
    pair.land(pair.reads)
    ends = {(ended.reason, ended.message) for ended in pair.ends}
    assert ends == {(EndReason.NO_TOKEN, WHY), (EndReason.PEER_ENDED, "no_token")}
    # Whichever report comes first, the router knows that another plan would end so too.
    assert {first_cause(ended) for ended in pair.ends} == {EndReason.NO_TOKEN}
    assert pair.committed == []
    for core in pair.cores.values():
        assert not core.sequences
        assert core.kv.num_free_blocks == core.kv.num_usable_blocks


def test_whose_slice_failed_ends_alone() -> None:
    """A prompt that a model cannot compute took all that ran beside it along, again and again."""
    pair = Pair(LAYOUTS["full"], 64)
    core = pair.cores[P]
    for name in ("bad", "good"):
        sampling = SamplingParams(max_tokens=4)
        prompt = tuple(range(7, 40))
        submit = Submit(RequestKey(name, 1), Role.LOCAL, prompt, (), b"", sampling)
        core.on_router_message(0, submit)
    step, _ = core.next_step(0)
    assert step is not None
    names = [part.key.request_id for part in step.slices]
    assert names == ["bad", "good"]
    result = StepResult(step.step_id, (None, SampledToken(7)), errors=("NaN", ""))
    told = [one.message for one in core.on_step_done(0, result) if isinstance(one, ToRouter)]
    assert [one for one in told if isinstance(one, PartEnded)] == [
        PartEnded(RequestKey("bad", 1), EndReason.STEP_FAILED, "NaN")
    ]
    (tokens,) = [one for one in told if isinstance(one, StepOutputs)]
    assert [one.key.request_id for one in tokens.outputs] == ["good"]
    assert [key.request_id for key in core.sequences] == ["good"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_control_with_a_token_it_is_handed_over(layout: str) -> None:
    pair = Pair(LAYOUTS[layout], 64)
    pair.submit()
    prefill(pair, "")
    pair.land(pair.reads)
    assert pair.ends == []
    assert len(pair.committed) == 1
    assert list(pair.cores[D].sequences) != []
