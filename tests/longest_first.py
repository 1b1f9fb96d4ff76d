"""The files of tests that take longest begin first: none is left for one core at the end."""

from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
LONGEST = (
    "unit/checking/test_worlds.py",
    "unit/checking/test_rules.py",
    "unit/scheduling/test_every_failure.py",
    "unit/workers/engines/native/test_equality.py",
    "unit/workers/engines/native/test_scheduled.py",
    "unit/scheduling/tiers/test_simulated_tiers.py",
    "unit/scheduling/test_long_runs.py",
    "unit/scheduling/test_simulation.py",
    "unit/scheduling/test_unequal_workers.py",
    "unit/workers/engines/native/test_states.py",
    "unit/scheduling/test_drafting_worlds.py",
    "unit/workers/engines/native/test_drafts.py",
    "unit/workers/engines/native/test_tiny_checkpoints.py",
    "unit/router/test_detokenizer.py",
    "house/test_models_table.py",
    "unit/workers/engines/test_contract.py",
    "process/test_routers.py",
    "process/test_shared_fleet.py",
    "process/test_equality.py",
    "process/test_choices.py",
    "process/test_soak.py",
    "process/test_drain.py",
    "process/test_router_processes.py",
    "process/test_broken_transport.py",
    "process/test_found_routers.py",
    "process/test_serve.py",
    "process/test_calibrated_fleet.py",
    "process/test_router_replaced.py",
    "process/test_fuzz_http.py",
    "process/test_fuzz_grpc.py",
    "process/test_faults.py",
    "process/test_silence.py",
    "process/test_nixl_transport.py",
    "process/test_tool_calls.py",
    "process/test_grammars.py",
    "process/test_vllm.py",
    "process/test_vllm_ray_ranks.py",
    "vllm/test_followed_events.py",
    "vllm/test_ranks.py",
    "process/test_vllm_ranks.py",
)
"""Of ``make test``, by the seconds they take (``--durations``), then of ``make test-vllm``.

No test relies on this order.
"""


def sort(items: list[pytest.Item]) -> None:
    """Move those files to the front, each with its tests in their order."""
    places = {ROOT / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def missing(names: Iterable[str] = LONGEST) -> list[str]:
    """Named here, but gone or moved."""
    return [name for name in names if not (ROOT / name).is_file()]
