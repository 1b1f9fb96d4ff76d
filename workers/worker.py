"""A worker: engine, transport, core and service put together in one process."""

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import grpc

from disagg.errors import ConfigError
from disagg.kv.event_publishing import VllmEventShape
from disagg.kv.hashing import block_hash_key
from disagg.messages.identity import Incarnation
from disagg.messages.registration import Contract
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.tiers.index import TierSetting
from disagg.telemetry.open_files import files_left
from disagg.tls.addresses import check_exposure, parse_ports
from disagg.tls.connections import Connections
from disagg.transfer.read_plan import plan_reads
from disagg.wire.stream_hello import PeerHello
from disagg.wire.v1 import worker_pb2_grpc
from disagg.workers.announcement import Announcement, announced_host, contract_of
from disagg.workers.channel import CHANNEL_OPTIONS
from disagg.workers.checksums import ComputesChecksums
from disagg.workers.control import Control
from disagg.workers.core_of_options import build_core
from disagg.workers.engines.block_tokens import hashed_layout
from disagg.workers.engines.choice import build_engine
from disagg.workers.engines.protocol import Engine, EngineFactory
from disagg.workers.kv_event_publisher import KVEventPublisher
from disagg.workers.options import WorkerOptions
from disagg.workers.peer_links import GrpcPeerLinks
from disagg.workers.pool_region import PoolRegion
from disagg.workers.ranked_checksums import start_checksums
from disagg.workers.registration import RouterAnswers, keep_registered_everywhere
from disagg.workers.request_trace import trace_of_worker
from disagg.workers.router_discovery import RouterDiscovery, RoutersOfCluster
from disagg.workers.service import WorkerService
from disagg.workers.signals import wait_and_handle_signals
from disagg.workers.tiers.copies import TierCopies
from disagg.workers.tiers.kinds import open_tiers
from disagg.workers.tiers.known import known_to_core
from disagg.workers.tiers.protocol import CopiesBlocks
from disagg.workers.tiers.ranked_copies import RankedCopies, open_on_ranks
from disagg.workers.transport import KVTransport, agent_name
from disagg.workers.transport_choice import nixl_transport

log = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
TRANSPORT_CLOSE_S = 2.0
TIERS_CLOSE_S = 5.0
CHECKSUMS_CLOSE_S = 1.0

TransportFactory = Callable[[str, Engine, Callable[[int, str], None], int], KVTransport]
StartCopies = Callable[..., CopiesBlocks]
"""Takes what else `TierCopies` takes, beside tiers and pool."""


