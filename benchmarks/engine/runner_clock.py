"""CPU seconds inside vLLM's model runner, whoever drives it; its sampler does not count."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any


class RunnerClock:
    """While entered, counts the runner's thread.

    Attributes:
        seconds: in the runner so far, without the sampler it calls.
    """

    def __init__(self) -> None:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # the CPU's derives from it

        self.seconds = 0.0
        self._runner: Any = GPUModelRunner
        self._kept: list[tuple[Any, str, Callable[..., Any]]] = []
        self._sampler: Any = None

    def __enter__(self) -> "RunnerClock":
        self._replace(self._runner, "execute_model", self._counted(self._runner.execute_model, 1))
        self._replace(self._runner, "sample_tokens", self._counted(self._runner.sample_tokens, 1))
        self._replace(self._runner, "_sample", self._counted(self._runner._sample, -1))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for owner, name, original in self._kept:
            setattr(owner, name, original)

    def _replace(self, owner: Any, name: str, by: Callable[..., Any]) -> None:
        self._kept.append((owner, name, getattr(owner, name)))
        setattr(owner, name, by)

    def _counted(self, call: Callable[..., Any], sign: int) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += sign * (time.thread_time() - start)

        return counted
