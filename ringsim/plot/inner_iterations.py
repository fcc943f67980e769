"""How busy the stages of a generation ring are, by how many batches are on their way: the closed forms, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import MultipleLocator, PercentFormatter

from ringsim.plot import style
from ringsim.schedules.generation import steady_use

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MeasuredUse", "plot_inner_iterations"]

SIZE_INCHES: Final = (7.2, 3.8)
_LINES: Final[tuple[tuple[bool, str, str, str, Any], ...]] = (  # matplotlib types its line styles as literals
    (False, "synchronous", style.BLUE, "o", "-"),
    (True, "asynchronous", style.VERMILLION, "s", "--"),
)


class MeasuredUse(NamedTuple):
    """A measured point: with how many inner iterations, how the messages went, and the share in which the stages worked."""

    num_inner_iterations: int
    async_comm: bool
    use: float


def plot_inner_iterations(
    num_stages: int, measured: Sequence[MeasuredUse] = (), *, metadata: dict[str, Any] | None = None, ax: Axes | None = None
) -> Axes:
    """Draws the share of the time in which a stage works while decoding, by the number of inner iterations.

    Lines are the closed forms (``steady_use``), filled points what was measured. Where a line is at 0, and crossed, the ring never ends.

    Args:
        num_stages: N, 2 or more.
        measured: what was measured, if anything.
        metadata: that of a measured trace, for the last line.
        ax: where to draw; a new figure by default.

    Returns:
        The axes. ``ax.figure.savefig(...)`` writes them.

    Example:
        >>> import matplotlib; matplotlib.use("Agg")
        >>> plot_inner_iterations(4).get_title(loc="left")
        'With 4 stages, 4 batches on their way keep all of them busy'
    """
    with style.drawing():
        if ax is not None:
            _draw(num_stages, measured, metadata, ax)
            return ax
        figure = plt.figure(figsize=SIZE_INCHES)
        ax = figure.add_axes((0, 0, 1, 1))
        style.fit(figure, [(ax, *SIZE_INCHES, _draw(num_stages, measured, metadata, ax))])
    return ax


def _draw(num_stages: int, measured: Sequence[MeasuredUse], metadata: dict[str, Any] | None, ax: Axes) -> style.Margins:
    turns = range(1, 2 * num_stages + 1)
    for async_comm, _, colour, marker, line in _LINES:
        uses = [float(steady_use(num_stages, number, async_comm)) for number in turns]
        ax.plot(turns, uses, line, color=colour, linewidth=1.6, marker=marker, markersize=7, markerfacecolor="white", zorder=3)
        stuck = [number for number, use in zip(turns, uses, strict=True) if use == 0]
        ax.scatter(stuck, [0.0] * len(stuck), s=110 if async_comm else 60, marker="x", color=colour, linewidths=1.8, zorder=5)
        points = [(point.num_inner_iterations, point.use) for point in measured if point.async_comm is async_comm]
        ax.scatter([x for x, _ in points], [y for _, y in points], s=26, marker=marker, color=colour, linewidths=0, zorder=4)
    ax.set(xlabel="inner iterations: batches on their way at a time", ylabel="a stage works")
    ax.set_xlim(0.6, 2 * num_stages + 0.4)
    ax.set_ylim(-0.04, 1.06)
    ax.xaxis.set_major_locator(MultipleLocator(1 if num_stages <= 12 else num_stages // 6))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.grid(axis="y", color="#E9E9E9", linewidth=0.8)
    ax.set_axisbelow(True)
    handles = [
        Line2D([], [], color=colour, linestyle=line, marker=marker, markersize=7, markerfacecolor="white", label=f"{name}, closed form")
        for _, name, colour, marker, line in _LINES
    ]
    if measured:
        handles.append(Line2D([], [], color=style.INK, linestyle="none", marker="o", markersize=5, label="filled: measured"))
    handles.append(Line2D([], [], color=style.INK, linestyle="none", marker="x", markersize=7, label="never ends"))
    return style.dress(
        ax,
        f"With {num_stages} stages, {num_stages} batches on their way keep all of them busy",
        subtitle=f"fewer starve the stages; more jam the ring: synchronous from {num_stages + 1}, asynchronous from {2 * num_stages} on",
        metadata=metadata or {"source": "closed forms; nothing was run"},
        handles=handles,
        left=52,
        right=14,
        below=40,
    )