class Worker:
    """One incarnation of a worker; a process holds one and ends with it.

    Attributes:
        incarnation: who this is; the epoch is random and new.
        options: what it was started with.
        summary: what it took of its machine, in one line, valid after `start`.
        address: host:port of the gRPC service, valid after `start`.
        failed: why the worker cannot go on, "" while it can.
        role: as which it registers at every heartbeat; what goes on is no part of it.
        routers_of_cluster: who knows the cluster's routers, if there is one; set before `start`.
        control: the control, valid after `start`; to be touched on its loop only.
    """

    def __init__(
        self,
        options: WorkerOptions,
        *,
        engine_factory: EngineFactory = build_engine,
        transport_factory: TransportFactory = nixl_transport,
    ) -> None:
        self.options = options
        self.incarnation = Incarnation(options.worker_id, secrets.token_hex(8))
        self.summary = ""
        self.address = ""
        self.failed = ""
        self.role = options.role
        self.control: Control | None = None
        self.routers_of_cluster: RoutersOfCluster | None = None
        self._answers = RouterAnswers()
        self._engine_factory = engine_factory
        self._transport_factory = transport_factory
        self._failed_event = threading.Event()
        self._serving = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    @property
    def registrations(self) -> dict[str, str]:
        """Why no router has it, by the router's address; "" of one that has; on any thread.

        Who has registered it dials it, and plans nothing here before that has succeeded. Which
        session is whose is not known here, so one session speaks for all that have registered it.
        """
        answers, control = self._answers.refusals.copy(), self.control
        if control is not None and control.num_sessions:
            return answers
        undialled = f"registered, but it has not connected to {self.address}"
        return {address: why or undialled for address, why in answers.items()}

    def start(self) -> None:
        """Load the model and serve; returns when the service accepts connections.

        Raises:
            ConfigError: the options, checkpoint or address cannot be used.
        """
        check_exposure(
            "worker.host",
            self.options.host,
            self.options.tls_directory,
            allow_insecure=self.options.allow_insecure,
        )
        self._connections = Connections(self.options.tls_directory)
        self._trace = trace_of_worker(self.options, self.incarnation)
        self._engine = self._engine_factory(self.options)
        self._hash_key = block_hash_key(self.options.hash_key, self._engine.fingerprint)
        self._layout = hashed_layout(self._engine.layout, self.options.hash_block_tokens)
        self.summary = self._engine.summary
        log.info("worker %s takes %s", self.options.worker_id, self.summary)
        self._thread.start()
        if not self._serving.wait(START_TIMEOUT_S) or self.failed:
            raise ConfigError(f"worker {self.options.worker_id} did not start: {self.failed}")

    def wait_failed(self, timeout_s: float | None = None) -> bool:
        """Block until the worker failed or stopped; False when the time is over first."""
        return wait_and_handle_signals(self._failed_event, timeout_s)

    def drain(self) -> None:
        """Take no new work, let what goes on end, then stop; `wait_failed` waits for that.

        What still goes on after ``drain_timeout_ms`` is planned anew by its router.
        """
        control, loop = self.control, self._loop
        if control is not None and loop is not None:
            log.info("worker %s drains", self.options.worker_id)
            _call_soon(loop, control.drain, self.options.drain_timeout_ms)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Stop serving; False when that took longer.

        READs that are still in progress are named in `failed` and end with the process only.
        """
        if self._loop is not None and self._stop is not None:
            _call_soon(self._loop, self._stop.set)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- on the control thread

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            log.exception("worker %s failed", self.options.worker_id)
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            self._failed_event.set()
            self._serving.set()

    def _fail(self, reason: str) -> None:
        log.error("worker %s cannot go on: %s", self.options.worker_id, reason)
        self.failed = self.failed or reason
        self._failed_event.set()

    async def _serve(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        options, engine = self.options, self._engine
        contract = contract_of(engine, self._layout, self._hash_key, options.checksums)
        tiers, start_copies = await asyncio.to_thread(self._open_tiers, contract)
        core = build_core(self.incarnation, options, engine, self._layout, self._hash_key, tiers)
        tier_copies = self._tier_copies(start_copies)
        checksums = await asyncio.to_thread(self._start_checksums, loop)
        publisher = self._kv_event_publisher(core)
        transport = self._transport_factory(
            agent_name(self.incarnation),
            engine,
            lambda read_id, error: _call_soon(loop, control.read_done, read_id, error),
            options.read_handle_bytes_max,
        )
        control = self.control = Control(
            core,
            engine,
            transport,
            self._fail,
            self._trace,
            tier_copies,
            checksums,
            on_drained=self._stop.set,
            report_pace_ms=lambda: self._answers.stats_ms,
            routers_max=options.routers_max,
            step_stuck_ms=options.step_stuck_ms,
            step_slow_ms=options.step_slow_ms,
        )
        server = self._connections.server(CHANNEL_OPTIONS, files_left(0))
        port = self._listen(server)
        self.address = f"{announced_host(options.host)}:{port}"
        announcement = Announcement(
            self.incarnation, options, engine, self._layout, self._hash_key, self.address
        )
        hello = announcement.hello(transport.local_pools())

        def know_peer(who: Incarnation, theirs: PeerHello) -> None:
            plan = plan_reads(theirs.contract, hello.contract)
            control.peer_known(who, plan)
            transport.add_peer(agent_name(who), theirs.pools, plan)

        links = GrpcPeerLinks(
            self.incarnation,
            hello,
            on_hello=know_peer,
            on_message=control.peer_message,
            on_lost=control.peer_lost,
            connections=self._connections,
        )
        service = WorkerService(self.incarnation, lambda: self.role, control, links)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
        control.start(links)
        await server.start()
        info = announcement.worker_info(core)
        discovery = RouterDiscovery(options.router_addresses, self.routers_of_cluster)
        registering = keep_registered_everywhere(
            discovery,
            lambda: replace(info, role=self.role),
            options.heartbeat_ms,
            options.discovery_ms,
            self._connections,
            self._answers,
        )
        tasks = [
            asyncio.create_task(registering, name="routers"),
            asyncio.create_task(self._connections.watch_expiry(), name="certificate"),
        ]
        log.info(
            "worker %s (%s) serves on %s, epoch %s",
            *(options.worker_id, options.role, self.address, self.incarnation.epoch),
        )
        if publisher is not None:
            events = publisher.run(lambda: control.changed)
            tasks.append(asyncio.create_task(events, name="KV events"))
        for task in tasks:
            task.add_done_callback(self._task_ended)
        self._serving.set()
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if publisher is not None:
            publisher.close()
        await links.close()
        await server.stop(grace=0.5)
        await control.stop()
        if tier_copies and not await asyncio.to_thread(tier_copies.close, TIERS_CLOSE_S):
            self._fail("a tier still copies; only the end of the process ends that")
        if checksums:
            await asyncio.to_thread(checksums.close, CHECKSUMS_CLOSE_S)
        if not await asyncio.to_thread(transport.close, TRANSPORT_CLOSE_S):
            self._fail("READs are still in progress; only the end of the process ends them")

    def _listen(self, server: grpc.aio.Server) -> int:
        """Bind the first free port of those that are allowed."""
        host, refused = self.options.host, ""
        for port in parse_ports(self.options.port):
            try:
                return self._connections.listen(server, f"{host}:{port}")
            except RuntimeError as error:
                refused = str(error)
        raise ConfigError(
            f"worker.port: no port of {self.options.port} is free on {host}: {refused}",
            param="worker.port",
        )

    def _kv_event_publisher(self, core: WorkerCore) -> KVEventPublisher | None:
        if not self.options.kv_events_endpoint:
            return None
        publisher = KVEventPublisher(
            core.kv.events,
            VllmEventShape(core.kv.layout.groups),
            endpoint=self.options.kv_events_endpoint,
            replay_endpoint=self.options.kv_events_replay_endpoint,
        )
        log.info("worker %s publishes KV events at %s", self.options.worker_id, publisher.endpoint)
        return publisher

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            self._fail(f"{task.get_name()}: {task.exception()!r}")

    def _open_tiers(self, contract: Contract) -> tuple[tuple[TierSetting, ...], StartCopies | None]:
        """Open the tiers, here or in the ranks; returns what they have, and what copies."""
        settings, region = self.options.tiers, self._engine.region
        if not settings:
            return (), None
        if isinstance(region, PoolRegion):
            tiers = open_tiers(settings, contract)
            return known_to_core(tiers, contract), partial(TierCopies, tiers, region)
        ranks = region.connect_tiers()
        known = open_on_ranks(ranks, settings, contract)
        return known, partial(RankedCopies, ranks, on_failed=self._fail)

    def _tier_copies(self, start: StartCopies | None) -> CopiesBlocks | None:
        if start is None:
            return None

        def control() -> Control:
            assert self.control is not None, "copies begin with the control's first event"
            return self.control

        return start(
            lambda *written: control().tier_written(*written),
            lambda *read: control().tier_read(*read),
            asyncio.get_running_loop(),
            on_cleared=lambda *cleared: control().tier_cleared(*cleared),
        )

    def _start_checksums(self, loop: asyncio.AbstractEventLoop) -> ComputesChecksums | None:
        if not self.options.checksums:
            return None

        def known(request_id: int, checksums: Sequence[int]) -> None:
            assert self.control is not None, "they begin with the control's first event"
            with contextlib.suppress(RuntimeError):  # a loop that is closed needs no news
                loop.call_soon_threadsafe(self.control.checksums_known, request_id, checksums)

        return start_checksums(self._engine.region, known, self._fail)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Hop to the loop; a loop that is gone needs no news."""
    with contextlib.suppress(RuntimeError):  # closed, maybe in this moment
        loop.call_soon_threadsafe(call, *args)
