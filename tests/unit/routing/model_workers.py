"""A seeded world: the production router against workers that fail in every way they may.

Tokens are a function of position *and generation*, so that a token of an old generation that
slips through is seen. Each worker's two streams are ordered; nothing else is.
"""

import random
from collections import deque

from disagg.errors import CapacityError, RemoteFault
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import FinishReason, SequenceOutput, StepOutputs
from disagg.messages.registration import WorkerInfo
from disagg.messages.reports import PrefillReport
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import (
    Cancel,
    EndReason,
    PartEnded,
    ToRouterMessage,
    ToWorkerMessage,
    WorkerIdClaimed,
)
from disagg.messages.submit import Role, Submit
from disagg.routing.actions import (
    Connect,
    Deliver,
    Disconnect,
    Fail,
    NewRequest,
    RouterAction,
    ToWorker,
)
from disagg.routing.core import RouterCore
from disagg.routing.options import RoutingOptions
from disagg.routing.policy.registry import DEFAULT_POLICY
from tests.unit.routing.builders import HASHER, hashes_of, worker
from tests.unit.routing.measured import stats, transfer
from tests.unit.routing.model_parts import Client, Part, Worker, is_stop, peer_of, token_at

FAULTS = [r for r in EndReason if r is not EndReason.REJECTED]
STEP_MS = 5


