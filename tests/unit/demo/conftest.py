"""The demo is run from the repository, not installed: make it importable from any folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
