"""What the modelled workers and clients of `model_workers` are made of."""

from collections import deque
from dataclasses import dataclass, field

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.registration import WorkerInfo
from disagg.messages.session import ToRouterMessage, ToWorkerMessage
from disagg.messages.submit import Role, Submit
from disagg.routing.actions import NewRequest


def token_at(position: int, generation: int) -> int:
    return (position * 7919 + generation * 104729) % 1009


def is_stop(token: int) -> bool:
    return token % 23 == 0


def peer_of(submit: Submit) -> Incarnation:
    assert submit.peer is not None
    return submit.peer.incarnation


@dataclass(slots=True)
class Part:
    submit: Submit
    done: int = 0
    """Tokens emitted."""
    pulled: bool = False

    @property
    def sealed(self) -> bool:
        return self.submit.role is Role.PREFILL and self.done > 0


@dataclass(slots=True)
class Worker:
    info: WorkerInfo
    alive: bool = True
    stopped: bool = False
    session: bool = False
    lag: float = 0.0
    """Chance that tokens stay on the way, so that two streams cross."""
    parts: dict[RequestKey, Part] = field(default_factory=dict)
    down: deque[ToWorkerMessage] = field(default_factory=deque)
    up: deque[ToRouterMessage] = field(default_factory=deque)

    @property
    def runs(self) -> bool:
        return self.alive and not self.stopped

    def end_session(self) -> None:
        """The stream is gone: with it every part, as nobody could cancel them any more."""
        self.session = False
        self.parts.clear()
        self.down.clear()


@dataclass(slots=True)
class Client:
    request: NewRequest
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    error: Exception | None = None
    gone: bool = False

    @property
    def ended(self) -> bool:
        return bool(self.finish or self.error or self.gone)
