"""Runs a command with a shifted monotonic clock.

Usage: python shift_clock.py NS COMMAND ..., where NS is the offset, which may be negative. The
system command `unshare` accepts only whole seconds. The offset is written before any process enters
the new time namespace, see time_namespaces(7).
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
os.execvp(sys.argv[2], sys.argv[2:])  # this enters the namespace
