"""Transfers a worker's result from its rank to the caller.

The result is in a mapped file, because gigabytes take long through a pipe.
"""

from __future__ import annotations

import mmap
import pickle
from pathlib import Path
from typing import Any

from ringsim.ring.packing import Pickler

Spans = list[tuple[int, int]]  # the starts and ends of the parts of a result in its file
_ALIGN = 64
_LARGE_BYTES = 1 << 16


def write_result(result: Any, file: Path) -> Spans:
    """Writes a result to a file; called on a rank.

    Returns the positions (start, end) of the pickle, and of the data of arrays and tensors.
    """
    buffers: list[pickle.PickleBuffer] = []
    with file.open("wb") as out:
        _Pickler(out, protocol=5, buffer_callback=buffers.append).dump(result)
        spans = [(0, out.tell())]
        for buffer in buffers:
            start = out.seek(-(-spans[-1][1] // _ALIGN) * _ALIGN)
            out.write(buffer.raw())
            spans.append((start, out.tell()))
    return spans


def read_result(file: Path, spans: Spans) -> Any:
    """Reads a result, which can be read only once.

    Its arrays and tensors are views of the file, which this function unlinks.
    """
    with file.open("rb") as source:
        whole = memoryview(mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY))
    file.unlink()
    packed, *buffers = (whole[start:end] for start, end in spans)
    return pickle.loads(packed, buffers=buffers)


def describe_unpicklable(result: Any, error: Exception, where: str) -> str:
    """Returns the error message for a result from ``where`` (a rank) that cannot be pickled."""
    return (
        f"cannot pickle the worker's result, a {type(result).__qualname__} "
        f"({type(error).__name__}: {error}; {where}). Return plain data instead."
    )


class _Pickler(Pickler):
    """A pickler that stores the data of large tensors outside the pickle, as numpy does for arrays.

    Torch would copy the data several times.
    """

    def reducer_override(self, obj: Any) -> Any:
        import torch  # already loaded on a rank; the caller loads it only to read tensors

        if (
            type(obj) is torch.Tensor
            and obj.device.type == "cpu"
            and obj.layout is torch.strided
            and obj.nbytes >= _LARGE_BYTES
        ):
            special = (
                obj.requires_grad or obj.is_quantized or obj.is_conj() or obj.is_neg() or vars(obj)
            )
            if not special and obj.is_contiguous():
                data = pickle.PickleBuffer(obj.reshape(-1).view(torch.uint8).numpy().data)
                return _tensor, (data, obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


def _tensor(data: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.frombuffer(data, dtype=dtype).reshape(shape)
