"""How the bytes of a message, or of a collective, get from one simulated rank's tensor into another's.

Both lie in one process. As on real ranks, nothing of it is part of anybody's history: neither the modes of the rank that happens to do the
copying nor gradients count.
"""

from __future__ import annotations

from typing import Any

import torch

from ringsim.errors import ArgumentError

__all__ = ["check_storage", "check_tensor", "check_tensors", "move"]


def move(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a tensor into another one of as many elements; of tensors without data nothing.

    Args:
        source: what is sent.
        target: where it goes.

    Raises:
        ArgumentError: one of them has data and the other has none, or the memory of one has become smaller than itself.
    """
    if source.is_meta or target.is_meta:
        if source.is_meta and target.is_meta:
            return
        raise ArgumentError(
            f"both sides of a message must have data, or none, got {source.device} at the sender and {target.device} at the receiver. "
            "Make both tensors on one device."
        )
    check_storage("source", source)
    check_storage("target", target)
    if source.requires_grad:
        source = source.detach()
    if target.requires_grad:
        target = target.detach()
    if source.shape != target.shape:
        source = source.reshape(target.shape)
    if target.is_inference():  # may be written to nowhere else
        with torch.inference_mode():
            target.copy_(source)
    else:
        target.copy_(source)


def check_storage(what: str, tensor: torch.Tensor) -> None:
    """Checks that the memory of a tensor still holds all of it: torch would read and write beyond its end.

    Args:
        what: what the tensor is, for the error.
        tensor: with data.

    Raises:
        ArgumentError: the storage was resized since the tensor was made.
    """
    try:
        there = tensor.untyped_storage().nbytes()
    except NotImplementedError:  # a subclass without memory of its own, which says itself how it is copied
        return
    if tensor.is_contiguous():
        last = tensor.numel()
    else:
        last = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last) * tensor.itemsize
    if needed > there and tensor.numel():
        raise ArgumentError(
            f"the {what} tensor of a message must keep its memory until the message is done, got a storage of {there:,} bytes for "
            f"{needed:,}. Resize it after wait()."
        )


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
