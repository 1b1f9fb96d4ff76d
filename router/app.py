"""The router: its servers, its start and its end."""

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import replace

from disagg.errors import ConfigError, DisaggError
from disagg.kv.hashing import check_secret
from disagg.router.admin import AdminApp, find_record
from disagg.router.callers import ANYBODY
from disagg.router.cross_origin import App, CrossOrigin
from disagg.router.dispatch import Dispatcher
from disagg.router.followed_servers import FollowedServers
from disagg.router.grpc_service import GrpcService
from disagg.router.http import HttpApp
from disagg.router.http_server import HttpServer
from disagg.router.inherited import BEAT, BEAT_S, BOUND, SERVING, Inherited
from disagg.router.key_check import KeyCheck
from disagg.router.keys_file import KeysFile
from disagg.router.metrics import Metrics
from disagg.router.open_streams import OpenStreams
from disagg.router.options import RouterOptions, check_origins, why_exposed
from disagg.router.ports import bind_ports, bracketed
from disagg.router.request_preparation import Preparation
from disagg.router.request_spans import RequestSpans
from disagg.router.router_id import name_of_process
from disagg.router.siblings import Siblings
from disagg.router.tokenizer import Tokenizer
from disagg.telemetry.exporters import exporter_named_in, tracer_for
from disagg.tls.addresses import check_exposure
from disagg.tls.connections import Connections
from disagg.wire.v1.registration_pb2 import RegisterRequest
from disagg.wire.v1.router_pb2_grpc import add_RouterServicer_to_server

logger = logging.getLogger(__name__)

WORKERS_WAIT_S = 60.0
"""A router that takes another one's place waits so long for its workers, then it serves."""
STILL_KNOWN_S = 1.0
POLL_S = 0.05