class World:
    """One seeded run; every check names the seed."""

    def __init__(
        self,
        seed: int,
        roles: tuple[str, ...] = ("prefill", "decode", "both"),
        *,
        policy: str = DEFAULT_POLICY,
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now_ms = 0
        self.core = RouterCore(
            RoutingOptions(
                hasher_of=lambda _: HASHER.extend,
                replans_max=4,
                requests_max=6,
                request_timeout_ms=20_000,
                records_max=10_000,
                worker_silent_ms=40 * STEP_MS,
                policy=policy,
            )
        )
        self.clients: dict[str, Client] = {}
        self.submitted: set[tuple[Incarnation, RequestKey]] = set()
        self.workers: dict[str, Worker] = {}
        self.num_taken_over = 0
        self.past: deque[tuple[Incarnation, ToRouterMessage]] = deque(maxlen=50)
        for number, role in enumerate(roles):
            name = f"{role}{number}"
            lag = self.rng.choice((0.0, 0.0, 0.95))
            self.workers[name] = Worker(worker(name, role), lag=lag)
        self.heartbeats()

    def check(self, holds: bool, what: str) -> None:
        assert holds, f"seed {self.seed}: {what}"

    # --- the shell

    def perform(self, actions: list[RouterAction]) -> None:
        for action in actions:
            match action:
                case Connect(info):
                    self.connect(info)
                case Disconnect(incarnation):
                    peer = self.workers[incarnation.worker_id]
                    if peer.info.incarnation == incarnation:
                        peer.end_session()
                        peer.up.clear()
                case ToWorker(incarnation, message):
                    self.send(incarnation, message)
                case Deliver():
                    client = self.clients[action.request_id]
                    self.check(not client.ended, f"{action} after the end")
                    client.tokens += action.token_ids
                    client.finish = str(action.finish_reason)
                case Fail():
                    client = self.clients[action.request_id]
                    self.check(not client.ended, f"{action} after the end")
                    client.error = action.error

    def connect(self, info: WorkerInfo) -> None:
        peer = self.workers[info.incarnation.worker_id]
        if not peer.runs or peer.info != info:
            self.perform(self.core.session_lost(self.now_ms, info.incarnation))
            return
        peer.session = True
        self.perform(self.core.session_up(self.now_ms, info.incarnation))
        peer.up.append(stats())

    def send(self, incarnation: Incarnation, message: ToWorkerMessage) -> None:
        if isinstance(message, WorkerIdClaimed):
            return  # it starts and ends nothing
        assert isinstance(message, Submit | Cancel)
        pair = (incarnation, message.key)
        if isinstance(message, Submit):
            client = self.clients[message.key.request_id]
            self.check(pair not in self.submitted, f"{message.key} submitted twice")
            expected = (*client.request.token_ids, *client.tokens)
            self.check(message.token_ids == expected, f"{message.key} starts from other tokens")
            self.check(message.hashes == hashes_of(expected), f"{message.key} has other hashes")
            self.submitted.add(pair)
            if message.take_over is not None:
                # Its owner may hold the lease under the new key by then.
                self.submitted.add((peer_of(message), message.key))
        else:
            self.check(pair in self.submitted, f"{message.key} cancelled before its submit")
        peer = self.workers[incarnation.worker_id]
        if peer.info.incarnation == incarnation and peer.session:
            peer.down.append(message)

    def heartbeats(self) -> None:
        for peer in self.workers.values():
            if peer.runs:
                self.perform(self.core.register(self.now_ms, peer.info))

    def receive(self, incarnation: Incarnation, message: ToRouterMessage) -> None:
        self.past.append((incarnation, message))
        self.perform(self.core.from_worker(self.now_ms, incarnation, message))

    # --- what may happen

    def ask(self) -> None:
        name = f"r{len(self.clients)}"
        tokens = tuple(self.rng.randrange(50) for _ in range(self.rng.randint(1, 12)))
        sampling = SamplingParams(self.rng.randint(1, 9), seed=1)
        request = NewRequest(name, tokens, hashes_of(tokens), b"", sampling)
        self.clients[name] = Client(request)
        try:
            self.perform(self.core.generate(self.now_ms, request))
        except (CapacityError, RemoteFault):
            del self.clients[name]

    def leave(self) -> None:
        live = [c for c in self.clients.values() if not c.ended]
        if live:
            client = self.rng.choice(live)
            request_id = client.request.request_id
            self.perform(self.core.cancel(self.now_ms, request_id, "client went away"))
            client.gone = True

    def deliver_down(self, peer: Worker) -> None:
        if peer.down and peer.runs:
            message = peer.down.popleft()
            if isinstance(message, Submit):
                peer.parts[message.key] = Part(message)
            elif isinstance(message, Cancel):
                peer.parts.pop(message.key, None)

    def deliver_up(self, peer: Worker) -> None:
        if peer.up:
            self.receive(peer.info.incarnation, peer.up.popleft())

    def repeat(self) -> None:
        """A message of the past once more."""
        if self.past:
            incarnation, message = self.rng.choice(list(self.past))
            self.perform(self.core.from_worker(self.now_ms, incarnation, message))

    def advance(self, peer: Worker) -> None:
        if not peer.runs or not peer.parts:
            return
        part = self.rng.choice(list(peer.parts.values()))
        if part.submit.role is Role.PREFILL:
            other = self.peer_part(part)
            if part.sealed or other is None:
                return
            self.emit(peer, part, 1)
            num_prompt = len(part.submit.token_ids)
            peer.up.append(PrefillReport(part.submit.key, num_prompt, 0, num_prompt))
        elif part.submit.take_over is not None and not part.pulled:
            self.take_over(peer, part)
        elif part.submit.role is Role.DECODE and not part.pulled:
            other = self.peer_part(part)
            if other is None or not other.sealed:
                return
            part.pulled = True
            owner = self.workers[peer_of(part.submit).worker_id]
            del owner.parts[part.submit.key]  # committed
            report = transfer(part.submit.key, owner.info.incarnation, 4096, 1)
            peer.up.append(report)
            if self.rng.random() < 0.7:
                self.emit(peer, part, 1)
            else:
                part.done = 1  # a worker that does not say token 0 again
        else:
            self.emit(peer, part, self.rng.randint(1, 3))

    def take_over(self, peer: Worker, part: Part) -> None:
        """The lease of an earlier generation, if its owner still has it."""
        key, old = part.submit.key, part.submit.take_over
        assert old is not None
        owner = self.workers[peer_of(part.submit).worker_id]
        alive = owner.info.incarnation == peer_of(part.submit) and owner.runs
        lease = owner.parts.get(old) if alive else None
        if lease is None or not lease.sealed:
            del peer.parts[key]
            peer.up.append(PartEnded(key, EndReason.TAKE_OVER_REFUSED, "none"))
            return
        del owner.parts[old]
        part.pulled = True
        self.num_taken_over += 1
        peer.up.append(transfer(key, owner.info.incarnation, 4096, 1))

    def peer_part(self, part: Part) -> Part | None:
        owner = self.workers[peer_of(part.submit).worker_id]
        if owner.info.incarnation != peer_of(part.submit) or not owner.runs:
            return None
        return owner.parts.get(part.submit.key)

    def emit(self, peer: Worker, part: Part, num_tokens: int) -> None:
        submit = part.submit
        position = len(submit.token_ids) + part.done
        tokens: list[int] = []
        finish = FinishReason.NONE
        while len(tokens) < num_tokens and not finish:
            tokens.append(token_at(position + len(tokens), submit.key.generation))
            part.done += 1
            if is_stop(tokens[-1]):
                finish = FinishReason.STOP
            elif part.done == submit.sampling.max_tokens:
                finish = FinishReason.LENGTH
        output = SequenceOutput(submit.key, position, tuple(tokens), (), finish)
        peer.up.append(StepOutputs((output,)))
        if finish:
            del peer.parts[submit.key]

    def fault(self, peer: Worker) -> None:
        """A part ends by itself; sometimes the other worker hears of it first."""
        if not peer.runs or not peer.parts:
            return
        key, part = self.rng.choice(list(peer.parts.items()))
        del peer.parts[key]
        peer.up.append(PartEnded(key, self.rng.choice(FAULTS), "at random"))
        if part.submit.peer and not part.pulled and self.rng.random() < 0.5:
            other = self.workers[peer_of(part.submit).worker_id]
            if self.peer_part(part) is not None:
                del other.parts[key]
                other.up.append(PartEnded(key, EndReason.PEER_ENDED))

    def kill(self, peer: Worker) -> None:
        """It may take messages along, and come back before or after the router noticed."""
        if not peer.alive:
            return
        old = peer.info.incarnation
        peer.end_session()
        while peer.up and self.rng.random() < 0.4:
            self.deliver_up(peer)
        peer.up.clear()
        peer.alive = peer.stopped = False
        noticed = self.rng.random() < 0.5
        if noticed:
            self.perform(self.core.session_lost(self.now_ms, old))
        if self.rng.random() < 0.5:
            self.restart(peer)

    def restart(self, peer: Worker) -> None:
        name, role = peer.info.incarnation.worker_id, peer.info.role
        peer.info = worker(name, role, epoch=f"e{self.rng.getrandbits(60)}")
        peer.alive = True
        self.perform(self.core.register(self.now_ms, peer.info))

    def cut(self, peer: Worker) -> None:
        """The session breaks, the worker lives on."""
        if peer.session:
            peer.end_session()
            self.perform(self.core.session_lost(self.now_ms, peer.info.incarnation))

    def step(self) -> None:
        self.now_ms += STEP_MS
        peer = self.rng.choice(list(self.workers.values()))
        draw = self.rng.random()
        if draw < 0.06:
            self.ask()
        elif draw < 0.07:
            self.leave()
        elif draw < 0.30:
            self.deliver_down(peer)
        elif draw < 0.55:
            head_lags = bool(peer.up) and isinstance(peer.up[0], StepOutputs)
            if not head_lags or self.rng.random() >= peer.lag:
                self.deliver_up(peer)
        elif draw < 0.85:
            self.advance(peer)
        elif draw < 0.90:
            self.repeat()
        elif draw < 0.92:
            self.fault(peer)
        elif draw < 0.93:
            self.kill(peer)
        elif draw < 0.935:
            self.cut(peer)
        elif draw < 0.94 and peer.alive:
            peer.stopped = not peer.stopped
        elif draw < 0.96 and not peer.alive:
            self.restart(peer)
        else:
            self.heartbeats()
            self.perform(self.core.tick(self.now_ms))

    # --- the end

    def settle(self) -> None:
        """No more faults: everything must come to an end by itself."""
        for peer in self.workers.values():
            peer.stopped = False
        for _ in range(400):
            self.now_ms += STEP_MS
            self.heartbeats()
            self.perform(self.core.tick(self.now_ms))
            for peer in self.workers.values():
                while peer.down:
                    self.deliver_down(peer)
                for _ in range(len(peer.parts)):
                    self.advance(peer)
                while peer.up:
                    self.deliver_up(peer)
            busy = any(peer.parts or peer.down or peer.up for peer in self.workers.values())
            if not self.core.num_live and not busy:
                break
        for client in self.clients.values():
            self.check(client.ended, f"{client.request.request_id} never ended")
            self.check_stream(client)
        for peer in self.workers.values():
            self.check(not peer.parts, f"{peer.info.incarnation} still holds {list(peer.parts)}")

    def check_stream(self, client: Client) -> None:
        """Each generation's own tokens, in order, each position once, stopped where it should."""
        record = self.core.record(client.request.request_id)
        assert record is not None
        position = len(client.request.token_ids)
        expected: list[int] = []
        for generation in record.generations:
            base = position + len(expected)
            self.check(generation.num_prompt_tokens == base, f"{generation} starts elsewhere")
            end = base + generation.num_tokens
            expected += [token_at(p, generation.generation) for p in range(base, end)]
        self.check(client.tokens == expected, f"{client.tokens} delivered for {expected}")
        stops = [is_stop(token) for token in client.tokens]
        self.check(not any(stops[:-1]), "went on after a stop token")
        num_max = client.request.sampling.max_tokens
        self.check(len(client.tokens) <= num_max, "more than max_tokens")
        if client.finish == "stop":
            self.check(stops[-1], "stopped without a stop token")
        elif client.finish == "length":
            self.check(len(client.tokens) == num_max, "ended early")
