"""The header that goes ahead of a message: one int64 tensor of fixed size that says what comes.

::

    | magic | kind | microbatch | dtype | alike | digest | ndim | dim 0 ... dim 7 |

The transports carry bytes and compare nothing: a receive buffer that is too small ends the process on Gloo, one of another dtype is filled
with nonsense. With a header the receiver makes the buffer that fits.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from ringsim.errors import ArgumentError, MessageMismatch

__all__ = ["HEADER_SIZE", "MAX_DIMS", "Header", "Payload"]

MAX_DIMS: Final = 8
HEADER_SIZE: Final = 8 + MAX_DIMS  # numbers of 8 bytes
_MAGIC: Final = 0x52494E47  # "RING"
KINDS: Final = ("greeting", "activation", "gradient")
# The place in this list goes over the wire: append only.
_DTYPES: Final = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.bool, torch.complex64, torch.complex128),
)


class Payload(NamedTuple):
    """What a buffer must be to hold a message.

    Attributes:
        shape: its dimensions.
        dtype: of its elements.
        has_data: whether it has any; a tensor of device "meta" has not, and only simulated ranks can send one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_data: bool = True

    @classmethod
    def of(cls, tensor: Tensor) -> Payload:
        """Returns that of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, not tensor.is_meta)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} of shape {self.shape}{'' if self.has_data else ' without data'}"


class Header(NamedTuple):
    """What a header says.

    Attributes:
        kind: "activation", "gradient", or "greeting", after which nothing comes.
        microbatch: index of the microbatch; in a greeting their number.
        payload: shape and dtype of what comes; in the greeting of a step its shape is a digest of the partition.
        alike: whether all further messages of the step on this boundary are like this one, so that they come without a header.
        digest: a number that both sides have computed from what they must agree on, in the greeting of a step from the schedule; 0 where
            there is nothing.

    Example:
        >>> header = Header("activation", 3, Payload((2, 16), torch.float32))
        >>> Header.unpack(header.pack()) == header
        True
    """

    kind: str
    microbatch: int
    payload: Payload = Payload((), torch.float32)
    alike: bool = False
    digest: int = 0

    def pack(self) -> Tensor:
        """Returns the header as a tensor, shape (16,), int64.

        Raises:
            ArgumentError: the payload has too many dimensions, or a dtype that no header can say.
        """
        shape, dtype, has_data = self.payload
        if len(shape) > MAX_DIMS or dtype not in _DTYPES:
            names = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
            raise ArgumentError(f"a message must have at most {MAX_DIMS} dimensions and one of {names}, got {self.payload}. Convert it.")
        numbers = [_MAGIC, KINDS.index(self.kind), self.microbatch, _DTYPES.index(dtype), int(has_data), int(self.alike), self.digest]
        numbers += [len(shape), *shape]
        return torch.tensor(numbers + [0] * (HEADER_SIZE - len(numbers)), dtype=torch.int64)

    @classmethod
    def unpack(cls, tensor: Tensor) -> Header:
        """Returns the header that a tensor holds.

        Raises:
            MessageMismatch: it holds none: the other side sent something else.
        """
        numbers: list[int] = tensor.tolist()
        magic, kind, microbatch, dtype, has_data, alike, digest, ndim, *dims = numbers
        if magic != _MAGIC or not 0 <= kind < len(KINDS) or not 0 <= dtype < len(_DTYPES) or not 0 <= ndim <= MAX_DIMS:
            raise MessageMismatch(
                f"a message must begin with a header, got the numbers {numbers[:4]}... "
                "Send it with send_activation or send_gradient, and finish a step on every rank before the next."
            )
        return cls(KINDS[kind], microbatch, Payload(tuple(dims[:ndim]), _DTYPES[dtype], bool(has_data)), bool(alike), digest)
