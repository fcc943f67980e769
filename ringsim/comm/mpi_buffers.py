"""Tensors as MPI sees them: an address and a number of bytes.

What is not laid out as it would travel (strided, conjugated) is copied: before it is sent, and after it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringsim.errors import ArgumentError


def check_tensor(what: str, tensor: Any) -> torch.Tensor:
    """Returns a tensor that MPI can carry, cut off from its history.

    Args:
        what: what the tensor is called, for the error.
        tensor: the argument.

    Raises:
        ArgumentError: it is no tensor, or not a dense one on the CPU.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{what} must be a torch.Tensor, got {type(tensor).__name__}. Make it one: torch.tensor(value).")
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = f"a {tensor.layout} tensor on {tensor.device}" + (" (quantized)" if tensor.is_quantized else "")
        raise ArgumentError(
            f"{what} must be a dense tensor on the CPU with the mpi backend, got {kind}. Convert it: tensor.cpu().to_dense()."
        )
    return tensor.detach()


def check_tensors(what: str, tensors: Any) -> list[torch.Tensor]:
    """Returns a list of tensors that MPI can carry; see ``check_tensor``."""
    if not isinstance(tensors, list | tuple):
        raise ArgumentError(f"{what} must be a list of tensors, got {type(tensors).__name__}. Put them into a list.")
    return [check_tensor(f"{what}[{place}]", tensor) for place, tensor in enumerate(tensors)]


def check_alike(what: str, tensors: Sequence[torch.Tensor], like: torch.Tensor, *, same_shape: bool = True) -> None:
    """Raises unless all tensors have the dtype of another, and its shape.

    Raises:
        ArgumentError: one has not.
    """
    for place, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype or (same_shape and tensor.shape != like.shape):
            rule = f"{like.dtype} of shape {tuple(like.shape)}" if same_shape else f"{like.dtype}"
            got = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if same_shape else f"{tensor.dtype}"
            raise ArgumentError(f"{what}[{place}] must be {rule} as the other tensor of the call, got {got}. Make them alike.")


def check_count(what: str, tensors: Sequence[Any], count: int) -> None:
    """Raises unless a list has one tensor for each rank of the group.

    Raises:
        ArgumentError: it has not.
    """
    if len(tensors) != count:
        raise ArgumentError(f"{what} must have one tensor for each of the {count} ranks of the group, got {len(tensors)}. Fill it up.")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes lie as they travel."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def for_sending(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself where it is plain, else a copy that is."""
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def for_receiving(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Returns where to receive a tensor's bytes, and what brings them into it afterwards (None where they are there already)."""
    if is_plain(tensor):
        return tensor, None
    stage = torch.empty(tensor.shape, dtype=tensor.dtype)

    def bring() -> None:
        tensor.copy_(stage)

    return stage, bring


def size_of(tensor: torch.Tensor) -> int:
    """Returns a tensor's size in bytes."""
    return tensor.numel() * tensor.element_size()


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the bytes of several tensors behind each other, shape (bytes)."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([as_bytes(for_sending(tensor)) for tensor in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copies bytes, shape (bytes), into several tensors behind each other."""
    offset = 0
    for tensor in tensors:
        size = size_of(tensor)
        stage, bring = for_receiving(tensor)
        as_bytes(stage).copy_(flat[offset : offset + size])
        if bring is not None:
            bring()
        offset += size


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a plain tensor, shape (bytes), sharing its memory."""
    return tensor.reshape(-1).view(torch.uint8)
