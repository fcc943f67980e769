"""The random generators of torch, numpy and ``random``: their seeds, and where their states lie in memory.

Their own ways to take the three states out and to put others in take 150 us; copying the memory, 7.5 KB, takes less than one. Where each
lies is found by looking for a state that is known, and copying is tried before it is used.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from ringsim.simulator.streams import Streams

__all__ = ["find_memory", "find_signs", "put_slowly", "seed_streams", "take_slowly", "try_out"]

_python: Final[Any] = random._inst  # whose methods the functions of `random` are
_WORDS: Final = 624  # of the state of a Mersenne Twister, which all three are
_KEY_BYTES: Final = 4 * _WORDS
_IMPL_BYTES: Final = 128 + _KEY_BYTES + 32  # of torch's generator, at least
_TORCH_HEAD: Final = struct.calcsize("<QiII")  # in front of the words: seed, left, seeded, next
_TORCH_TAIL: Final = struct.calcsize("<ifid4x4x")  # behind them: up to two numbers of a normal distribution, drawn ahead


def seed_streams(seed: int) -> None:
    """Seeds torch, numpy and ``random``, as a real rank does."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def take_slowly() -> Any:
    """Returns the states of the three generators by their own functions."""
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def put_slowly(state: Any) -> None:
    """Makes the states what ``take_slowly`` returned."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.default_generator.set_state(state[2])


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def find_memory() -> tuple[memoryview, ...] | None:
    """Returns where the states lie: of ``random``, numpy's words, numpy's number drawn ahead, torch; None where one is not found.

    It draws, and seeds: see ``take_slowly``.
    """
    if sys.implementation.name != "cpython" or sys.byteorder != "little":
        return None
    seed_streams(20_240_229)
    random.random()
    np.random.standard_normal()  # draws two, and keeps one
    torch.rand(1)
    found = (_find_random(), _find_numpy(), _find_numpy_ahead(), _find_torch())
    return None if any(region is None for region in found) else found  # type: ignore[return-value]


def _find_random() -> memoryview | None:
    instance = _python
    words = random.getstate()[1][:-1]
    whole = _memory(id(instance), sys.getsizeof(instance))
    at = bytes(whole).find(np.array(words, dtype=np.uint32).tobytes())
    return None if at < 4 else whole[at - 4 : at + _KEY_BYTES]  # the place in the words comes first


def _find_numpy() -> memoryview | None:
    state: Any = np.random.get_state()
    interface: Any = np.random.mtrand._rand._bit_generator.ctypes
    whole = _memory(interface.state_address, _KEY_BYTES + 4)
    return whole if bytes(whole[:_KEY_BYTES]) == state[1].tobytes() else None


def _find_numpy_ahead() -> memoryview | None:
    state: Any = np.random.get_state()
    rand: Any = np.random.mtrand._rand
    whole = _memory(id(rand), sys.getsizeof(rand))
    at = bytes(whole).find(struct.pack("<d", state[4]))
    return None if at < 8 or state[3] != 1 else whole[at - 8 : at + 8]  # whether there is one, and the number


def _find_torch() -> memoryview | None:
    generator = torch.default_generator
    head = ctypes.sizeof(ctypes.c_void_p) * 2  # of every Python object; what a Generator holds follows
    address = ctypes.c_void_p.from_address(id(generator) + head).value
    if address is None:
        return None
    state = np.frombuffer(bytes(generator.get_state().numpy())[24 : 24 + 8 * _WORDS], dtype=np.uint64).astype(np.uint32)
    whole = _memory(address, _IMPL_BYTES)
    at = bytes(whole).find(state.tobytes())
    return None if at < _TORCH_HEAD else whole[at - _TORCH_HEAD : at + _KEY_BYTES + _TORCH_TAIL]


def find_signs(python: memoryview, numpy: memoryview, ahead: memoryview, torch: memoryview) -> tuple[memoryview, ...]:
    """Returns the few places of which one is another whenever a number was drawn, within those that ``find_memory`` returned.

    These are the places in the words, and the numbers drawn ahead. The words that are no places tell whether all 624 were made anew, by as
    many draws or by a seed. Not the first ones of ``random`` and numpy: those are the same after many a seed.
    """
    return python[:4], python[8:12], numpy[-8:], ahead[:8], torch[:8], torch[16:24], torch[-24:-16], torch[-8:]


def try_out(streams: Streams) -> bool:
    """Tells whether copying the memory brings back all that was drawn, numbers drawn ahead included, and each draw can be seen."""
    each: tuple[Callable[[], Any], ...] = (
        *(random.random, lambda: random.gauss(0, 1), lambda: random.gauss(0, 1), lambda: [random.random() for _ in range(_WORDS // 2)]),
        *(np.random.random, np.random.standard_normal, np.random.standard_normal, lambda: np.random.random(_WORDS // 2)),
        *(functools.partial(torch.randn, 1, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.float64, torch.float64)),
        *(functools.partial(torch.rand, size) for size in (1, _WORDS, 3 * _WORDS)),
    )
    for draw_one in each:
        before = streams.take()
        draw_one()
        if streams.hold(before):
            return False
    draws: tuple[Callable[[], Any], ...] = (
        lambda: (random.random(), random.gauss(0, 1)),
        lambda: (float(np.random.standard_normal()), int(np.random.randint(1 << 30))),
        lambda: (torch.randn(1).item(), torch.rand(700).sum().item(), torch.randn(1, dtype=torch.float64).item()),
    )
    for seed in (3, 4):
        seed_streams(seed)
        for ahead in range(3):
            kept, said = streams.take(), _say(take_slowly())
            first = [draw() for draw in draws]
            streams.put(kept)
            if _say(take_slowly()) != said or [draw() for draw in draws] != first:
                return False
            torch.randn(1 + ahead)
    return True


def _say(state: Any) -> tuple[Any, ...]:
    """Returns a state that can be compared."""
    kind, words, *rest = state[1]
    return state[0], kind, words.tobytes(), *rest, bytes(state[2].numpy())
