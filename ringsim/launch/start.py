"""The script that a fresh interpreter of ours runs.

Not ``-c``, so that no frame of it passes for the user's. Its one argument is JSON: what to become,
the import path of the launcher, and what to tell it.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Becomes a fork server, or a rank of its own."""
    what, path, arguments = json.loads(sys.argv[1])
    # The caller's, as it is now: it may have grown since its start. The working directory comes
    # last: a torch.py there is not for us.
    sys.path[:] = sorted(path, key=lambda place: not place)
    if what == "fork server":
        from ringsim.launch import forkserver

        forkserver.main(*arguments)
    else:
        from ringsim.launch import ranks

        ranks.become_rank()


if __name__ == "__main__":
    main()
