"""The closed forms of `ringsim.schedules.closed_forms`, by the path that users know."""

from ringsim.schedules.closed_forms import *  # noqa: F403 - all of them, whatever comes to be there
from ringsim.schedules.closed_forms import __all__ as __all__
