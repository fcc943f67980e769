"""Runs a command on a monotonic clock of its own.

Python shift_clock.py NS COMMAND ..., with NS as an offset, also a negative one. The `unshare` of
the system takes whole seconds alone. The offset is written before any process is in the new time
namespace: see time_namespaces(7).
"""

import ctypes
import os
import sys

CLONE_NEWTIME = 0x80  # in Linux's include/uapi/linux/sched.h

if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWTIME):
    sys.exit(f"a time namespace cannot be made here: {os.strerror(ctypes.get_errno())}")
seconds, ns = divmod(int(sys.argv[1]), 10**9)
with open("/proc/self/timens_offsets", "w") as offsets:
    offsets.write(f"monotonic {seconds} {ns}\nboottime {seconds} {ns}\n")
os.execvp(sys.argv[2], sys.argv[2:])  # which enters it
