"""Runs the command ``ringsim`` for ``python -m ringsim``."""

import os
import sys

if not sys.flags.safe_path and not __file__.startswith(os.path.join(sys.path[0], "")):
    # exclude the working directory, as the command does: a random.py there would shadow the module
    sys.path[0] = os.path.dirname(sys.executable)

from ringsim.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
