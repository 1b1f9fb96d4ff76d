"""A test that is the router: it submits to real workers what it likes, and hears what they say."""

import json
import queue
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import StepOutputs
from disagg.messages.reports import PrefillReport, TransferReport
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import Cancel, PartEnded, ToRouterMessage, ToWorkerMessage
from disagg.messages.submit import PeerAddress, PullPlan, Role, Submit
from disagg.wire.session_codec import session_request_to_wire, session_response_from_wire
from disagg.wire.stream_hello import SessionOpen
from disagg.wire.v1 import session_pb2, worker_pb2, worker_pb2_grpc
from disagg.workers.options import WorkerOptions
from tests.process.harness import MODEL, SMALL, START_S, WAIT_S, Process, wait_until


class Session:
    """The router's stream to one worker."""

    def __init__(self, incarnation: Incarnation, address: str) -> None:
        self.peer = PeerAddress(incarnation, address)
        self.heard: list[ToRouterMessage] = []
        self._requests: queue.Queue[session_pb2.SessionRequest | None] = queue.Queue()
        self._channel = grpc.insecure_channel(address)
        opening = session_request_to_wire(SessionOpen("test", incarnation))
        self._requests.put(opening)
        stub = worker_pb2_grpc.WorkerStub(self._channel)
        self._responses = stub.Session(iter(self._requests.get, None))
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: ToWorkerMessage) -> None:
        self._requests.put(session_request_to_wire(message))

    def _read(self) -> None:
        try:
            for response in self._responses:
                self.heard.append(session_response_from_wire(response))
        except grpc.RpcError:
            pass  # the worker was killed

    def close(self) -> None:
        self._requests.put(None)
        self._channel.close()


@dataclass
class Workers:
    """Worker processes without any router but the test."""

    model_dir: Path
    logs: Path
    options: dict[str, Any]
    processes: dict[str, Process] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    num_asked: int = 0

    def start(self, *names: str) -> None:
        """Start workers and open sessions to them."""
        for name in names:
            options = WorkerOptions(
                worker_id=name,
                role="both",
                model_dir=str(self.model_dir),
                model_name=MODEL,
                router_addresses=(),
                **(SMALL | self.options),
            )
            log = self.logs / name
            self.processes[name] = Process("tests.process.worker_main", asdict(options), log)
        for name in names:
            said = json.loads(self.processes[name].wait_line("serving ", START_S)[8:])
            incarnation = Incarnation(name, said["epoch"])
            self.sessions[name] = Session(incarnation, said["address"])

    def tell(self, name: str, line: str) -> int:
        return self.processes[name].command(line)

    def kill(self, name: str) -> None:
        self.processes[name].kill()

    def living(self) -> list[str]:
        return [name for name, one in self.processes.items() if one.popen.poll() is None]

    def restore(self) -> None:
        """Revive the dead; nothing is held, cached or corrupted anywhere."""
        dead = sorted(set(self.processes) - set(self.living()))
        for name in dead:
            self.sessions[name].close()
            self.processes[name].end()
        self.start(*dead)
        for name in self.processes:
            for line in ("pass steps", "pass reads", "pass dones", "intact"):
                self.tell(name, line)
        self.wait_quiescent()
        for name in self.processes:
            for line in ("forget", "poison"):
                self.tell(name, line)

    def status(self, name: str) -> worker_pb2.StatusResponse:
        with grpc.insecure_channel(self.sessions[name].peer.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            return stub.Status(worker_pb2.StatusRequest(), timeout=WAIT_S)

    def counters(self, name: str) -> dict[str, int]:
        return dict(self.status(name).stats.counters)

    def wait_quiescent(self) -> None:
        """Until every living worker's pool is as free as at its start."""

        def free() -> bool:
            return all(not self.status(name).holders for name in self.living())

        wait_until(free, f"nothing to be held: {[self.status(n) for n in self.living()]}")

    def submit(
        self,
        prompt: tuple[int, ...],
        num_tokens: int,
        prefill: str,
        decode: str,
        pull: tuple[str, int] | None = None,
    ) -> "Asked":
        """Start a generation: local where prefill and decode are one worker."""
        self.num_asked += 1
        key = RequestKey(f"direct-{self.num_asked}", self.num_asked)
        submit = Submit(key, Role.LOCAL, prompt, (), b"", SamplingParams(num_tokens))
        plan = PullPlan(self.sessions[pull[0]].peer, pull[1]) if pull else None
        if prefill == decode:
            self.sessions[prefill].send(replace(submit, pull=plan))
        else:
            peers = self.sessions[prefill].peer, self.sessions[decode].peer
            decoding = replace(submit, role=Role.DECODE, peer=peers[0])
            prefilling = replace(submit, role=Role.PREFILL, peer=peers[1], pull=plan)
            self.sessions[decode].send(decoding)
            self.sessions[prefill].send(prefilling)
        return Asked(self, key, len(prompt), num_tokens, prefill, decode)

    def end(self) -> None:
        for session in self.sessions.values():
            session.close()
        for process in self.processes.values():
            process.ask_to_stop()
        for process in self.processes.values():
            process.end()


@dataclass(frozen=True)
class Asked:
    """One generation and what was said about it."""

    workers: Workers
    key: RequestKey
    num_prompt: int
    num_tokens: int
    prefill: str
    decode: str

    def _heard(self) -> Iterator[ToRouterMessage]:
        for name in dict.fromkeys((self.prefill, self.decode)):
            yield from list(self.workers.sessions[name].heard)

    def tokens(self) -> list[int]:
        """Those accepted so far, in order; two workers may say the same one."""
        said: dict[int, int] = {}
        for message in self._heard():
            if isinstance(message, StepOutputs):
                for output in message.outputs:
                    if output.key == self.key:
                        for place, token in enumerate(output.token_ids, output.position):
                            assert said.setdefault(place, token) == token
        places = range(self.num_prompt, self.num_prompt + len(said))
        return [said[place] for place in places if place in said]

    def wait(self) -> list[int]:
        """All its tokens; fails when a part ended."""

        def done() -> bool:
            assert not self.ended(), self.ended()
            return len(self.tokens()) == self.num_tokens

        wait_until(done, f"the tokens of {self}", 60)
        return self.tokens()

    def ended(self) -> list[PartEnded]:
        return [m for m in self._heard() if isinstance(m, PartEnded) and m.key == self.key]

    def pull_report(self) -> TransferReport:
        """The only prefix pull."""

        def reports() -> list[TransferReport]:
            mine = (m for m in self._heard() if isinstance(m, TransferReport) and m.key == self.key)
            return [m for m in mine if m.kind == "prefix"]

        (report,) = wait_until(reports, "the report of the prefix pull")
        return report

    def prefill_report(self) -> PrefillReport:
        """It has a stream of its own: it may come after all tokens."""

        def reports() -> list[PrefillReport]:
            return [m for m in self._heard() if isinstance(m, PrefillReport) and m.key == self.key]

        (report,) = wait_until(reports, "the prefill's report")
        return report

    def cancel(self) -> None:
        for name in {self.prefill, self.decode}:
            self.workers.sessions[name].send(Cancel(self.key, "test"))
