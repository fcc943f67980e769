"""``python -m ringsim`` is the command ``ringsim``."""

from ringsim.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
