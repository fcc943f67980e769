"""The contents of `ringsim.schedules.closed_forms`, under the module's former path."""

from ringsim.schedules.closed_forms import *  # noqa: F403 - all of them, also future ones
from ringsim.schedules.closed_forms import __all__ as __all__
