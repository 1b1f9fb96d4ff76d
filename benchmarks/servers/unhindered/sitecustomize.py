"""Put into vLLM's processes by PYTHONPATH: what hinders them on few cores is undone.

- NIXL's progress thread polls without end; it sleeps between events here, as in our own workers.
- The engine's core spins on its worker's answer for a second after each; it yields the core here.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

PROGRESS_WAIT_US = 100_000
SPIN_SLEEP_S = 0.000_2


def _patient(module: Any) -> None:
    config = module.nixlBind.nixlAgentConfig

    class PatientConfig(config):  # type: ignore[misc, valid-type]
        @property
        def pthrDelay(self) -> int:
            return PROGRESS_WAIT_US

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:
            config.pthrDelay.__set__(self, PROGRESS_WAIT_US)

    module.nixlBind.nixlAgentConfig = PatientConfig


def _yielding(module: Any) -> None:
    import time

    module.sched_yield = lambda: time.sleep(SPIN_SLEEP_S)


CHANGES = {
    # ``nixl._api`` is another name of one of these.
    "nixl_cu12._api": _patient,
    "nixl_cu13._api": _patient,
    "vllm.distributed.device_communicators.shm_broadcast": _yielding,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Any, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            CHANGES[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
