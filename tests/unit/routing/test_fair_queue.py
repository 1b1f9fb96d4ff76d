"""Fair queueing in tokens: bounds that hold for every script; a queue by arrival breaks them."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.errors import ConfigError
from disagg.routing.fair_queue import FairQueue, parse_weights

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 0.5}
PROMPT_MAX, OUTPUT_MAX, SLOTS = 50, 40, 3


class ByArrival(FairQueue[int]):
    """Control: a queue that serves who came first, whoever it is."""

    def heads(self) -> list[tuple[str, int]]:
        return sorted(super().heads(), key=lambda head: head[1])


@dataclass
class Job:
    tenant: str
    prompt: int
    output: int
    priority: int = 0


class Server:
    """A few slots: a job is charged its prompt when it starts and its output token by token."""

    def __init__(self, queue: FairQueue[int]) -> None:
        self.queue = queue
        self.jobs: list[Job] = []
        self.running: list[int] = []
        self.started: list[int] = []
        self.served: Counter[str] = Counter()
        self.since: dict[frozenset[str], Counter[str]] = {}
        """Of each pair of tenants that both wait, what was served when they began to."""

    def arrive(self, job: Job) -> None:
        self.jobs.append(job)
        number = len(self.jobs) - 1
        self.queue.push(job.tenant, str(number), number, job.priority)
        self.look()

    def step(self) -> None:
        """Every running job gets a token."""
        for number in list(self.running):
            job = self.jobs[number]
            job.output -= 1
            self.queue.charge(job.tenant, 1)
            self.served[job.tenant] += 1
            if not job.output:
                self.running.remove(number)
        self.look()

    def look(self) -> None:
        while len(self.running) < SLOTS and (heads := self.queue.heads()):
            tenant, number = heads[0]
            waits = [n for n in self.queue if self.jobs[n].tenant == tenant]
            assert number == min(waits, key=lambda n: (self.jobs[n].priority, n))
            assert self.queue.take(tenant, self.jobs[number].prompt) == number
            self.served[tenant] += self.jobs[number].prompt
            self.running.append(number)
            self.started.append(number)
        waiting = [name for name in WEIGHTS if self.queue.num_waiting(name)]
        pairs = {frozenset((one, other)) for one in waiting for other in waiting if one != other}
        self.since = {pair: self.since.get(pair, self.served.copy()) for pair in pairs}

    def unfairness(self) -> float:
        """How far two tenants that both waited all the time are apart, over what they may be."""
        worst = 0.0
        for pair, start in self.since.items():
            one, other = pair
            got = {name: (self.served[name] - start[name]) / WEIGHTS[name] for name in pair}
            bound = sum(2 * (PROMPT_MAX + SLOTS * OUTPUT_MAX) / WEIGHTS[name] for name in pair)
            worst = max(worst, abs(got[one] - got[other]) / bound)
        return worst


JOBS = st.builds(
    Job,
    st.sampled_from(sorted(WEIGHTS)),
    st.integers(1, PROMPT_MAX),
    st.integers(1, OUTPUT_MAX),
    st.sampled_from((0, 0, -1, 5)),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(JOBS, st.integers(1, 30)), max_size=60))
def test_tenants_that_wait_are_served_alike_and_each_by_priority_then_by_arrival(
    script: list[Job | int],
) -> None:
    server = Server(FairQueue(WEIGHTS))
    for event in [*script, 10_000]:
        if isinstance(event, Job):
            server.arrive(event)
        for _ in range(event if isinstance(event, int) else 0):
            server.step()
            assert server.unfairness() <= 1
            if not server.running:
                break
    assert sorted(server.started) == list(range(len(server.jobs)))  # nobody waits for ever


def test_what_is_taken_out_of_the_middle_leaves_the_order() -> None:
    queue: FairQueue[int] = FairQueue()
    for number, priority in enumerate((0, 7, -2, 0, 7)):
        queue.push("a", str(number), number, priority)
    assert queue.last("a") == 4
    assert queue.remove("a", "3") == 3
    assert queue.remove("a", "3") is None
    order = []
    while heads := queue.heads():
        order.append(queue.take(*heads[0][:1], num_tokens=1))
    assert order == [2, 0, 1, 4]


def flood(queue: FairQueue[int]) -> Server:
    """One tenant sends 200 large requests, then another 200 small ones; a while later."""
    server = Server(queue)
    for _ in range(200):
        server.arrive(Job("a", PROMPT_MAX, OUTPUT_MAX))
    for _ in range(200):
        server.arrive(Job("b", 5, 5))
    for _ in range(400):
        server.step()
    return server


def test_who_floods_does_not_starve_another() -> None:
    server = flood(FairQueue(WEIGHTS))
    assert server.unfairness() <= 1
    assert server.served["b"] > 400
    by_arrival = flood(ByArrival(WEIGHTS))  # control: the figure sees it
    assert by_arrival.unfairness() > 1
    assert by_arrival.served["b"] == 0


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(100):
        queue.push("a", str(number), number)
        queue.take("a", 1000)
    queue.push("a", "last", 100)
    queue.push("b", "first", 0)
    queue.push("b", "second", 1)
    assert queue._tenants["b"].virtual == 99_000  # where a's last turn began
    order = []
    while heads := queue.heads():
        order.append(heads[0][0])
        queue.take(heads[0][0], 1500)
    assert order == ["b", "a", "b"]


def test_weights_divide_the_tokens() -> None:
    queue: FairQueue[int] = FairQueue({"gold": 3.0})
    for number in range(400):
        queue.push("gold", f"g{number}", number)
        queue.push("iron", f"i{number}", number)
    turns: Counter[str] = Counter()
    for _ in range(400):
        tenant = queue.heads()[0][0]
        queue.take(tenant, 10)
        turns[tenant] += 1
    assert abs(turns["gold"] - 300) <= 1


def test_who_is_passed_over_keeps_its_place() -> None:
    queue: FairQueue[int] = FairQueue()
    for name in "abc":
        queue.push(name, name, 0)
    queue.take("b", 10)
    assert [name for name, _ in queue.heads()] == ["a", "c"]
    assert queue.remove("a", "a") == 0
    assert queue.remove("a", "a") is None
    assert len(queue) == 1


def test_tenants_that_are_gone_are_forgotten() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(1000):
        queue.push(f"t{number}", "k", number)
        queue.take(f"t{number}", 1)
        queue.push("z", "k", number)
        queue.take("z", 10)
    assert len(queue._tenants) < 10


@pytest.mark.parametrize("bad", ["a", "a=", "=1", "a=0", "a=-1", "a=nan", "a=1e9", "a=b"])
def test_a_bad_weight_is_refused(bad: str) -> None:
    assert parse_weights(["x=2", "team=a=0.5"]) == {"x": 2.0, "team=a": 0.5}
    with pytest.raises(ConfigError, match="NAME=WEIGHT"):
        parse_weights([bad])
    with pytest.raises(ConfigError, match="twice"):
        parse_weights(["a=1", "a=2"])


def test_who_is_aside_holds_nobody_up_and_comes_back_in_its_place() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(4):
        queue.push("a", str(number), number)
    queue.push("b", "b", 9)
    queue.set_aside("a", "0")
    queue.set_aside("a", "1")
    assert queue.heads() == [("a", 0), ("a", 2), ("b", 9)], "of those aside the first is named too"
    assert queue.take("a", 0, "2") == 2
    assert queue.heads() == [("a", 0), ("a", 3), ("b", 9)]
    queue.set_aside("a", "0", is_aside=False)
    assert queue.heads() == [("a", 0), ("a", 1), ("b", 9)]
    assert queue.last("a") == 3
    assert queue.remove("a", "1") == 1
    assert queue.remove("a", "3") == 3
    queue.set_aside("a", "0")
    assert queue.heads() == [("a", 0), ("b", 9)]
    assert queue.last("a") == queue.take("a", 0) == 0
    assert queue.heads() == [("b", 9)]


def test_of_each_kind_one_is_named_and_of_those_aside_one() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(9):
        queue.push("a", str(number), number, kind=number % 3)
    for number in (0, 1, 4):
        queue.set_aside("a", str(number))
    assert [item for _, item in queue.heads()] == [0, 2, 3, 7]
    queue.sort(lambda one: one % 2)
    assert [item for _, item in queue.heads()] == [0, 2, 3]
    assert queue.last("a") == 8
    queue.set_aside("a", "1", is_aside=False)
    assert [item for _, item in queue.heads()] == [0, 1, 2]
