"""The router as a process: its log, its signals, its exit code."""

import asyncio
import errno
import logging
import os
import signal
from dataclasses import replace
from typing import Any

from disagg.errors import ConfigError
from disagg.router.app import RouterApp
from disagg.router.inherited import Inherited
from disagg.router.options import FILES_BESIDE, RouterOptions
from disagg.router.tokenizer_loading import do_without_torch
from disagg.telemetry.garbage_collector import spare_garbage_collector
from disagg.telemetry.log_format import configure_logging
from disagg.telemetry.open_files import allow_files

logger = logging.getLogger(__name__)

FORCED_EXIT_CODE = 130
NO_FILES_LOG_S = 10.0


def run(options: RouterOptions, inherited: Inherited | None = None) -> int:
    """Run a router until SIGINT or SIGTERM, then drain it; a second signal ends it at once.

    SIGHUP, where it has inherited its sockets, says that another router is to take its place; else
    it begins the drain, unless it was ignored before.

    Returns:
        The process's exit code: 0 after a clean stop, 1 when it could not go on, 2 when it could
        not start.
    """
    log_as(options)
    do_without_torch()
    try:
        return asyncio.run(serve(RouterApp(with_files(options)), inherited))
    except ConfigError as error:
        logger.error("%s: %s", error.param, error.message)
        return 2


def log_as(options: RouterOptions) -> None:
    """Let this process log to standard error, in the format that is set."""
    configure_logging(
        options.log_format, "%(asctime)s %(levelname)s %(name)s: %(message)s", {"role": "router"}
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


class LoopErrors:
    """Logs what the event loop catches; what asyncio says of each accept without a file, seldom."""

    def __init__(self) -> None:
        self._again_s = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """See `asyncio.loop.set_exception_handler`."""
        error, now_s = context.get("exception"), loop.time()
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif now_s >= self._again_s:
            self._again_s = now_s + NO_FILES_LOG_S
            logger.error("connections wait for a free file (ulimit -Hn): %s", error.strerror)


def with_files(options: RouterOptions) -> RouterOptions:
    """Options by which a client too many is told so, as a file too many is said to nobody."""
    num_files, num_connections = allow_files(), options.connections_max
    num_left = max(num_files - FILES_BESIDE, num_files // 2)
    if num_left >= num_connections:
        return options
    logger.warning(
        "%d files may be open (ulimit -Hn), so %d connections of clients are taken and not "
        "limits.connections_max, %d: allow %d files",
        num_files,
        num_left,
        num_connections,
        num_connections + FILES_BESIDE,
    )
    return replace(options, connections_max=num_left)


async def serve(app: RouterApp, inherited: Inherited | None = None) -> int:
    """Run a router in this event loop, whose signals it takes; see `run`.

    Returns:
        0 after a clean stop, 1 when it could not go on.

    Raises:
        ConfigError: it cannot start.
    """
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            logger.warning("second signal: forced exit")
            # Nothing in the process may delay this; only the log is worth a flush.
            logging.shutdown()
            os._exit(FORCED_EXIT_CODE)
        stop.set()

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(LoopErrors())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    # By nohup it is ignored. Who closes a terminal may send it twice, and means no haste.
    if inherited is None and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, stop.set)
    await app.start(inherited)
    spare_garbage_collector()
    if inherited is not None:
        loop.add_signal_handler(signal.SIGHUP, app.give_up_workers)
    broken = app.dispatcher.broken
    waits = [asyncio.create_task(event.wait()) for event in (stop, broken)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if not broken.is_set():
        await app.drain()
    await app.stop()
    return 1 if broken.is_set() else 0
