"""The threads of an engine: a step is prepared on one while the one before it runs on the other."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

from disagg.scheduling.step import Step, StepResult
from disagg.workers.engines.protocol import RunsSteps


class EngineThreads:
    """Prepares and runs steps in the order of their launch; the core bounds how many are in flight.

    Attributes:
        engine: what computes them.
    """

    def __init__(self, engine: RunsSteps) -> None:
        self.engine = engine
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="engine-prepare")
        self._running = ThreadPoolExecutor(1, thread_name_prefix="engine")

    def launch(self, step: Step) -> "asyncio.Future[StepResult]":
        """Have a step prepared and run; the engine's own exceptions are the future's."""
        prepared = self._preparing.submit(self.engine.prepare, step)
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._running, self._run, prepared, step)

    def close(self) -> None:
        """Wait for the step that runs; nothing follows it."""
        self._running.shutdown(cancel_futures=True)
        self._preparing.shutdown(cancel_futures=True)

    def _run(self, prepared: "Future[None]", step: Step) -> StepResult:
        prepared.result()
        return self.engine.run(step)
