"""What workers report becomes costs of their steps and links; what nobody measured is unknown."""

from dataclasses import replace

import pytest

from disagg.messages.identity import RequestKey
from disagg.messages.registration import WorkerInfo
from disagg.messages.reports import PrefillReport, PrefillTimes, TransferKind, TransferReport
from disagg.messages.stats import RouterLoad
from disagg.messages.step_times import NUM_FEATURES, PAIRS, StepShape, StepTimes
from disagg.routing.estimates.estimate import Estimate, Work, estimate
from disagg.routing.estimates.fading_mean import IDLE_HALF_LIFE_MS
from disagg.routing.estimates.place import LinkCost, Place, StepCost
from disagg.routing.estimates.prompt_shares import SHARE_HALF_LIFE_MS
from disagg.routing.estimates.speeds import Speeds
from disagg.routing.generation import Generation
from disagg.routing.index import PrefixIndex
from disagg.routing.worker import Worker
from disagg.routing.worker_bits import WorkerBits
from tests.unit.routing import measured
from tests.unit.routing.builders import FULL, worker
from tests.unit.routing.measured import DECODES, PREFILLS, stats, step_times

P, D = worker("p", "prefill"), worker("d", "decode")
KEY = RequestKey("r", 1)


def known(info: WorkerInfo) -> Worker:
    return Worker(info, PrefixIndex((FULL,), 4, WorkerBits()), 0)


def prefills(slower: float = 1.0) -> StepTimes:
    return step_times(PREFILLS, slower)


def decodes(slower: float = 1.0) -> StepTimes:
    return step_times(DECODES, slower)


def test_nothing_is_known_before_both_kinds_of_step_were_measured_somewhere() -> None:
    speeds, p, d = Speeds(), known(P), known(D)
    assert speeds.step_cost(p) is None
    speeds.stats(0, p, stats(None))
    assert speeds.step_cost(p) is None, "a worker of an older release"
    speeds.stats(0, p, stats(prefills()))
    assert speeds.step_cost(p) is None, "nobody has decoded"
    speeds.stats(0, d, stats(decodes()))
    for one in (p, d):
        cost = speeds.step_cost(one)
        assert cost is not None
        assert cost.prompt_ms(100) == pytest.approx(10, rel=0.15)
        assert cost.decode_step_ms(4, 1.0) == pytest.approx(4, rel=0.15)


def test_a_slow_worker_is_known_by_its_own_steps() -> None:
    speeds, p, d, slow = Speeds(), known(P), known(D), known(worker("slow", "prefill"))
    for one, times in ((p, prefills()), (d, decodes()), (slow, prefills(slower=5))):
        speeds.stats(0, one, stats(times))
    found = [cost.prompt_ms(200) for w in (p, slow) if (cost := speeds.step_cost(w))]
    assert found[1] > 2.5 * found[0]


def test_who_was_slow_and_has_done_nothing_since_is_tried_again() -> None:
    """Else nothing is planned there, and nothing is measured there that would say otherwise."""
    speeds, p, d, slow = Speeds(), known(P), known(D), known(worker("slow", "prefill"))
    reports = ((p, prefills()), (d, decodes()), (slow, prefills(slower=10)))

    def costs(now_ms: int) -> list[float]:
        for one, times in reports:
            speeds.stats(now_ms, one, stats(times))
        return [cost.prompt_ms(200) for w in (p, slow) if (cost := speeds.step_cost(w))]

    usual, before = costs(0)
    assert before > 3 * usual
    assert costs(IDLE_HALF_LIFE_MS - 1) == [usual, before]
    later = [costs(number * IDLE_HALF_LIFE_MS)[1] for number in range(1, 12)]
    assert later == sorted(later, reverse=True), "it is no better than others meanwhile"
    average = speeds.step_cost(known(worker("new", "prefill")))
    assert average is not None
    assert later[-1] == pytest.approx(average.prompt_ms(200), rel=0.1)
    for number in range(12, 24):
        costs(number * IDLE_HALF_LIFE_MS)
    assert costs(10**9) == costs(2 * 10**9), "what little is left stays"
    again = prefills(slower=10)
    again = replace(again, num_steps=2 * again.num_steps)
    again = replace(again, products=tuple(2 * one for one in again.products))
    again = replace(again, timed=tuple(2 * one for one in again.timed))
    speeds.stats(2 * 10**9 + 1, slow, stats(again))
    cost = speeds.step_cost(slow)
    assert cost is not None
    assert cost.prompt_ms(200) > 3 * usual, "if it is slow still, its next steps say so"


