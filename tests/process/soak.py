"""Rounds of load with one fault each, and what must come out of every round.

Every request ends within `END_S` of the fault's end, in the reference's tokens or in an explicit
error; then every worker's pool is as free as at its start, and a hand-over works again.
"""

import random
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import openai

from tests.process.network import Network
from tests.process.raw_client import RawClient
from tests.process.served_model import (
    Expected,
    ServedModel,
    WrongAnswerError,
    handed_over,
    is_exact,
)

END_S = 60.0
"""From the end of the fault to the end of the last request."""
SETTLE_S = 300.0
"""From there until nothing is held and all serve (a start takes 5 s, 60 s on a busy machine)."""
READ_STUCK_MS = 1_500
SILENT_MS = 3_000
"""Also for how long the router leaves a pair alone whose hand-over failed."""
WORKER_OPTIONS = {
    "max_step_tokens": 96,
    "num_blocks": 240,
    "read_stuck_ms": READ_STUCK_MS,
    "lease_ttl_ms": 8_000,
    "reservation_ttl_ms": 8_000,
    "reserve_timeout_ms": 1_000,
}
ROUTER_OPTIONS = {"worker_silent_ms": SILENT_MS}
QUARANTINE_SHARES = (0.05, 0.6)
"""The default, with which a stuck READ ends the worker, and one with which it stays."""
ROLES = {"p0": "prefill", "d0": "decode"}
OWN_ENDS = r"cannot go on: READs that may still land|UCX +(?:FATAL|ERROR)|ucp_|ucs_|Assertion"
"""What may be in the log of a worker that ended by itself."""
NUM_PROMPTS = 32


@dataclass
class Outcomes:
    """What became of the requests of one round, or of all of one fault."""

    requests: Counter[str] = field(default_factory=Counter)
    """exact, error, left."""
    causes: Counter[str] = field(default_factory=Counter)
    """Why generations ended before their time."""
    own_ends: list[str] = field(default_factory=list)
    """Workers that ended by themselves, and why."""

    def add(self, other: "Outcomes") -> None:
        self.requests += other.requests
        self.causes += other.causes
        self.own_ends += other.own_ends

    def __str__(self) -> str:
        counted = ", ".join(f"{n} {what}" for what, n in sorted(self.requests.items()))
        causes = ", ".join(f"{n} {why}" for why, n in sorted(self.causes.items()))
        return f"{counted}; ended early: {causes or 'none'}; own ends: {self.own_ends or 'none'}"


