"""Every operation that can be built, as a case that runs on any namespace; and a torch backend that hides what it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ringsim.comm.backend import TorchBackend
from ringsim.comm.built import Handle


class Hiding(TorchBackend):
    """Torch without some of its operations; without all that are optional if none are named.

    Args:
        hidden: the names of the operations.
    """

    name = "hiding"

    def __init__(self, *hidden: str) -> None:
        self._hidden = hidden

    def supports(self, op: str) -> bool:
        if self._hidden:
            return op not in self._hidden
        return op in TorchBackend.__abstractmethods__ or op in vars(TorchBackend)


@dataclass
class Scene:
    """What a case runs in: torch.distributed or what takes its place, a group of ranks, and whether to be asynchronous and strided.

    ``make(*shape)`` makes a tensor whose numbers tell rank and place, ``blank(*shape)`` one to be filled.
    """

    dist: Any
    rank: int
    members: Sequence[int]
    group: Any = None
    async_op: bool = False
    strided: bool = False
    dtype: torch.dtype = torch.float32
    made: int = field(default=0)

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def root(self) -> int:
        return self.members[-1]

    @property
    def is_root(self) -> bool:
        return self.rank == self.root

    def make(self, *shape: int) -> torch.Tensor:
        self.made += 1
        count = int(torch.Size(shape).numel())
        values = (torch.arange(count) * 7 + self.rank * 3 + self.made * 5) % 11 + 1
        return self.lay_out(values.view(shape))

    def blank(self, *shape: int) -> torch.Tensor:
        return self.lay_out(torch.zeros(shape))

    def lay_out(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self.dtype)
        if not self.strided:
            return tensor
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=self.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]

    def end(self, handle: Any) -> None:
        """Waits for an asynchronous operation, twice: the second time it returns at once. Others have given back nothing."""
        if self.async_op and self.rank in self.members:
            handle.wait()
            handle.wait()
            assert not isinstance(handle, Handle) or handle.is_completed()  # torch's own may deny it
        else:
            assert handle is None


def _all_reduce(scene: Scene) -> list[torch.Tensor]:
    x = scene.make(4, 3)
    scene.end(scene.dist.all_reduce(x, group=scene.group, async_op=scene.async_op))
    return [x]


def _all_reduce_max(scene: Scene) -> list[torch.Tensor]:
    x = scene.make(5)
    scene.end(scene.dist.all_reduce(x, scene.dist.ReduceOp.MAX, scene.group, scene.async_op))
    return [x]


def _all_reduce_coalesced(scene: Scene) -> list[torch.Tensor]:
    x = [scene.make(4, 3), scene.make(2)]
    scene.end(scene.dist.all_reduce_coalesced(x, group=scene.group, async_op=scene.async_op))
    return x


def _reduce(scene: Scene) -> list[torch.Tensor]:
    x = scene.make(3, 2)
    scene.end(scene.dist.reduce(x, scene.root, group=scene.group, async_op=scene.async_op))
    return [x] if scene.is_root else []


def _broadcast(scene: Scene) -> list[torch.Tensor]:
    x = scene.make(3, 2)
    scene.end(scene.dist.broadcast(x, group_src=scene.size - 1, group=scene.group, async_op=scene.async_op))
    return [x]


def _all_gather(scene: Scene) -> list[torch.Tensor]:
    out = [scene.blank(2, 3) for _ in scene.members]
    scene.end(scene.dist.all_gather(out, scene.make(2, 3), group=scene.group, async_op=scene.async_op))
    return out


def _all_gather_single(scene: Scene, name: str = "all_gather_single") -> list[torch.Tensor]:
    out = scene.blank(2 * scene.size, 3)
    scene.end(getattr(scene.dist, name)(out, scene.make(2, 3), scene.group, scene.async_op))
    return [out]


def _all_gather_into_tensor(scene: Scene) -> list[torch.Tensor]:
    return _all_gather_single(scene, "all_gather_into_tensor")


def _all_gather_coalesced(scene: Scene) -> list[torch.Tensor]:
    out = [[scene.blank(2, 3), scene.blank(4)] for _ in scene.members]
    scene.end(scene.dist.all_gather_coalesced(out, [scene.make(2, 3), scene.make(4)], scene.group, scene.async_op))
    return [tensor for row in out for tensor in row]


def _gather(scene: Scene) -> list[torch.Tensor]:
    out = [scene.blank(3) for _ in scene.members] if scene.is_root else None
    scene.end(scene.dist.gather(scene.make(3), out, scene.root, scene.group, scene.async_op))
    return out or []


def _gather_single(scene: Scene, name: str = "gather_single") -> list[torch.Tensor]:
    x, out = scene.make(2, 3), scene.blank(scene.size, 2, 3) if scene.is_root else None
    if scene.dist is not torch.distributed:
        scene.end(getattr(scene.dist, name)(x, out, group_dst=scene.size - 1, group=scene.group, async_op=scene.async_op))
    else:  # torch before 2.15 has it not, and Gloo not even then
        scene.end(scene.dist.gather(x, list(out) if out is not None else None, scene.root, scene.group, scene.async_op))
    return [] if out is None else [out]


def _gather_into_tensor(scene: Scene) -> list[torch.Tensor]:
    return _gather_single(scene, "gather_into_tensor")


def _scatter(scene: Scene) -> list[torch.Tensor]:
    out = scene.blank(2, 3)
    parts = [scene.make(2, 3) for _ in scene.members] if scene.is_root else None
    scene.end(scene.dist.scatter(out, parts, scene.root, scene.group, scene.async_op))
    return [out]


def _reduce_scatter(scene: Scene) -> list[torch.Tensor]:
    out = scene.blank(2, 3)
    scene.end(scene.dist.reduce_scatter(out, [scene.make(2, 3) for _ in scene.members], group=scene.group, async_op=scene.async_op))
    return [out]


def _reduce_scatter_single(scene: Scene, name: str = "reduce_scatter_single") -> list[torch.Tensor]:
    out = scene.blank(2, 3)
    scene.end(getattr(scene.dist, name)(out, scene.make(2 * scene.size, 3), group=scene.group, async_op=scene.async_op))
    return [out]


def _reduce_scatter_tensor(scene: Scene) -> list[torch.Tensor]:
    return _reduce_scatter_single(scene, "reduce_scatter_tensor")


def _all_to_all(scene: Scene) -> list[torch.Tensor]:
    out = [scene.blank(3) for _ in scene.members]
    scene.end(scene.dist.all_to_all(out, [scene.make(3) for _ in scene.members], scene.group, scene.async_op))
    return out


def _all_to_all_single(scene: Scene) -> list[torch.Tensor]:
    out = scene.blank(2 * scene.size, 3)
    scene.end(scene.dist.all_to_all_single(out, scene.make(2 * scene.size, 3), group=scene.group, async_op=scene.async_op))
    return [out]


def _all_to_all_uneven(scene: Scene) -> list[torch.Tensor]:
    place = scene.members.index(scene.rank) if scene.rank in scene.members else 0
    sizes = [i + place for i in range(scene.size)]  # the first gives itself nothing
    out = scene.blank(sum(sizes), 2)
    scene.end(scene.dist.all_to_all_single(out, scene.make(sum(sizes), 2), sizes, sizes, scene.group, scene.async_op))
    return [out]


CASES: dict[str, tuple[str, Callable[[Scene], list[torch.Tensor]]]] = {
    case.__name__.strip("_"): (op, case)
    for op, case in (
        ("all_reduce", _all_reduce),
        ("all_reduce", _all_reduce_max),
        ("all_reduce_coalesced", _all_reduce_coalesced),
        ("reduce", _reduce),
        ("broadcast", _broadcast),
        ("all_gather", _all_gather),
        ("all_gather_single", _all_gather_single),
        ("all_gather_into_tensor", _all_gather_into_tensor),
        ("all_gather_coalesced", _all_gather_coalesced),
        ("gather", _gather),
        ("gather_single", _gather_single),
        ("gather_into_tensor", _gather_into_tensor),
        ("scatter", _scatter),
        ("reduce_scatter", _reduce_scatter),
        ("reduce_scatter_single", _reduce_scatter_single),
        ("reduce_scatter_tensor", _reduce_scatter_tensor),
        ("all_to_all", _all_to_all),
        ("all_to_all_single", _all_to_all_single),
        ("all_to_all_single", _all_to_all_uneven),
    )
}
