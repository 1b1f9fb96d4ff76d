"""What a supervisor tells the process that started it, in a file."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FleetReport:
    """How the workers that are wanted are.

    Attributes:
        num_serving: workers that serve, with role and settings as they are to be.
        missing: why each of the others does not, by its id.
        ended: ids of those whose last life ended before it served.
    """

    num_serving: int
    missing: Mapping[str, str]
    ended: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether all serve as they are to."""
        return not self.missing

    def write(self, path: Path) -> None:
        """Leave it for the reader, who sees the last one or this one, whole."""
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self) | {"pid": os.getpid()}))
        fresh.replace(path)

    @classmethod
    def read(cls, path: Path, pid: int) -> "FleetReport | None":
        """What the process with this id wrote last; None: nothing yet."""
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        if found["pid"] != pid:  # an earlier one's
            return None
        return cls(found["num_serving"], found["missing"], tuple(found["ended"]))
