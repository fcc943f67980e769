"""How the bytes of a message, or of a collective, get from one simulated rank's tensor into another's.

Both lie in one process. As on real ranks, nothing of it is part of anybody's history: neither the modes of the rank that happens to do the
copying nor gradients count.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ringsim.errors import ArgumentError
from ringsim.simulator.tape import Kind

__all__ = ["check_tensor", "check_tensors", "move", "move_alike"]


def move_alike(source: torch.Tensor, target: torch.Tensor, kind: Kind) -> None:
    """Copies a message into a tensor of the same kind, which may be laid out differently in memory."""
    if not kind.plain:
        move(source, target)
    elif kind.layout.copy(source, target):
        return
    elif _lies_plainly(source, kind) and _lies_plainly(target, kind):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), kind.size_bytes)
    else:
        move(source, target)


def _lies_plainly(tensor: torch.Tensor, kind: Kind) -> bool:
    return tensor.is_cpu and tensor.nbytes == kind.size_bytes and tensor.is_contiguous()


def move(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a tensor into another one of as many elements; of tensors without data nothing."""
    if source.is_meta and target.is_meta:
        return
    if source.is_meta or target.is_meta:
        raise ArgumentError(
            f"both sides of a message must have data, or none, got {source.device} at the sender and {target.device} at the receiver. "
            "Make both tensors on one device."
        )
    with torch.inference_mode():  # a tensor that was made in inference mode may be changed nowhere else
        target.copy_(source.reshape(target.shape))


def check_tensor(what: str, tensor: Any) -> torch.Tensor:
    """Returns a tensor that the simulator can carry, cut off from its history.

    Args:
        what: what the tensor is called, for the error.
        tensor: the argument.

    Raises:
        ArgumentError: it is no tensor, or not a dense one on the CPU or the meta device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{what} must be a torch.Tensor, got {type(tensor).__name__}. Make it one: torch.tensor(value).")
    if tensor.device.type not in ("cpu", "meta") or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = f"a {tensor.layout} tensor on {tensor.device}" + (" (quantized)" if tensor.is_quantized else "")
        raise ArgumentError(
            f"{what} must be a dense tensor on the CPU or the meta device in a simulation, got {kind}. Convert it: tensor.cpu().to_dense()."
        )
    return tensor.detach()


def check_tensors(what: str, tensors: Any) -> list[torch.Tensor]:
    """Returns a list of tensors that the simulator can carry; see ``check_tensor``."""
    if not isinstance(tensors, list | tuple):
        raise ArgumentError(f"{what} must be a list of tensors, got {type(tensors).__name__}. Put them into a list.")
    return [check_tensor(f"{what}[{place}]", tensor) for place, tensor in enumerate(tensors)]
