"""One engine per family for all tests of this folder: it takes seconds to start."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.vllm.engines import make_vllm
from tests.vllm.families import make_family

if TYPE_CHECKING:
    from disagg.workers.engines.vllm.vllm_engine import VllmEngine

WINDOW = 40
NUM_BLOCKS = 300


@dataclass(frozen=True)
class Loaded:
    """A checkpoint and the engine over it."""

    directory: Path
    engine: "VllmEngine"


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Loaded]]:
    made: dict[str, Loaded] = {}

    def get(family: str) -> Loaded:
        if family not in made:
            directory = tmp_path_factory.mktemp("vllm") / family
            make_family(directory, family, WINDOW)
            made[family] = Loaded(directory, make_vllm(directory, NUM_BLOCKS))
        return made[family]

    yield get
    made.clear()