class RouterApp:
    """One router in the running event loop.

    Attributes:
        http_port: bound after `start`.
        admin_port: bound after `start`.
        grpc_port: bound after `start`.
    """

    def __init__(self, options: RouterOptions) -> None:
        """Load the tokenizer; needs no event loop.

        Raises:
            ConfigError: the checkpoint directory has none; the API keys, the certificate or the
                origins of web pages cannot be used; or there are no keys or no certificate, and the
                router would answer a network without having been told to.
        """
        at_fault, why = why_exposed(
            options.host,
            options.admin_host,
            has_keys=bool(options.api_keys_file or options.api_keys),
            allow_unauthenticated=options.allow_unauthenticated,
        )
        if why:
            raise ConfigError(why, param=f"router.{at_fault}")
        check_exposure(
            "router.host",
            options.host,
            options.tls_directory,
            allow_insecure=options.allow_insecure,
        )
        check_secret(options.hash_key)
        check_origins(options.cors_origins)
        self._keys = KeysFile(options)
        self.http_port = options.http_port
        self.admin_port = options.admin_port
        self.grpc_port = options.grpc_port
        self._options = options
        self._stopping = self._is_replaced = False
        self._watching: list[asyncio.Task[None]] = []
        self._connections = Connections(options.tls_directory)
        self._followed = FollowedServers(options)
        self._tokenizer = Tokenizer(
            options.model_dir,
            chat_template=options.chat_template,
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
            prompt_chars_max=options.prompt_bytes_max,
        )
        self._tracer = tracer_for(
            exporter_named_in(os.environ, options.traces),
            "disagg-router",
            {"service.instance.id": secrets.token_hex(8), "disagg.role": "router"},
            options.traces_endpoint,
        )

    async def start(self, inherited: Inherited | None = None) -> None:
        """Bind all ports and serve.

        Args:
            inherited: the HTTP sockets, where another process has bound them. Its next router has
                them at the same time, and the same port for workers.

        Raises:
            ConfigError: a port is taken or the host is not ours.
        """
        options, ring = self._options, self._keys.ring
        if inherited is not None and inherited.folder:
            options = replace(options, name=name_of_process(options.name, inherited.number))
        self._metrics = Metrics(options.model_name)
        self._key_check = KeyCheck(ring, self._metrics, options.streams_per_key_max)
        ports = bind_ports(options, self._connections, inherited, self._key_check)
        self._grpc_server, self.grpc_port = ports.grpc_server, ports.grpc_port
        self.http_port = ports.http.getsockname()[1]
        self.admin_port = ports.admin.getsockname()[1]
        self._metrics.registry.register(self._followed)
        if self._connections.certificate is not None:
            self._metrics.show_certificate(self._connections.expires_s)
        spans = RequestSpans(self._tracer, options.model_name)
        self.dispatcher = Dispatcher(options, self._metrics, self._connections, spans)
        self._preparation = Preparation(options, self._tokenizer, self.dispatcher)
        parts = (options, ring, self._tokenizer, self.dispatcher, self._preparation, self._metrics)
        streams = OpenStreams(options.streams_per_key_max)
        self._siblings: Siblings | None = None
        if inherited is not None and inherited.folder:
            self._siblings = Siblings(inherited.folder, self._take_in, self._find_record)
        tell = None if self._siblings is None else self._siblings.tell
        self._grpc_service = GrpcService(*parts, streams, self._followed.caches, tell)
        add_RouterServicer_to_server(self._grpc_service, self._grpc_server)
        self._admin = AdminApp(options, ring, self.dispatcher, self._metrics, self._siblings)
        self._http = HttpApp(*parts, streams)
        clients: App = self._http
        if options.cors_origins:
            clients = CrossOrigin(clients, options.cors_origins)
        self._http_server = HttpServer(clients, options)
        self._admin_server = HttpServer(self._admin, options)
        await self._grpc_server.start()
        if self._siblings is not None:
            await self._siblings.start()
        if inherited is not None:
            if not inherited.tell(BOUND):  # before this process could hear of its parent's end
                raise ConfigError("who started this router has gone", param="--inherited")
            if inherited.waits:
                await self._until_ready()
        self._tasks = [
            asyncio.create_task(self._http_server.serve([ports.http]), name="http"),
            asyncio.create_task(self._admin_server.serve([ports.admin]), name="admin"),
        ]
        self._watching = [asyncio.create_task(self._connections.watch_expiry(), name="certificate")]
        if options.api_keys_file:
            self._watching.append(asyncio.create_task(self._keys.watch(), name="keys"))
        if options.kv_event_endpoints:
            following = self._followed.run(self.dispatcher.now_ms, self._metrics.task_failed)
            self._watching.append(asyncio.create_task(following, name="followed servers"))
        self._tasks += self._watching
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        await self._http_server.is_up.wait()
        await self._admin_server.is_up.wait()
        logger.info(
            "router serves %s on http://%s:%d, operators on http://%s:%d, workers register at "
            "%s:%d; %s",
            options.model_name,
            bracketed(options.host),
            self.http_port,
            bracketed(options.admin_host),
            self.admin_port,
            bracketed(options.host),
            self.grpc_port,
            "anybody may call" if ring.is_open else "callers need API keys",
        )

        if inherited is not None:
            inherited.tell(SERVING)
            self._watching.append(asyncio.create_task(_beat(inherited), name="beats"))

    def _take_in(self, request: RegisterRequest) -> None:
        """A worker has registered at another process of this port."""
        self._grpc_service.take_in(request)

    def _find_record(self, tenant: str, request_id: str) -> bytes:
        """Another process of this port is asked for a request that it does not know."""
        return find_record(self.dispatcher, replace(ANYBODY, tenant=tenant), request_id)

    async def _until_ready(self) -> None:
        """Wait until requests could be served as well as elsewhere; not for ever."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WORKERS_WAIT_S):
                await _until(lambda: self.dispatcher.ready)

    def give_up_workers(self) -> None:
        """Let workers register with the router that takes this one's place; serve on."""
        if self._is_replaced:
            return
        self._is_replaced = True
        grace_s = self._options.drain_timeout_ms / 1000  # of answers to gRPC clients
        self._watching += [
            asyncio.create_task(self._grpc_server.stop(grace_s), name="workers' port"),
            asyncio.create_task(self._keep_known(), name="known workers"),
        ]
        logger.info("another router takes this one's place")

    async def _keep_known(self) -> None:
        """Workers' heartbeats go to the other router; their sessions show that they live."""
        while True:
            for session in self.dispatcher.sessions:
                with contextlib.suppress(DisaggError):
                    self.dispatcher.register(session.info)
            await asyncio.sleep(STILL_KNOWN_S)

    async def leave(self) -> None:
        """Leave new connections to the router that has taken this one's place.

        Returns when nobody is connected any more, after ``drain_timeout_ms`` at most. Until then
        what comes on connections that there are is answered as ever, and ends them.
        """
        self._http_server.is_leaving = True
        await self._http_server.stop_listening()
        await self._admin_server.stop_listening()
        timeout_s = self._options.drain_timeout_ms / 1000
        logger.info(
            "%d connections may go on for %g s", self._http_server.num_connections, timeout_s
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await _until(lambda: not self._http_server.num_connections)
                await self.dispatcher.open_answers.all_closed()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if self._stopping or task.cancelled():
            return
        # The process would look alive and serve nobody, or still serve whose key was revoked.
        logger.error("the task %s ended", task.get_name(), exc_info=task.exception())
        self._metrics.task_failed(task.get_name())
        self.dispatcher.broken.set()

    async def drain(self) -> None:
        """Refuse new requests, unless another router takes them; wait for answers that are due.

        At most ``drain_timeout_ms``; `stop` then ends the rest with an error.
        """
        if self._is_replaced:
            await self.leave()
            return
        self.dispatcher.drain()
        timeout_s = self._options.drain_timeout_ms / 1000
        answers = self.dispatcher.open_answers
        logger.info("draining: %d requests may go on for %g s", len(answers), timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await answers.all_closed()
                await _until(lambda: not self._http_server.has_unread)

    async def stop(self) -> None:
        """Accept nothing more, cancel what lives here and at the workers, close; idempotent."""
        if self._stopping:
            return
        self._stopping = True
        self._http_server.should_exit = self._admin_server.should_exit = True
        self._admin.close()
        await self.dispatcher.stop()
        await self._grpc_server.stop(grace=1)
        if self._siblings is not None:
            await self._siblings.stop()
        for watch in self._watching:
            watch.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._preparation.prompts.close()
        self._http.close()
        logger.info("router stopped")


async def _beat(inherited: Inherited) -> None:
    """Let who started this process know that it does not stand still."""
    while True:
        inherited.tell(BEAT)
        await asyncio.sleep(BEAT_S)


async def _until(state: Callable[[], bool]) -> None:
    while True:
        if state():
            return
        await asyncio.sleep(POLL_S)
