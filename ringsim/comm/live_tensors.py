"""Counts the bytes of a rank's tensors while it trains, and records the counts as marks.

The memory of a tensor is its storage, which tensors may share. Each storage counts once, as long as
it exists, and as the first of these kinds::

    parameters    of the model, with its buffers, and of the optimizers
    gradients     the ``grad`` of these parameters
    optimizer     the state of the optimizers
    activations   all other tensors that torch's operators have returned in the block: tensors saved
                  for the backward pass, recomputed and temporary ones, and buffers of messages

A mode sees the results of all operators. ringsim counts again when they have taken up another 1 %
of the largest count. Between two counts, no more can have been added. Tensors on device "meta" have
storages with a size, but without data, so you can count models of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer

from ringsim.comm.torch_private import (
    DispatchMode,
    is_traceable_wrapper_subclass,
    tree_leaves,
)
from ringsim.state import get_state
from ringsim.traces.events import BYTES, LAST_BYTES
from ringsim.traces.recorder import Recorder

STEP = 0.01


@contextmanager
def memory(model: nn.Module, *optimizers: Optimizer) -> Iterator[None]:
    """Counts the bytes of this rank's tensors in a block; does nothing unless the run is recorded.

    ``trace.memory()`` returns the counts, and ``trace.plot_memory()`` draws them. A count contains
    the model, its gradients, the optimizers' state, and all tensors that were computed in the block
    and still exist.

    Args:
        model: the modules that this rank trains, on any device. If this rank runs only some stages
            of a model, pass only these stages, from `ringsim.pipeline.build_stages`.
        optimizers: the optimizers of these modules.

    Returns:
        A context manager.

    Example:
        >>> import torch
        >>> import ringsim
        >>> def worker():
        ...     model = nn.Linear(1000, 1000, bias=False, device="meta")
        ...     with ringsim.memory(model):
        ...         model(torch.empty(10, 1000, device="meta")).sum().backward()
        >>> trace = ringsim.simulate(worker, world_size=1, link=ringsim.Link(0, 0))
        >>> trace.memory()[["parameters", "gradients", "optimizer"]].max().tolist()
        [4000000, 4000000, 0]
    """
    recorder = get_state().recorder
    if recorder is None:
        yield
        return
    counter = _Counter(recorder, model, optimizers)
    counter.record()
    try:
        with counter:
            yield
    finally:
        counter.record(LAST_BYTES)


@dataclass(eq=False)
class _Counter(DispatchMode):
    recorder: Recorder
    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    known: WeakValueDictionary[int, UntypedStorage] = field(default_factory=WeakValueDictionary)
    uncounted: int = 0
    largest: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives its modes no types

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        for key, storage in _find_storages(results).items():
            if key not in self.known:
                self.known[key] = storage
                self.uncounted += storage.nbytes()
        if self.uncounted > STEP * self.largest:
            self.record()
        return results

    def record(self, label: str = BYTES) -> None:
        """Counts the bytes of all tensors, and records them."""
        groups = [each.param_groups for each in self.optimizers]
        parameters = tree_leaves([*self.model.parameters(), *self.model.buffers(), groups])
        counted: dict[int, UntypedStorage] = {}
        sizes = []
        for found in (
            _find_storages(parameters),
            _find_storages([getattr(each, "grad", None) for each in parameters]),
            _find_storages([each.state for each in self.optimizers]),
            dict(self.known.items()),  # leaves out what other threads free meanwhile
        ):
            new = found.keys() - counted
            sizes.append(sum(found[key].nbytes() for key in new))
            counted |= found
        self.recorder.count_bytes(sizes, label)
        self.uncounted, self.largest = 0, max(self.largest, sum(sizes))


def _find_storages(tensors: Any) -> dict[int, UntypedStorage]:
    """Returns the storages of nested tensors by their identity; a DTensor has that of its shard."""
    found: dict[int, UntypedStorage] = {}
    for each in tree_leaves(tensors):
        if is_traceable_wrapper_subclass(each):
            parts = each.__tensor_flatten__()[0]
            found |= _find_storages([getattr(each, part) for part in parts])
        elif isinstance(each, Tensor):
            storage = each.untyped_storage()
            found[id(storage)] = storage
    return found
