"""Routers of a few lines: every request goes where its script says."""

from dataclasses import replace

from disagg.checking.explorer.setting import Request, Setting
from disagg.checking.explorer.tokens import Vocabulary
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import StepOutputs
from disagg.messages.reports import TransferKind, TransferReport
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import Cancel, PartEnded, ToRouterMessage, router_of
from disagg.messages.submit import PeerAddress, PullPlan, Role, Submit
from disagg.routing.actions import RouterAction, ToWorker


class ScriptedRouter:
    """Submits everything at once; what one worker ends it cancels wherever it has a part.

    A hand-over whose decode worker is lost after token 0, and before its commit was heard of, is
    submitted once more if its script names a worker that takes over. It stands for all routers, of
    which none does anything for another's requests.

    Attributes:
        known: workers that it believes alive.
        gone: routers that have vanished.
        over: generations that it has ended.
    """

    def __init__(self, setting: Setting, vocabulary: Vocabulary, lives: list[Incarnation]) -> None:
        self._setting = setting
        self._vocabulary = vocabulary
        self._lives = lives
        self.known = [] if setting.tables_alone else list(lives)
        self.gone: list[str] = []
        self.over: list[RequestKey] = []
        self._begun: list[RequestKey] = []
        """Their token 0 was heard."""
        self._handed_over: list[RequestKey] = []
        self._taken_over: list[RequestKey] = []

    def start(self) -> list[RouterAction]:
        """Everything is submitted, to one worker after the other."""
        actions: list[RouterAction] = []
        for side, life in enumerate(self._lives):
            for number, request in enumerate(self._setting.requests):
                if side in request.sides:
                    actions.append(ToWorker(life, self._submit(number, request, side)))
        return actions

    def from_worker(
        self, now_ms: int, sender: Incarnation, message: ToRouterMessage
    ) -> list[RouterAction]:
        """A part that a worker ended; what it says besides counts for take-overs only."""
        if router_of(message) in self.gone:
            return []
        match message:
            case PartEnded(key) if self._setting.echoes:
                return self._end(key) if key.generation == 1 else self._end_all(key)
            case StepOutputs(outputs):
                self._note(self._begun, [one.key for one in outputs])
            case TransferReport(key, kind=TransferKind.HANDOVER):
                self._note(self._handed_over, [key])
        return []

    def cancel(self, now_ms: int, request_id: str, reason: str) -> list[RouterAction]:
        """The client goes away."""
        return self._end_all(RequestKey(request_id, 1))

    def vanish(self, now_ms: int, router: str) -> list[RouterAction]:
        """A router is gone, and says nothing more; what it asked for is nobody's business here."""
        self.gone.append(router)
        return []

    def session_lost(self, now_ms: int, lost: Incarnation) -> list[RouterAction]:
        """What the worker had a part in ends, or is taken over by another one."""
        self.known.remove(lost)
        actions: list[RouterAction] = []
        for number, request in enumerate(self._setting.requests):
            key, second = self._setting.keys[number], request.taken_over_by
            waits = key in self._begun and key not in (*self._handed_over, *self.over)
            if waits and second is not None and lost == self._lives[request.decode]:
                if key not in self._taken_over:
                    self._taken_over.append(key)
                    actions.append(self._take_over(number, request, second))
            elif any(lost == self._lives[side] for side in request.sides):
                actions += self._end_all(key)
        return actions

    # -- inside -------------------------------------------------------------------------------

    def _submit(self, number: int, request: Request, side: int) -> Submit:
        sampling = SamplingParams(max_tokens=request.max_tokens)
        plain = Submit(self._setting.keys[number], Role.LOCAL, request.prompt, (), b"", sampling)
        if request.pull_from is not None and side == request.prefill:
            owner = PeerAddress(self._lives[request.pull_from], "")
            plain = replace(plain, pull=PullPlan(owner, len(request.prompt) - 1))
        if request.prefill == request.decode:
            return plain
        other = request.decode if side == request.prefill else request.prefill
        role = Role.PREFILL if side == request.prefill else Role.DECODE
        return replace(plain, role=role, peer=PeerAddress(self._lives[other], ""))

    def _take_over(self, number: int, request: Request, second: int) -> ToWorker:
        again = self._submit(number, request, request.decode)
        token_0 = self._vocabulary.sample(1, request.prompt)
        submit = replace(
            again,
            key=again.key._replace(generation=2),
            token_ids=(*request.prompt, token_0),
            sampling=SamplingParams(max_tokens=request.max_tokens - 1),
            take_over=again.key,
        )
        return ToWorker(self._lives[second], submit)

    def _end_all(self, key: RequestKey) -> list[RouterAction]:
        """Every generation of a request."""
        first = key._replace(generation=1)
        again = self._end(key._replace(generation=2)) if first in self._taken_over else []
        return [*again, *self._end(first)]

    def _end(self, key: RequestKey) -> list[RouterAction]:
        """A generation is over: it is cancelled at both its workers."""
        if key in self.over:
            return []
        self.over = sorted([*self.over, key])
        request = self._request(key)
        sides: tuple[int | None, ...] = request.sides
        if key.generation == 2:
            sides = (request.prefill, request.taken_over_by)
        lives = [self._lives[side] for side in sides if side is not None]
        return [ToWorker(life, Cancel(key, "over")) for life in lives if life in self.known]

    def _note(self, keys: list[RequestKey], new: list[RequestKey]) -> None:
        """What take-overs depend on is remembered where there may be one."""
        for key in new:
            request = self._request(key)
            if key.generation == 1 and request.taken_over_by is not None and key not in keys:
                keys.append(key)
                keys.sort()

    def _request(self, key: RequestKey) -> Request:
        number = self._setting.keys.index(key._replace(generation=1))
        return self._setting.requests[number]
