"""Reading the frames of threads, in a process that stands still if this goes wrong."""

from __future__ import annotations

import subprocess
import sys

BUSY_PROGRAM = """
import gc
import threading
import time

from ringsim.traces.frames import current_frames


class Released:
    def __init__(self):
        self.itself = self  # so that only the garbage collector ends it

    def __del__(self):
        time.sleep(0)  # lets a different thread run


def start_threads():
    while True:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()


gc.set_threshold(5)
for _ in range(2):
    threading.Thread(target=start_threads, daemon=True).start()
for _ in range(20_000):
    Released()
    assert threading.main_thread().ident in current_frames()
assert gc.isenabled()
gc.disable()
current_frames()
assert not gc.isenabled()
print("done", flush=True)
"""


def test_threads_may_start_and_objects_may_end_while_frames_are_read() -> None:
    """With ``sys._current_frames`` alone, Python 3.11 stands still within a second."""
    done = subprocess.run(
        [sys.executable, "-c", BUSY_PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("done"), done.stderr