class Soak:
    """One cluster of a prefill worker ``p0`` and a decode worker ``d0`` under faults.

    Args:
        network: where the link between them can be cut; None without namespaces.

    Attributes:
        rng: of everything that is random; seed it before a round.
    """

    def __init__(self, served: ServedModel, network: Network | None) -> None:
        self.served = served
        self.cluster = served.cluster
        self.network = network
        self.rng = random.Random(0)
        self.fault_rng = random.Random(0)
        """Of the thread that the fault runs in."""
        self.num_usable = {n: self.cluster.status(n).stats.num_blocks_usable for n in ROLES}
        self.round = Outcomes()
        self._threads = ThreadPoolExecutor(32)
        self._prompts: list[Expected] = []

    def prompts(self) -> list[Expected]:
        """Of many lengths, some with a common beginning."""
        if not self._prompts:
            common = self.served.prompt(100, 2, salt="common").prompt
            for n in range(NUM_PROMPTS):
                start = common[: 16 * (n % 7)] if n % 3 else ()
                length = max(len(start) + 2, 7 + 31 * n % 240)
                expected = self.served.prompt(length, 4 + 7 * n % 45, start=start, salt=f"soak {n}")
                self._prompts.append(expected)
        return self._prompts

    # --- a round

    def run(
        self,
        fault: Callable[["Soak"], None],
        *,
        num_requests: int = 10,
        share_leaving: float = 0.15,
    ) -> Outcomes:
        """Load, a fault at a random moment of it, its end, and what must hold then."""
        self.round = Outcomes()
        self.fault_rng.seed(self.rng.random())
        self.forget_some()
        asked = []
        faulty: Future[None] | None = None
        # The fault begins after some of them; the others come during it, if it is long enough.
        begins_after = self.rng.randrange(num_requests)
        for n in range(num_requests):
            expected = self.rng.choice(self.prompts())
            way = (
                "leave"
                if self.rng.random() < share_leaving
                else self.rng.choice(("whole", "stream"))
            )
            asked.append((self.start(way, expected, self.rng.random()), way))
            if n == begins_after:
                faulty = self._threads.submit(fault, self)
            time.sleep(self.rng.uniform(0, 0.2))
        assert faulty is not None
        faulty.result(END_S)
        self.recover()
        by = time.monotonic() + END_S
        for answer, way in asked:
            try:
                self.round.requests[answer.result(max(0.0, by - time.monotonic()))] += 1
            except TimeoutError:
                raise AssertionError(f"a request ({way}) did not end in {END_S} s") from None
        self.settle()
        return self.round

    def forget_some(self) -> None:
        """Prefix hits on both sides, on one, or on none; NaN in all that is not cached."""
        for name in ROLES:
            if self.rng.random() < 0.5:
                self.cluster.tell(name, "forget")
            self.cluster.tell(name, "poison")

    def pause(self, longest_s: float, shortest_s: float = 0.0) -> None:
        """In a fault, until a moment that nothing depends on."""
        time.sleep(self.fault_rng.uniform(shortest_s, longest_s))

    # --- requests

    def start(self, way: str, expected: Expected, moment: float) -> Future[str]:
        """Ask from a thread; the result is exact, error or left."""
        request_id = self.served.new_id()
        match way:
            case "whole":
                return self._threads.submit(self.whole, expected, request_id)
            case "stream":
                return self._threads.submit(self.stream, expected, request_id)
            case _:
                return self._threads.submit(self.leave, expected, request_id, moment)

    def whole(self, expected: Expected, request_id: str) -> str:
        try:
            exact = is_exact(lambda: self.served.ask(expected, request_id), expected)
        except openai.RateLimitError:
            exact = False
        self.note_replans(request_id)
        return "exact" if exact else "error"

    def stream(self, expected: Expected, request_id: str, leave_after: int = -1) -> str:
        """Every piece that arrives is the reference's, also before an error or before leaving."""
        texts: list[str] = []
        finish = None
        try:
            with self.cluster.client.completions.create(
                **self.served.body(expected),
                stream=True,
                extra_headers={"X-Request-Id": request_id},
            ) as chunks:
                for chunk in chunks:
                    for choice in chunk.choices:
                        texts.append(choice.text)
                        finish = choice.finish_reason or finish
                    self.check_begun("".join(texts), expected)
                    if leave_after == len(texts):
                        return "left"
        except openai.APIError as error:
            if isinstance(error, openai.APIConnectionError):
                raise AssertionError(f"the connection of {request_id} broke") from error
            if not error.message:
                raise AssertionError(f"an error that says nothing: {error!r}") from error
            return "error"
        finally:
            self.note_replans(request_id)
        if "".join(texts) != "".join(expected.texts) or finish != "length":
            raise WrongAnswerError(f"{texts}, {finish}, ended before {expected}")
        return "exact"

    def leave(self, expected: Expected, request_id: str, moment: float) -> str:
        """At a random token, or at a random time."""
        if moment < 0.5:
            return self.stream(expected, request_id, int(moment * 12))
        client = RawClient(
            self.cluster.url, self.served.body(expected, stream=moment < 0.8), request_id
        )
        time.sleep(moment - 0.5)
        client.close()
        return "left"

    def check_begun(self, text: str, expected: Expected) -> None:
        if not "".join(expected.texts).startswith(text):
            raise WrongAnswerError(f"{text!r} instead of {expected}")

    def note_replans(self, request_id: str) -> None:
        answer = self.cluster.admin.get(f"/v1/disagg/requests/{request_id}")
        if answer.status_code == 200:  # else it was refused
            causes = [generation["cause"] for generation in answer.json()["generations"]]
            self.round.causes.update(cause.split(":")[0] for cause in causes if cause)

    # --- after a fault

    def recover(self) -> None:
        """What a supervisor does: start the dead again, until all serve."""
        by = time.monotonic() + SETTLE_S
        while self.start_the_dead() or not self.all_ready():
            assert time.monotonic() < by, f"not all ready: {self.cluster.known()}"
            time.sleep(0.02)

    def start_the_dead(self) -> list[str]:
        """Those that were started; one that ended by itself must say why."""
        dead = sorted(set(ROLES) - set(self.cluster.living()))
        for name in dead:
            process = self.cluster.workers[name]
            if process.popen.returncode != -9:
                why = re.findall(f".*(?:{OWN_ENDS}).*", process.logged())
                assert why, f"{name} ended with {process.popen.returncode}: {process.logged()}"
                self.round.own_ends.append(f"{name}: {why[-1][:120]}")
            share = self.rng.choice(QUARANTINE_SHARES)
            self.cluster.spawn(name, ROLES[name], quarantine_share_max=share)
        for name in dead:
            self.cluster.wait_serving(name)
        return dead

    def all_ready(self) -> bool:
        known = self.cluster.known()
        return all(
            name in known
            and known[name]["info"]["incarnation"]["epoch"] == self.cluster.epochs[name]
            and known[name]["ready"]
            for name in ROLES
        )

    def settle(self) -> None:
        """Nothing is held, all serve, and a request is handed over."""
        by = time.monotonic() + SETTLE_S
        while left := self.unsettled():
            assert time.monotonic() < by, f"after {SETTLE_S} s: {left}"
            time.sleep(0.02)
        for n in range(1000):
            if self.probe(f"probe-{self.served.new_id()}-{n}"):
                break
            assert time.monotonic() < by + SETTLE_S, "no hand-over works any more"
            time.sleep(0.1)
        by = time.monotonic() + SETTLE_S
        while left := self.unsettled():
            assert time.monotonic() < by, f"after {SETTLE_S} s: {left}"
            time.sleep(0.02)

    def unsettled(self) -> list[str]:
        """What is held by whom, and who does not serve."""
        if self.start_the_dead():
            return ["a worker was dead"]
        try:
            left = [] if self.all_ready() else [f"not all ready: {self.cluster.known()}"]
            for name in ROLES:
                status = self.cluster.status(name)
                stats = status.stats
                if (
                    stats.num_blocks_free != self.num_usable[name]
                    or status.holders
                    or stats.num_leases
                    or stats.num_reservations
                    or stats.num_inbound
                    or stats.num_blocks_quarantined
                ):
                    left.append(f"{name} holds: {status}")
        except grpc.RpcError as error:
            return [f"a worker does not answer: {error}"]
        return left

    def probe(self, request_id: str) -> bool:
        """Whether one more request is exact and was pulled, at once."""
        expected = self.prompts()[-1]
        if not is_exact(lambda: self.served.ask(expected, request_id), expected):
            return False
        record = self.cluster.record(request_id)
        (*earlier, last) = record["generations"]
        if earlier or last["local"]:
            return False
        handed_over(record)
        return True