def test_a_step_that_hung_is_forgotten_and_says_nothing_of_others() -> None:
    """One of ten minutes was believed for hours where nothing was asked any more."""
    speeds, hung, other = Speeds(), known(worker("hung", "both")), known(worker("other", "both"))

    def times(num: int, hang_ms: float = 0.0) -> StepTimes:
        """So often the same steps, the last one hanging."""
        one = measured.ALL_STEPS
        timed = [num * t for t in one.timed]
        for feature, at in enumerate(PAIRS.index((0, i)) for i in range(NUM_FEATURES)):
            timed[feature] += hang_ms * one.products[at] / one.num_steps
        products = tuple(num * p for p in one.products)
        return replace(one, num_steps=num * one.num_steps, products=products, timed=tuple(timed))

    def prompt_ms(who: Worker) -> float:
        cost = speeds.step_cost(who)
        assert cost is not None
        return cost.shape_ms(StepShape(200, 0.0, 8, 8.0))

    num = 1_000
    for who in (hung, other):
        speeds.stats(0, who, stats(times(num)))
    usual_ms = prompt_ms(other)
    speeds.stats(1, hung, stats(times(num + 1, hang_ms=600_000.0)))
    assert prompt_ms(hung) > 10 * usual_ms, "control: it is seen"
    for number in range(1, 40):
        now_ms = number * IDLE_HALF_LIFE_MS
        speeds.stats(now_ms, hung, stats(times(num + 1, hang_ms=600_000.0)))
        speeds.stats(now_ms, other, stats(times(num + number)))
    assert prompt_ms(other) == pytest.approx(usual_ms, rel=0.2)
    assert prompt_ms(hung) < 2 * usual_ms


def test_the_same_report_counts_once_and_a_new_life_begins_anew() -> None:
    speeds, p, d = Speeds(), known(P), known(D)
    speeds.stats(0, d, stats(decodes()))
    speeds.stats(0, p, stats(prefills()))
    before = speeds.step_cost(p)
    for _ in range(50):
        speeds.stats(0, p, stats(prefills()))
    assert speeds.step_cost(p) == before
    speeds.stats(0, p, stats(StepTimes()))
    assert speeds.step_cost(p) == before


def test_who_has_left_is_forgotten_but_what_all_take_is_known() -> None:
    speeds, p, d = Speeds(), known(P), known(D)
    speeds.stats(0, p, stats(prefills()))
    speeds.stats(0, d, stats(decodes()))
    speeds.forget(P.incarnation)
    cost = speeds.step_cost(known(worker("p", "prefill", epoch="e2")))
    assert cost is not None
    assert cost.prompt_ms(100) == pytest.approx(10, rel=0.2)
    speeds.forget(D.incarnation)
    assert speeds.step_cost(d) is None, "nobody of that revision is left"


def test_a_place_counts_what_waits_and_what_was_planned_since() -> None:
    speeds, p, d = Speeds(), known(P), known(D)
    speeds.stats(0, p, stats(prefills()))
    speeds.stats(0, d, stats(decodes()))
    d.stats = stats(None, num_running=3, num_waiting=1, num_prefill_tokens_queued=40)
    d.planned_tokens, d.planned_requests, d.own_tokens = 60, 2, 60
    place = speeds.place(d)
    assert place is not None
    assert (place.num_running, place.num_queued_tokens, place.num_queued) == (3, 100, 3)
    assert (place.num_requests, place.step_tokens_max) == (6, 256)
    assert place.context_tokens == pytest.approx(256)
    assert speeds.place(p) is None, "without stats"


def test_a_place_counts_decodes_and_prompts_where_its_worker_tells_them_apart() -> None:
    speeds, p, d = Speeds(), known(P), known(D)
    speeds.stats(0, p, stats(prefills()))
    speeds.stats(0, d, stats(decodes()))
    d.stats = replace(
        stats(None, num_running=5, num_prefill_tokens_queued=40),
        num_prompts_queued=2,
        num_decoding=3,
        loads=(RouterLoad("here", 4, 40), RouterLoad("there", 3, 0)),
    )
    d.planned_tokens, d.planned_requests, d.planned_prompts, d.planned_decodes = 60, 2, 1, 2
    d.own_tokens = 60
    place = speeds.place(d)
    assert place is not None
    assert (place.num_running, place.num_coming, place.num_queued) == (3, 7 - 3 + 2, 2 + 1)
    d.stats = replace(d.stats, num_prompts_queued=None, num_decoding=None)
    old = speeds.place(d)
    assert old is not None
    assert (old.num_running, old.num_queued) == (5, 2), "control: an earlier release"


