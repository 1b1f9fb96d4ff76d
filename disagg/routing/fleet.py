"""The workers of the fleet: which of them are alive and ready, and how loaded they are."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from disagg.errors import ConfigError
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import KVEvent, SnapshotPart
from disagg.messages.registration import WIRE_MAX, WIRE_MIN, GroupInfo, WorkerInfo
from disagg.messages.router import WorkerMatch
from disagg.messages.stats import WorkerStats
from disagg.routing.bad_pairs import BadPairs
from disagg.routing.estimates.speeds import Speeds
from disagg.routing.fleet_hits import FleetHits
from disagg.routing.generation import Generation
from disagg.routing.keepers import Keepers
from disagg.routing.report_pace import ReportPace, report_pace
from disagg.routing.revisions import Revision, Revisions, RevisionView
from disagg.routing.rooms import Rooms
from disagg.routing.roster import Roster
from disagg.routing.silence import Silence
from disagg.routing.worker import Worker, turn_of
from disagg.routing.worker_bits import bits_of
from disagg.routing.worker_lives import WorkerLives
from disagg.routing.worker_view import WorkerView, view_of

if TYPE_CHECKING:
    from disagg.routing.index import PrefixIndex

ROLES = ("prefill", "decode", "both")
WORKERS_MAX = 4096
_FIXED_FIELDS = ("address", "contract", "groups", "tiers", "revision")
"""Of one incarnation: who knows a living worker's epoch cannot take its place."""


class LostWorker(NamedTuple):
    """A worker that has just left the fleet."""

    incarnation: Incarnation
    heard_ms: int
    """Time of its last registration or message: it was alive then."""


