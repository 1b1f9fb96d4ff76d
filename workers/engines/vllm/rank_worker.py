"""vLLM's worker of this platform with what a rank does for us; its start is seen in the log."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.platforms import current_platform

import disagg.workers.engines.vllm.whole_weights  # noqa: F401 (registers its loader)
from disagg.workers.engines.start_phases import phase
from disagg.workers.engines.vllm.executors import leaves_its_reason
from disagg.workers.engines.vllm.rank import Rank
from disagg.workers.engines.vllm.shared_memory import leaves_no_names
from disagg.workers.engines.vllm.start import WEIGHT_BYTES

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class RankWorker(Rank, PlatformWorker):  # type: ignore[misc]
    """What vLLM makes in the process of each rank, which is this one where there is one rank."""

    def init_device(self) -> None:
        """Find this rank's device and the other ranks."""
        with leaves_its_reason(), leaves_no_names():
            super().init_device()

    def load_model(self, **given: Any) -> None:
        """Load this rank's weights."""
        if self.parallel_config.world_size > 1:
            # A process of its own; vLLM puts its name before each line.
            logging.basicConfig(
                level=logging.INFO,
                stream=sys.stderr,
                format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            )
        expected = self.vllm_config.additional_config[WEIGHT_BYTES]
        with leaves_its_reason(), leaves_no_names(), self._phase("weights", expected):
            super().load_model(**given)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate this rank's part of the pool."""
        with self._phase("KV pool"):
            super().initialize_from_config(kv_cache_config)

    def compile_or_warm_up_model(self) -> Any:
        """Compile, capture graphs, run once; what of it the device needs."""
        with self._phase("warm-up"):
            return super().compile_or_warm_up_model()

    @contextmanager
    def _phase(self, name: str, expected_bytes: int = 0) -> Iterator[None]:
        of_rank = f" of rank {self.rank}" if self.parallel_config.world_size > 1 else ""
        with phase(f"{name}{of_rank}", self.device.type, expected_bytes=expected_bytes):
            yield
