"""The script that a new ringsim interpreter runs.

It is not started with ``-c``, so that its frames cannot be mistaken for the user's. Its only
argument is JSON: the role, the import path of the launcher, and the arguments of the role.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Becomes a fork server, or a single rank."""
    what, path, arguments = json.loads(sys.argv[1])
    # The caller's current path, which may have grown since its start. The working directory comes
    # last, because a torch.py there is not meant for ringsim.
    sys.path[:] = sorted(path, key=lambda place: not place)
    if what == "fork server":
        from ringsim.launch import forkserver

        forkserver.main(*arguments)
    else:
        from ringsim.launch import ranks

        ranks.become_rank()


if __name__ == "__main__":
    main()
