"""`python -m disagg.checking`: exhaust the worlds, or print what breaks."""

import sys

from disagg.checking.exhaust import main

if __name__ == "__main__":
    sys.exit(main())
