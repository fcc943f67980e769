"""The random numbers of a simulated rank: its own streams of torch, numpy and ``random``, in a process that has one of each.

A switch from one rank to another takes the states of all three generators out and puts others in. Their own ways to do that take 150 us, so
their memory is copied instead, 7.5 KB: where each lies is found by looking for a state that is known, and tried before it is used. Where
that fails (another build of torch or Python) the slow ways are taken; what the ranks draw is the same.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

__all__ = ["Streams", "seed_streams"]

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


class Streams:
    """Takes the states of the three generators out, and puts them in.

    Args:
        fast: whether to copy memory, where that can be done.

    Attributes:
        fast: whether it is done.
        regions: the memory of the states, empty where it is not done.

    Example:
        >>> streams = Streams()
        >>> seed_streams(7)
        >>> state = streams.take()
        >>> first = random.random(), np.random.normal(), torch.randn(3).sum().item()
        >>> streams.put(state)
        >>> first == (random.random(), np.random.normal(), torch.randn(3).sum().item())
        True
    """

    def __init__(self, *, fast: bool = True) -> None:
        self.regions: tuple[memoryview, ...] = ()
        if fast:
            outside = _take_slowly()
            try:
                regions = _find_regions()
                if regions is not None and _try_out(regions, _make_peek(regions)):
                    self.regions = regions
                    self._peek = _make_peek(regions)
            finally:
                _put_slowly(outside)
        self.fast = bool(self.regions)

    def take(self, state: Any = None) -> Any:
        """Returns the states as they are.

        Args:
            state: what an earlier call returned and ``put`` put in last; it is written over.
        """
        if not self.fast:
            return _take_slowly()
        seen = self._peek()
        if state is None:
            state = [*(memoryview(bytearray(len(region))) for region in self.regions), None, None]
        elif state[5] == seen:
            return state  # nothing was drawn since these were put in
        words, numpy_words, ahead, torch_words, _, _ = state
        words[:], numpy_words[:], ahead[:], torch_words[:] = self.regions
        state[4], state[5] = _python.gauss_next, seen
        return state

    def put(self, state: Any) -> None:
        """Makes the states what ``take`` returned."""
        if not self.fast:
            _put_slowly(state)
            return
        words, numpy_words, ahead, torch_words = self.regions
        words[:], numpy_words[:], ahead[:], torch_words[:], _python.gauss_next, _ = state


def _take_slowly() -> Any:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _put_slowly(state: Any) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.default_generator.set_state(state[2])


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _find_regions() -> tuple[memoryview, ...] | None:
    """Returns the memory of the states: of ``random``, numpy's words, numpy's number drawn ahead, torch; None where one is not found."""
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


def _make_peek(regions: tuple[memoryview, ...]) -> Callable[[], tuple[Any, ...]]:
    """Makes what returns a few words of the states, of which one is another whenever a number was drawn: places, and numbers drawn ahead.

    The words that are no places tell whether all 624 were made anew, by as many draws or by a seed. Not the first ones of `random` and
    numpy: those are the same after many a seed.
    """
    words, numpy_words, ahead = regions[0].cast("I"), regions[1][-8:].cast("q"), regions[2].cast("q")
    torch_words, tail = regions[3].cast("q"), len(regions[3]) // 8 - 3
    python, after = _python, tail + 2

    def peek() -> tuple[Any, ...]:
        return (
            words[0],
            words[2],
            python.gauss_next,
            numpy_words[0],
            ahead[0],
            torch_words[0],
            torch_words[2],
            torch_words[tail],
            torch_words[after],
        )

    return peek


def _try_out(regions: tuple[memoryview, ...], peek: Callable[[], tuple[Any, ...]]) -> bool:
    """Tells whether copying the memory brings back all that was drawn, numbers drawn ahead included, and each draw can be seen."""
    each: tuple[Callable[[], Any], ...] = (
        *(random.random, lambda: random.gauss(0, 1), lambda: random.gauss(0, 1), lambda: [random.random() for _ in range(_WORDS // 2)]),
        *(np.random.random, np.random.standard_normal, np.random.standard_normal, lambda: np.random.random(_WORDS // 2)),
        *(functools.partial(torch.randn, 1, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.float64, torch.float64)),
        *(functools.partial(torch.rand, size) for size in (1, _WORDS, 3 * _WORDS)),
    )
    for draw_one in each:
        before = peek()
        draw_one()
        if peek() == before:
            return False
    draws: tuple[Callable[[], Any], ...] = (
        lambda: (random.random(), random.gauss(0, 1)),
        lambda: (float(np.random.standard_normal()), int(np.random.randint(1 << 30))),
        lambda: (torch.randn(1).item(), torch.rand(700).sum().item(), torch.randn(1, dtype=torch.float64).item()),
    )
    for seed in (3, 4):
        seed_streams(seed)
        for ahead in range(3):
            kept = [bytes(region) for region in regions]
            gauss = _python.gauss_next
            said = _say(_take_slowly())
            first = [draw() for draw in draws]
            for region, bytes_before in zip(regions, kept, strict=True):
                region[:] = bytes_before
            _python.gauss_next = gauss
            if _say(_take_slowly()) != said or [draw() for draw in draws] != first:
                return False
            torch.randn(1 + ahead)
    return True


def _say(state: Any) -> tuple[Any, ...]:
    """Returns a state that can be compared."""
    kind, words, *rest = state[1]
    return state[0], kind, words.tobytes(), *rest, bytes(state[2].numpy())
