"""The script that a fresh interpreter of ours runs: not ``-c``, so that no frame of it passes for the user's.

The one argument is JSON: the module whose ``main`` to call, the import path of the launcher, and the arguments of ``main``.
"""

import importlib
import json
import sys

if __name__ == "__main__":
    module, path, arguments = json.loads(sys.argv[1])
    sys.path[:] = path  # as the caller has it now: it may have grown since its start
    importlib.import_module(module).main(*arguments)
