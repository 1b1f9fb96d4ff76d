"""The router as a process: its log, its signals, its exit code."""

import asyncio
import logging
import os
import signal

from disagg.errors import ConfigError
from disagg.router.app import RouterApp
from disagg.router.inherited import Inherited
from disagg.router.options import RouterOptions
from disagg.router.tokenizer_loading import do_without_torch
from disagg.telemetry.garbage_collector import spare_garbage_collector
from disagg.telemetry.log_format import configure_logging

logger = logging.getLogger(__name__)

FORCED_EXIT_CODE = 130


def run(options: RouterOptions, inherited: Inherited | None = None) -> int:
    """Run a router until SIGINT or SIGTERM, then drain it; a second signal ends it at once.

    SIGHUP, where it has inherited its sockets, says that another router is to take its place.

    Returns:
        The process's exit code: 0 after a clean stop, 1 when it could not go on, 2 when it could
        not start.
    """
    log_as(options)
    do_without_torch()
    try:
        return asyncio.run(serve(RouterApp(options), inherited))
    except ConfigError as error:
        logger.error("%s: %s", error.param, error.message)
        return 2


def log_as(options: RouterOptions) -> None:
    """Let this process log to standard error, in the format that is set."""
    configure_logging(
        options.log_format, "%(asctime)s %(levelname)s %(name)s: %(message)s", {"role": "router"}
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


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
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
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