class Fleet:
    """The workers, their load and their blocks.

    Args:
        silent_ms: a worker that sends nothing for so long is lost; also for how long a pair of
            workers that failed to transfer is not chosen again.
        revisions: into which its workers fall; it adds and removes them.
        rooms: told of all that workers say of their limits and loads.
        silent_busy_ms: see `Silence`; None: as ``silent_ms``.

    Attributes:
        roster: the same workers as bits, for plans.
        speeds: what was measured of the workers and of the links between them.
        bad_pairs: of workers, told of transfers that failed.
        keepers: of names that routers claim, all connected workers.
    """

    def __init__(
        self,
        silent_ms: int,
        revisions: Revisions,
        rooms: Rooms,
        silent_busy_ms: int | None = None,
    ) -> None:
        self.revisions = revisions
        self.rooms = rooms
        self.roster = Roster()
        self.speeds = Speeds()
        self.bad_pairs = BadPairs(silent_ms)
        self.keepers = Keepers()
        self._silent_ms = silent_ms
        self._silent_busy_ms = silent_ms if silent_busy_ms is None else silent_busy_ms
        self._silence = Silence(silent_ms, self._silent_busy_ms)
        self._workers: dict[str, Worker] = {}
        self._indexes: dict[tuple[str, tuple[GroupInfo, ...]], PrefixIndex] = {}
        """By revision and layout."""
        self._lives = WorkerLives()

    @property
    def report_pace(self) -> ReportPace:
        """How often each worker should report."""
        return report_pace(len(self._workers), self._silent_ms, self._silent_busy_ms)

    def __contains__(self, incarnation: Incarnation) -> bool:
        return self._find(incarnation) is not None

    def register(self, now_ms: int, info: WorkerInfo) -> bool:
        """Take in a registration or heartbeat.

        A worker that is in the fleet keeps its id: it leaves when its session ends or cannot be
        opened, or when it is silent, and only then its next life gets in.

        Returns:
            Whether a connection to it is wanted.

        Raises:
            WorkerIdTakenError: another incarnation has this id, or has had it since; nothing
                changed.
            ConfigError: it does not fit its revision; nothing changed.
        """
        known = self._workers.get(info.incarnation.worker_id)
        if known is not None and known.info == info:
            self._silence.heard(now_ms, known)
            return False
        self._lives.check(info, known.info if known is not None else None)
        self._check(info)
        index = self._indexes.get((info.revision, info.groups))
        if index is None:
            from disagg.routing.index import PrefixIndex  # imports numpy, as no command has to

            index = PrefixIndex(info.groups, info.contract.hash_block_tokens, self.roster.bits)
        if known is None and len(self._workers) >= WORKERS_MAX:
            raise ConfigError(f"more than {WORKERS_MAX} workers", param="worker_id")
        if known is not None and known.info.incarnation == info.incarnation:
            for name in _FIXED_FIELDS:
                if getattr(known.info, name) != getattr(info, name):
                    raise ConfigError(f"a worker's {name} cannot change in an epoch", param=name)
            known.info = info  # a new role or new limits
            self._silence.heard(now_ms, known)
            self.roster.changed(known)
            self.rooms.put(self.roster.bits.of_one(info.incarnation), known)
            return False
        self._lives.begin(info.incarnation)
        info = self.revisions.add(info)
        self._indexes[info.revision, info.groups] = index
        tiers = [tier.num_blocks for tier in info.tiers]
        index.add(info.incarnation, info.num_blocks, tiers)
        worker = self._workers[info.incarnation.worker_id] = Worker(
            info, index, now_ms, turn=turn_of(self.rooms.router, info.incarnation.worker_id)
        )
        worker.own_tokens = self.rooms.prefill_tokens(info.incarnation)  # it may be back
        worker.pulse = self._silence.pulse(now_ms, info.incarnation)
        self.bad_pairs.begins(info.incarnation)
        self.roster.add(worker)
        self.rooms.put(self.roster.bits.of_one(info.incarnation), worker)
        return True

    def claimed(self, now_ms: int, info: WorkerInfo) -> Incarnation | None:
        """The worker to be told that another one claims its id; at most once per ``silent_ms``."""
        holder = self._workers.get(info.incarnation.worker_id)
        if holder is None or not holder.connected:
            return None
        if holder.told_ms is not None and now_ms - holder.told_ms < self._silent_ms:
            return None
        holder.told_ms = now_ms
        return holder.info.incarnation

    def remove(self, incarnation: Incarnation) -> LostWorker:
        """Forget a worker and its blocks; it may register again."""
        worker = self._workers.pop(incarnation.worker_id)
        self._own(self.rooms.remove(incarnation))
        self.roster.remove(worker)
        self.keepers.remove(incarnation)
        self.speeds.forget(incarnation)
        worker.index.remove(incarnation)
        self.revisions.remove(worker.info)
        if not worker.index:
            del self._indexes[worker.info.revision, worker.info.groups]
        return LostWorker(incarnation, worker.heard_ms)

    def connected(self, now_ms: int, incarnation: Incarnation) -> None:
        """The worker's session is open; it takes requests once its stats have ``ready`` set."""
        worker = self._find(incarnation)
        if worker is not None:
            if not worker.connected:
                self.keepers.add(incarnation)
            worker.connected = True
            self._silence.heard(now_ms, worker)
            self.roster.loaded(worker)

    def note_alive(self, now_ms: int, incarnation: Incarnation) -> bool:
        """A message of the worker arrived; False for an incarnation that is not in the fleet."""
        worker = self._find(incarnation)
        if worker is None:
            return False
        if worker.heard_ms != now_ms:  # the messages of a batch are one sign of life
            self._silence.heard(now_ms, worker)
        return True

    def update(self, now_ms: int, incarnation: Incarnation, stats: WorkerStats) -> None:
        """Keep a worker's stats; they include what was planned before them."""
        worker = self._find(incarnation)
        if worker is not None:
            worker.stats = stats
            if not stats.stalled:
                worker.stalled_since_ms = None
            elif worker.stalled_since_ms is None:
                worker.stalled_since_ms = now_ms
            worker.own_tokens_told = sum(
                load.num_prefill_tokens for load in stats.loads if load.router == self.rooms.router
            )
            worker.planned_requests = worker.planned_tokens = 0
            worker.planned_prompts = worker.planned_decodes = 0
            self.speeds.stats(now_ms, worker, stats)
            self.roster.loaded(worker)
            self.rooms.put(self.roster.bits.of_one(incarnation), worker)

    def has_stalled(self, now_ms: int, incarnation: Incarnation, ms: int) -> bool:
        """Whether its step has taken too long for ``ms`` by its stats, from the first such ones."""
        worker = self._find(incarnation)
        since_ms = worker.stalled_since_ms if worker is not None else None
        return since_ms is not None and now_ms - since_ms >= ms

    def planned(self, incarnation: Incarnation, num_tokens: int, *, decodes: bool) -> None:
        """Count a request submitted to the worker.

        Args:
            incarnation: of the worker.
            num_tokens: that it has to prefill for it; 0 where another worker does.
            decodes: it decodes it as well.
        """
        worker = self._find(incarnation)
        if worker is not None:
            self._silence.planned(worker)
            worker.planned_requests += 1
            worker.planned_tokens += num_tokens
            worker.planned_prompts += num_tokens > 0
            worker.planned_decodes += decodes
            self.roster.loaded(worker)

    def count(self, request_id: str, generation: Generation) -> None:
        """A request has begun there, was planned anew, or its prompt is computed."""
        self._own(self.rooms.count(request_id, generation))

    def end(self, request_id: str, generation: Generation) -> None:
        """A request has ended; unknown ones are ignored."""
        self._own(self.rooms.end(request_id, generation))

    def received(self, incarnation: Incarnation, number: int) -> bool:
        """A generation's submit has come to a worker; whether that makes room somewhere."""
        changed = self.rooms.received(incarnation, number)
        self._own(changed)
        return bool(changed)

    def kv_events(
        self,
        incarnation: Incarnation,
        first_sequence: int,
        snapshot: SnapshotPart | None,
        events: Sequence[KVEvent],
    ) -> bool:
        """Take a worker's cache events into its index; False when some before them are missing."""
        worker = self._find(incarnation)
        if worker is None:
            return True  # its streams are being closed; nothing to catch up with
        return worker.index.apply(incarnation, first_sequence, snapshot, events)

    def kv_sequence(self, incarnation: Incarnation) -> int:
        """Number of the next cache event wanted of the worker."""
        worker = self._find(incarnation)
        return 0 if worker is None else worker.index.next_sequence(incarnation)

    def silent(
        self, now_ms: int, awaited: Callable[[], Container[Incarnation]] = tuple
    ) -> list[Incarnation]:
        """Workers that are lost, as nothing came from them for too long; see `Silence.lost`."""
        return self._silence.lost(now_ms, self._workers.values(), awaited)

    def match(self, revision: Revision, num_tokens: int, hashes: Sequence[bytes]) -> FleetHits:
        """The prefix of a prompt that the cache and tiers of each worker of a revision hold.

        Found out as far as somebody asks, so valid until a worker's next event.
        """
        return FleetHits(
            [
                index.match(num_tokens, hashes)
                for (name, _), index in self._indexes.items()
                if name == revision.name
            ]
        )

    def matches(
        self, revision: Revision, num_tokens: int, hashes: Sequence[bytes]
    ) -> tuple[WorkerMatch, ...]:
        """What each ready worker of a revision holds of a prompt, longest usable prefix first.

        ``usable_tokens`` is at most ``num_tokens - 1``: a prefill computes at least one token.
        """
        hits, found = self.match(revision, num_tokens, hashes), []
        for bit in bits_of(self.ready_in(revision)):
            info = self.roster.worker(bit).info
            hit = hits[info.incarnation]
            found.append(
                WorkerMatch(info.incarnation, info.role, hit.usable_tokens, hit.group_tokens)
            )
        return tuple(sorted(found, key=lambda m: (-m.usable_tokens, m.worker)))

    def ready_in(self, revision: Revision) -> int:
        """Bits of its ready workers; 0 once it has gone, whoever has its name now."""
        if revision not in self.revisions:
            return 0
        return self.roster.ready & self.roster.in_revision(revision.name)

    @property
    def full_roles(self) -> frozenset[str]:
        """Roles that have ready workers, none of which has room for one more request."""
        roles = {role: self.roster.of_role(role) & self.roster.ready for role in ROLES}
        return frozenset(
            role for role, bits in roles.items() if bits and not bits & self.rooms.roomy
        )

    def max_model_tokens(self, revision: Revision) -> int:
        """Longest prompt plus output that some ready worker of it can end; 0 without one."""
        return max(self._sizes(self.ready_in(revision)), default=0)

    def default_model_tokens(self, revision: Revision) -> int:
        """Length to which a request grows that sets no bound itself; 0 without a ready worker.

        What all decode workers of comparable size can end, those with at least half as much room
        as the largest: otherwise that one alone, a block larger than the others, would get all
        such requests.
        """
        ready = self.ready_in(revision)
        sizes = self._sizes(ready & self.roster.with_role("decode") or ready)
        return min((size for size in sizes if 2 * size >= sizes[-1]), default=0)

    def _sizes(self, bits: int) -> list[int]:
        """Lengths that these workers can end, shortest first."""
        return [size for size, _ in self.roster.model_tokens.within(bits)]

    def revision_views(
        self, running: Mapping[str, int], waiting: Mapping[str, int]
    ) -> tuple[RevisionView, ...]:
        """All revisions that have a worker or a weight, with the requests there, by name."""
        known = {one.name: one for one in self.revisions}
        return tuple(
            RevisionView(
                name,
                self.revisions.weight(name),
                known[name].contract if name in known else None,
                known[name].num_workers if name in known else 0,
                self.ready_in(known[name]).bit_count() if name in known else 0,
                self.max_model_tokens(known[name]) if name in known else 0,
                known[name].num_requests if name in known else 0,
                running.get(name, 0),
                waiting.get(name, 0),
            )
            for name in sorted({*known, *self.revisions.weights})
        )

    def ready_revisions(self, num_tokens: int = 0) -> set[str]:
        """Names of revisions that have a ready worker: one of that size, if there is any."""
        able = self.roster.model_tokens.at_least(num_tokens) & self.roster.ready
        able = able or self.roster.ready
        return {one.name for one in self.revisions if able & self.roster.in_revision(one.name)}

    def views(self, num_live: dict[Incarnation, int] | None = None) -> Iterator[WorkerView]:
        """Views of all workers at this moment, sorted by id."""
        for _, worker in sorted(self._workers.items()):
            yield view_of(worker, (num_live or {}).get(worker.info.incarnation, 0))

    def _find(self, incarnation: Incarnation) -> Worker | None:
        worker = self._workers.get(incarnation.worker_id)
        return worker if worker is not None and worker.info.incarnation == incarnation else None

    def _own(self, changed: Iterable[Incarnation]) -> None:
        for incarnation in changed:
            worker = self._find(incarnation)
            tokens = self.rooms.prefill_tokens(incarnation)
            if worker is not None and worker.own_tokens != tokens:
                worker.own_tokens = tokens
                self.roster.loaded(worker)

    def _check(self, info: WorkerInfo) -> None:
        if info.role not in ROLES:
            raise ConfigError(
                f"unknown role {info.role!r}; known: {', '.join(ROLES)}", param="role"
            )
        theirs = info.contract
        if theirs.wire_min > WIRE_MAX or theirs.wire_max < WIRE_MIN:
            raise ConfigError(
                f"worker {info.incarnation.worker_id} speaks wire versions {theirs.wire_min} to "
                f"{theirs.wire_max}, this router {WIRE_MIN} to {WIRE_MAX}",
                param="contract",
            )
        self.revisions.check(info)
