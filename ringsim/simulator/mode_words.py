"""Where torch keeps the modes of a thread in memory: a look there tells in a few nanoseconds that none has changed.

To ask torch for one of them takes 20 to 90 ns, and each switch of ranks asks for eight. The places are found by symbols that torch's own
libraries share with each other, and tried before they are used; where one is missing, or does not tell, torch is asked.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ringsim.simulator.memory import Regions

__all__ = ["find_words"]

_LIBRARIES: Final = Path(torch.__file__).parent / "lib"
_VARIABLES: Final = (  # library, symbol of a variable, its size in bytes
    ("libc10.so", "_ZN3c104impl26raw_local_dispatch_key_setE", 16),  # of the thread: what dispatching is told by modes, and by autocast
    ("libtorch_cpu.so", "_ZN5torch8autograd11AnomalyMode8_enabledE", 1),
)
_GETTERS: Final = (  # library, symbol of a function without arguments that returns a reference to a variable of the thread, its size
    ("libc10.so", "_ZN3c1013AutogradState13get_tls_stateEv", 32),  # flags, behind an object that may be there
    ("libtorch_cpu.so", "_ZN2at23SavedTensorDefaultHooks13get_tls_stateEv", 80),  # a std::deque of hooks; what follows is no matter
    ("libtorch_cpu.so", "_ZN2at4impl22PythonTorchFunctionTLS9get_stateEv", 32),  # flags, and a std::vector of modes
)


def find_words() -> Regions | None:
    """Returns the memory that tells of gradients, inference mode, autocast, anomaly mode, and whether stacks of modes and hooks are empty.

    All of these must be off, but for gradients and inference mode: what is in a stack can change while its size does not.

    Returns:
        Memory of the calling thread; None where it is not found, or does not tell.
    """
    try:
        words = Regions([*(_variable(*each) for each in _VARIABLES), *(_behind(*each) for each in _GETTERS)])
        return words if _try_out(words) else None
    except (OSError, AttributeError, ValueError, RuntimeError):  # no such library, function or variable; or a mode that is not allowed now
        return None


def _variable(library: str, symbol: str, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).in_dll(ctypes.CDLL(str(_LIBRARIES / library)), symbol)).cast("B")


def _behind(library: str, symbol: str, size: int) -> memoryview:
    getter = getattr(ctypes.CDLL(str(_LIBRARIES / library)), symbol)
    getter.restype = ctypes.c_void_p
    return memoryview((ctypes.c_char * size).from_address(getter())).cast("B")


def _try_out(words: Regions) -> bool:
    """Tells whether each mode can be seen in the memory, and that it is over."""
    for mode in _modes():
        before = words.copy()
        with mode():
            if words.match(before):
                return False
        between = words.copy()
        with mode():  # a stack may have got its memory only now
            pass
        if not words.match(between):
            return False
    return True


def _modes() -> tuple[Callable[[], AbstractContextManager[object]], ...]:
    """Returns all modes that must be seen."""
    autocast, functorch, nan = torch.set_autocast_enabled, torch._C._functorch, torch.is_anomaly_check_nan_enabled()
    return (
        lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
        lambda: torch.inference_mode(not torch.is_inference_mode_enabled()),
        *(partial(_between, partial(autocast, each, True), partial(autocast, each, False)) for each in ("cpu", "cuda", "xpu", "mps")),
        partial(_between, partial(torch.set_anomaly_enabled, True, nan), partial(torch.set_anomaly_enabled, False, nan)),
        TorchFunctionMode,
        TorchDispatchMode,
        lambda: torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged),
        partial(_between, functorch._grad_increment_nesting, functorch._grad_decrement_nesting),
    )


@contextlib.contextmanager
def _between(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    begin()
    try:
        yield
    finally:
        end()


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