def test_what_went_to_prompts_lately_fades() -> None:
    speeds, p, d = Speeds(), known(P), known(D)
    for one, times in ((p, prefills()), (d, decodes())):
        one.stats = stats(times)
        speeds.stats(1_000, one, one.stats)

    def share(one: Worker) -> float:
        place = speeds.place(one)
        assert place is not None
        return place.prompt_share

    assert share(p) == 0, "a report of a whole life says not when it was"
    more = stats(step_times(PREFILLS * 2))
    speeds.stats(2_000, p, more)
    first = share(p)
    assert first > 0.02
    assert share(d) == 0, "control: who only decodes"
    speeds.now(2_000 + SHARE_HALF_LIFE_MS)
    assert share(p) == pytest.approx(first / 2)
    speeds.now(2_000)
    assert share(p) == pytest.approx(first / 2), "time does not go back"


@pytest.mark.parametrize("stall_share", [1.0, 0.0, 0.25])
def test_who_lately_computed_prompts_will_as_far_as_they_are_long(stall_share: float) -> None:
    speeds = Speeds()
    busy, idle = (known(worker(name, "both")) for name in "pd")
    for one, times in ((busy, prefills()), (idle, decodes())):
        one.stats = stats(times)
        speeds.stats(1_000, one, one.stats)
    speeds.planned(1_000, busy.info.incarnation, expected(stall_share), 0)
    speeds.planned(1_000, busy.info.incarnation, None, 0)
    speeds.stats(1_000, busy, stats(step_times(PREFILLS * 2)))
    places = [place for one in (busy, idle) if (place := speeds.place(one)) is not None]
    there, elsewhere = (place.prompt_share for place in places)
    assert there > 0.02 * (1 + stall_share) / 2
    assert elsewhere == pytest.approx(there * (1 - stall_share) / (1 + stall_share), rel=0.1)


def expected(stall_share: float) -> Estimate:
    idle = Place(StepCost(10.0, 0.1, 0.0, 1.0, 0.0), 0, 0.0, 0, 0, 0, 0, 0)
    return replace(estimate(Work(100, 0, 64), idle, idle), stall_share=stall_share)


def generation(*, local: bool = False, started_ms: int = 0) -> Generation:
    return Generation(KEY, started_ms, P, P if local else D, "", 0, 100)


def transfer(read_ms: int, mib: int, **changes: object) -> TransferReport:
    return measured.transfer(KEY, P.incarnation, mib << 20, read_ms, **changes)  # type: ignore[arg-type]


def test_a_link_costs_what_its_reads_have_taken() -> None:
    speeds, plan = Speeds(), generation()
    assert speeds.link_cost(P.incarnation, D.incarnation) is None
    speeds.report(plan, transfer(5_000, 1))  # connects
    assert speeds.link_cost(P.incarnation, D.incarnation) is None, "the first one is cold"
    for mib in (1, 10, 50) * 4:
        speeds.report(plan, transfer(3 + 2 * mib, mib))
    cost = speeds.link_cost(P.incarnation, D.incarnation)
    assert cost is not None
    assert cost.ms(20 << 20) == pytest.approx(43, rel=0.1)
    assert speeds.commit_ms == pytest.approx(4)
    elsewhere = speeds.link_cost(D.incarnation, P.incarnation)
    assert elsewhere is not None, "as all links are"
    speeds.forget(P.incarnation)
    assert speeds.link_cost(P.incarnation, D.incarnation) == pytest.approx(elsewhere)


def test_a_network_that_was_slow_for_a_while_is_tried_again() -> None:
    """Else nothing is handed over any more, and nothing is measured that would say otherwise."""
    speeds, plan = Speeds(), generation()
    for _ in range(300):
        speeds.report(plan, transfer(5, 1))
    for _ in range(30):
        speeds.report(plan, transfer(500, 1))
        slow = generation()
        speeds.report(slow, reported(slow, PrefillTimes(0, 400, 0)))
    usual_ms = 5

    def read_ms(now_ms: int) -> float:
        speeds.now(now_ms)
        cost = speeds.link_cost(P.incarnation, D.incarnation)
        assert cost is not None
        return cost.ms(1 << 20)

    assert read_ms(IDLE_HALF_LIFE_MS - 1) == read_ms(0) > 20 * usual_ms
    later = [read_ms(number * IDLE_HALF_LIFE_MS) for number in range(1, 15)]
    assert later == sorted(later, reverse=True)
    assert later[-1] == pytest.approx(usual_ms, rel=0.4), "also of a fleet that is some minutes old"
    for _ in range(3):
        speeds.report(plan, transfer(500, 1))
    assert read_ms(14 * IDLE_HALF_LIFE_MS) > 3 * usual_ms, "if it is slow still, READs say so"
    assert speeds.reserve_ms == pytest.approx(400), "the only ones that there were"


def test_a_network_that_stays_slow_becomes_the_usual_one() -> None:
    speeds, plan = Speeds(), generation()
    for read_ms in [5] * 300 + [500] * 2_000:
        speeds.report(plan, transfer(read_ms, 1))
    speeds.forget(P.incarnation)
    cost = speeds.link_cost(P.incarnation, D.incarnation)
    assert cost is not None
    assert cost.ms(1 << 20) > 300


