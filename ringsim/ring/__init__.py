"""The ring: a rank, its two neighbours, and the group that it shares with each of them.

Names are resolved on first use, because this package also contains the code that packs a worker for
the ranks. That code must not load torch into a program that does not use torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringsim.ring.printing import restore_output as restore_output
    from ringsim.ring.printing import suppress_output as suppress_output
    from ringsim.ring.ring import Ring as Ring
    from ringsim.ring.ring import current_ring as current_ring
    from ringsim.ring.ring import destroy_distributed as destroy_distributed
    from ringsim.ring.ring import get_comm_device as get_comm_device
    from ringsim.ring.ring import (
        get_pipeline_parallel_pred_group as get_pipeline_parallel_pred_group,
    )
    from ringsim.ring.ring import (
        get_pipeline_parallel_succ_group as get_pipeline_parallel_succ_group,
    )
    from ringsim.ring.ring import initialize as initialize
    from ringsim.ring.ring import initialize_distributed as initialize_distributed
else:

    def __getattr__(name: str) -> Any:
        """Loads a public name from the module that defines it."""
        module = "printing" if name in ("restore_output", "suppress_output") else "ring"
        try:
            return getattr(import_module(f"ringsim.ring.{module}"), name)
        except AttributeError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