def test_reads_during_a_prefill_count_without_the_pauses_between_them() -> None:
    """Long prompts are read while they are computed; of some fleets these are all there is."""
    speeds, plan = Speeds(), generation()
    for mib in (4, 40, 200) * 4:
        reading_ms = 4 * 3 + 2 * mib
        done = transfer(10_000, mib, exposed_ms=5, num_bursts=4, reading_ms=reading_ms)
        speeds.report(plan, done)
    cost = speeds.link_cost(P.incarnation, D.incarnation)
    assert cost is not None
    assert cost.ms(20 << 20) == pytest.approx(43, rel=0.1)
    assert speeds.commit_ms == 0, "what is left of the exposed time is no commit"


def test_a_read_that_waited_says_nothing_of_the_link_where_pauses_are_not_told() -> None:
    speeds, plan = Speeds(), generation()
    for _ in range(5):
        speeds.report(plan, transfer(10_000, 1, exposed_ms=5))
        speeds.report(plan, transfer(0, 0))
        speeds.report(plan, transfer(10_000, 1, failed="lease_dead"))
    assert not speeds._links._links
    assert speeds.link_cost(P.incarnation, D.incarnation) is None
    for _ in range(5):
        speeds.report(plan, transfer(10_000, 1, kind=TransferKind.PREFIX, exposed_ms=5))
    assert speeds.link_cost(P.incarnation, D.incarnation) is not None, "control: a pull is all READ"


def reported(plan: Generation, times: PrefillTimes | None, pulled: int = 0) -> PrefillReport:
    report = PrefillReport(KEY, 100, 0, 100 - pulled, pulled, times=times)
    assert plan.accepts(100, plan.prefill.incarnation, report)
    return report


def test_messages_and_reservations_are_what_reports_leave_over() -> None:
    speeds = Speeds()
    assert (speeds.message_ms, speeds.reserve_ms, speeds.commit_ms) == (0, 0, 0)
    plan = generation(started_ms=20)
    speeds.report(plan, reported(plan, None))
    assert speeds.message_ms == 0
    plan = generation(started_ms=20)
    speeds.report(plan, reported(plan, PrefillTimes(10, 30, 25)))
    assert (speeds.message_ms, speeds.reserve_ms) == (15, 30)
    local = generation(local=True, started_ms=20)
    speeds.report(local, reported(local, PrefillTimes(10, 900, 25)))
    pulls = generation(started_ms=20)
    speeds.report(pulls, reported(pulls, PrefillTimes(10, 900, 25), pulled=10))
    assert speeds.reserve_ms == 30, "loads and pulls are no reservations"
    ahead = generation(started_ms=20)
    speeds.report(ahead, reported(ahead, PrefillTimes(1000, 30, 25)))
    assert 0 <= speeds.message_ms < 15, "clocks of two machines"


@pytest.mark.parametrize(("local", "pull_ms"), [(True, 20), (False, 20 - 8)])
def test_a_pull_takes_more_than_its_read(local: bool, pull_ms: int) -> None:
    speeds, handed = Speeds(), generation()
    speeds.report(handed, reported(handed, PrefillTimes(0, 8, 5)))  # 8 ms for a reservation
    for pull, taken_ms in ((None, 0), (transfer(10, 1, kind=TransferKind.PREFIX), pull_ms)):
        plan = generation(local=local)
        plan.pull = pull
        speeds.report(plan, reported(plan, PrefillTimes(0, 30, 5), pulled=10))
        assert speeds.pull_ms == taken_ms, "without its READ nothing is known"


def test_what_is_found_of_prompts_counts_by_their_tokens() -> None:
    speeds, plan = Speeds(), generation()
    assert speeds.found_share == 0
    for _ in range(60):
        speeds.report(plan, PrefillReport(KEY, 900, 0, 900))
        speeds.report(plan, PrefillReport(KEY, 100, 60, 0, pulled_tokens=40))
    assert speeds.found_share == pytest.approx(0.1, rel=0.1)
    for _ in range(60):
        speeds.report(plan, PrefillReport(KEY, 100, 90, 10))
    assert speeds.found_share == pytest.approx(0.9, rel=0.02), "what was long ago fades"
    taken_over = replace(plan, taken_over=RequestKey("r", 0))
    for _ in range(60):
        speeds.report(taken_over, PrefillReport(KEY, 100, 0, 100))
    assert speeds.found_share == pytest.approx(0.9, rel=0.02), "nothing was asked of a cache"


def test_costs_are_plain_figures() -> None:
    assert StepCost(1, 2, 3, 4, 5).prompt_ms(0) == 0
    assert LinkCost(3, 4).ms(0) == 0
