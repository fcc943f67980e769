"""What pictures of time are made of.

Rows of ranks with lanes in them, the time axis, bars with level of detail, and arrows. A bar is a
stretch of time that an event spent in one way. It lies in a lane of its rank's row: marks at the
top, then spans, one lane for each depth of nesting, then sends and recvs::

    rank 0   | forward                |        span, depth 0
             | attention | | mlp |             span, depth 1
                              ..======         send: posted, then blocked
                 ............//////===         recv: posted, late sender, transfer

A collective takes both lanes of sends and recvs: while it lasts, its rank does neither.

Bars that are too short for a pixel are added up, never left out. Time is cut into slots one pixel
wide, and a slot is drawn as small stacked bars, whose height is the share of its time that they
take::

    100 % |                        lane
          |     _                  in slot 2, transfers take 60 % of the time and late senders 30 %
          |  _ |/|  _
          |_|=||=|_|=|___
           0 1  2 3 4  5           slots
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.ticker import MaxNLocator

from ringsim.plot import style
from ringsim.plot.style import BLUE, INK, MUTED, ORANGE, PURPLE, VERMILLION, Look
from ringsim.traces.events import COLLECTIVE, ERROR, MARK, NONE, RECV, SEND, SPAN, Events, Ints
from ringsim.traces.units import span_text, time_text, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ringsim.traces.value import Trace

(
    POSTED,
    TRANSFER,
    LATE_SENDER,
    LATE_RECEIVER,
    BLOCKED,
    COLLECTIVE_BLOCKED,
    UNWAITED,
    UNFINISHED,
    FAILED,
) = range(9)
OPERATION_LOOKS: Final = (
    Look("posted, not waited for yet", "#E4E4E4", "", MUTED),
    Look("transfer", BLUE),
    Look("blocked: late sender", VERMILLION, "////", "white"),
    Look("blocked: late receiver", ORANGE, "\\\\\\\\", INK),
    Look("blocked, other side unknown", "#9A9A9A", "||", "white"),
    Look("collective", PURPLE, "++", "white"),
    Look("never waited for", "#FFFFFF", "----", MUTED),
    Look("never finished", "#FFFFFF", "xxxx", VERMILLION),
    Look("failed", INK, "xxxx", "white"),
)
MESSAGE_LOOK: Final = Look("message on its way", BLUE)
# Paler than what tells of waiting and sending, so that names can be read inside.
SPAN_LOOKS: Final = (
    Look("span", "#9AD2F4"),
    Look("span", "#F6EE96", "////", "#DDCF3A"),
    Look("span", "#8AD0BB", "||", "white"),
    Look("span", "#CFCFCF", "\\\\\\\\", "white"),
    Look("span", "#9AD2F4", "--", "white"),
    Look("span", "#F6EE96", "xx", "#DDCF3A"),
    Look("span", "#8AD0BB", "++", "white"),
    Look("span", "#CFCFCF", "/|", "white"),
)


@dataclass(frozen=True, eq=False)
class Bars:
    """Bars as columns: numpy arrays of one length.

    The first ``depths`` lanes are for spans, and sends, recvs and collectives have one each after
    them. ``look`` is a number in ``OPERATION_LOOKS``; a span has their number plus the place of its
    label in ``labels``, which are ascending, -1 for none. What never ended ``is_open`` and lasts to
    the end of the trace.
    """

    rank: Ints
    lane: Ints
    start_ns: Ints
    end_ns: Ints
    look: Ints
    event: Ints
    is_open: Ints
    depths: int
    labels: tuple[int, ...]

    def __len__(self) -> int:
        """Returns the number of bars."""
        return len(self.rank)


def time_range(events: Events) -> tuple[int, int]:
    """First and last moment of a trace in ns; (0, 0) where there is nothing."""
    if len(events) == 0:
        return 0, 0
    return int(events.post_ns.min()), int(
        max(events.post_ns.max(), events.wait_ns.max(), events.done_ns.max())
    )


def make_bars(trace: Trace) -> Bars:
    """Cuts the events of a trace into bars.

    Every event but a mark has at least one, be it of no length.
    """
    events = trace.events
    first, last = time_range(events)
    done = np.where(events.done_ns == NONE, last, events.done_ns)
    depth, depths = _depths(events, done)
    spans = np.flatnonzero(events.kind == SPAN)
    labels, label = np.unique(events.label[spans], return_inverse=True)
    look = len(OPERATION_LOOKS) + label
    pieces = [*_operation_pieces(trace, done), (spans, events.post_ns[spans], done[spans], look)]
    event, start, end, look = (np.concatenate(column) for column in zip(*pieces, strict=True))
    kind = events.kind[event]
    lane = np.select(
        [kind == SPAN, kind == SEND, kind == RECV], [depth[event], depths, depths + 1], depths + 2
    )
    # In a file that no run has left, something may end before it began: it takes no time, and
    # nothing lies before the first moment.
    start = np.maximum(start, first)
    end = np.maximum(end, start)
    is_open = (
        (look == UNFINISHED)
        | (look == UNWAITED)
        | ((kind == SPAN) & (events.done_ns[event] == NONE))
    )
    return Bars(
        events.rank[event], lane, start, end, look, event, is_open, depths, tuple(labels.tolist())
    )


def _operation_pieces(trace: Trace, end: Ints) -> list[tuple[Ints, Ints, Ints, Ints]]:
    """Stretches of the sends, recvs and collectives: (events, starts, ends, looks).

    ``end`` is when each event is over, at the latest when the trace is.
    """
    events, waits = trace.events, trace.waits
    post, wait, done = events.post_ns, events.wait_ns, events.done_ns
    communicates = (events.kind != SPAN) & (events.kind != MARK)
    failed = communicates & (events.status == ERROR)
    going = communicates & ~failed
    waited, finished = wait != NONE, done != NONE
    begin = np.where(waited, wait, post)
    # an operation that is finished and was not waited for is posted all along; if it was done as it
    # was posted its bar has no length, so that it is counted
    until = np.where(waited, wait, end)
    posted = communicates & np.where(waited, wait > post, finished & ~failed)
    blocked = going & waited & finished
    matched = np.zeros(len(events), dtype=bool)
    matched[trace.messages.send] = matched[trace.messages.recv] = True
    message, late = events.kind != COLLECTIVE, wait + waits.late_sender_ns + waits.late_receiver_ns
    pieces = (
        (posted, post, until, POSTED),
        (failed, begin, end, FAILED),
        (going & ~finished & waited, begin, end, UNFINISHED),
        (going & ~finished & ~waited, post, end, UNWAITED),
        (blocked & (waits.late_sender_ns > 0), wait, late, LATE_SENDER),
        (blocked & (waits.late_receiver_ns > 0), wait, late, LATE_RECEIVER),
        (blocked & matched & message, late, done, TRANSFER),
        (blocked & ~matched & message, wait, done, BLOCKED),
        (blocked & ~message, wait, done, COLLECTIVE_BLOCKED),
    )
    return [
        (np.flatnonzero(which), starts[which], ends[which], np.full(which.sum(), look))
        for which, starts, ends, look in pieces
    ]


def _depths(events: Events, done: Ints) -> tuple[Ints, int]:
    """Returns the lane of each span, and the number of lanes.

    The lane is the number of spans of the same thread that are open when it starts; threads lie
    below each other.
    """
    depth, spans = np.zeros(len(events), dtype=np.int64), np.flatnonzero(events.kind == SPAN)
    if len(spans) == 0:
        return depth, 0
    last = time_range(events)[1]
    both = events.thread[spans].astype(np.int64) + (events.rank[spans].astype(np.int64) << 32)
    threads, thread = np.unique(both, return_inverse=True)
    # of a trace that lasts for centuries, lest it overflows
    coarser = max((len(threads) * (last + 1)).bit_length() - 62, 0)
    # Each thread after the one before: all counts in one go.
    start, end = (np.stack([events.post_ns[spans], done[spans]]) >> coarser) + thread * (
        (last >> coarser) + 1
    )
    order = np.lexsort((-end, start))
    start, end, thread = start[order], end[order], thread[order]
    # spans of no length open nothing: on a virtual clock many may share a moment
    lasting = end > start
    opened, closed = (
        np.cumsum(lasting) - lasting,
        np.searchsorted(np.sort(end[lasting]), start, side="right"),
    )
    own = np.maximum(opened - closed, 0)
    lanes = np.zeros(len(threads), dtype=np.int64)
    np.maximum.at(lanes, thread, own + 1)
    above = np.cumsum(lanes) - lanes
    # from the first thread of its rank on
    above -= above[np.searchsorted(threads >> 32, threads >> 32)]
    depth[spans[order]] = above[thread] + own
    return depth, int((above + lanes).max())


# from the middle of a row, which is 1 high, to the first and the last thing in it
EDGE: Final = 0.42
MARKS: Final = 0.17  # height of the strip for marks
# height of the two lanes for sends and recvs, where there are spans above them
OPERATIONS: Final = 0.32
GAP: Final = 0.03
LEAST_ROW_POINTS: Final = 4.0  # a row a rank is at least so high
MERGED_ROW_POINTS: Final = 12.0  # and one of several ranks


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of ranks on axes: all bars of all pictures are drawn here.

    ``top`` and ``bottom`` are the edges of the lanes, as distances from the middle of their row. Y
    grows downwards, rank 0 has its middle at 0. ``marks`` has the upper and lower edge of the strip
    for marks. ``ranks`` is how many ranks share a row.
    """

    ax: Axes
    top: Ints
    bottom: Ints
    marks: tuple[float, float]
    ranks: int = 1

    @classmethod
    def of(cls, trace: Trace, bars: Bars, ax: Axes) -> Rows:
        """Divides a row among what occurs in the trace.

        Rows too low to be read are merged, 2, 4, 8 ... ranks in one.
        """
        has_marks = bool((trace.events.kind == MARK).any())
        has_operations = bool((bars.lane >= bars.depths).any())
        top = -EDGE + (MARKS + GAP if has_marks else 0)
        split = (
            EDGE - OPERATIONS if has_operations and bars.depths else top if has_operations else EDGE
        )
        span_edges = np.linspace(top, split - GAP if has_operations else split, bars.depths + 1)
        middle, height = (split + EDGE) / 2, row_points(ax, trace.world_size)
        return cls(
            ax,
            top=np.concatenate([span_edges[:-1], [split, middle + GAP / 2, split]]),
            bottom=np.concatenate([span_edges[1:], [middle - GAP / 2, EDGE, EDGE]]),
            marks=(-EDGE, -EDGE + MARKS),
            ranks=1
            if height >= LEAST_ROW_POINTS
            else 2 ** math.ceil(math.log2(MERGED_ROW_POINTS / height)),
        )

    def draw(
        self,
        look: Look,
        gid: str,
        rank: Ints,
        lane: Ints | int,
        start: Ints,
        end: Ints,
        *,
        low: Ints | float = 0.0,
        high: Ints | float = 1.0,
        linewidth: float = 0.0,
        zorder: float = 3.0,
        outlined: bool = False,
    ) -> None:
        """Draws bars of one look; texture and outlines only where they can be seen.

        They begin and end at places of the axis. ``low`` and ``high`` are shares of the lane's
        height, counted from its lower edge.
        """
        base, height = rank // self.ranks + self.bottom[lane], self.bottom[lane] - self.top[lane]
        lower, upper = base - low * height, base - high * height
        corners: Any = np.stack([start, lower, start, upper, end, upper, end, lower], axis=-1)
        corners = corners.reshape(-1, 4, 2)
        left, right = self.ax.get_xlim()
        bottom, top = self.ax.get_ylim()
        points = abs(lower - upper) / abs(top - bottom) * style.points(self.ax)[1]
        wide = end - start >= LEAST_TEXTURED * (right - left)
        wide &= points >= LEAST_TEXTURED_POINTS
        more: Any = {"zorder": zorder, "gid": gid}
        boxes = []
        if not wide.all():
            plain = look.ink if look.colour == WHITE else look.colour  # its outline is what is seen
            # Smoothed edges of boxes as low as a pixel would beat with the rows.
            boxes.append(
                PolyCollection(
                    corners[~wide],
                    facecolors=plain,
                    linewidths=0,
                    antialiaseds=points[~wide] >= 1,
                    **more,
                )
            )
        if wide.any():
            more |= {"edgecolors": look.ink, "hatch": look.hatch or None, "linewidths": linewidth}
            boxes.append(PolyCollection(corners[wide], facecolors=look.colour, **more))
            if outlined:  # apart: a pattern takes the colour of the edge, and this is to be white
                white: Any = {"edgecolors": "white", "linewidths": 0.6, "zorder": zorder + 0.1}
                boxes.append(PolyCollection(corners[wide], facecolors="none", **white))
        for each in boxes:
            self.ax.add_collection(each, autolim=False)

    def write(self, rank: int, lane: int, x: float, text: str, *, size: float, colour: str) -> None:
        """Writes words into a bar, on a patch of its plain colour without texture and arrows."""
        self.ax.text(
            x,
            float(self.middle(rank, lane)),
            text,
            ha="center",
            va="center_baseline",
            fontsize=size,
            color=style.BLACK,
            zorder=7,
            clip_on=True,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": colour, "edgecolor": "none"},
        )

    def middle(self, rank: Ints | int, lane: Ints | int) -> Ints:
        """Heights of the middle of a lane, in the rows of the ranks."""
        height: Ints = rank // self.ranks + (self.top[lane] + self.bottom[lane]) / 2
        return height


# share of a lane that a slot with anything in it takes, so that it can be seen
LEAST_HEIGHT: Final = 0.2


@dataclass(frozen=True, eq=False)
class Density:
    """What bars add up to.

    Columns, one row for each (rank, lane, slot, look) that occurs; of ranks in one row, the first
    stands for all. Together they take ``share`` of the slot; drawn from ``bottom`` to ``top``, as
    shares of the lane's height.
    """

    rank: Ints
    lane: Ints
    slot: Ints
    look: Ints
    share: Ints
    bottom: Ints
    top: Ints


def merge_short(bars: Bars, first_ns: int, slot_ns: float) -> tuple[Ints, Density]:
    """Separates long bars from short ones.

    Adds up the short ones in slots of ``slot_ns``, the first from ``first_ns`` on.

    Returns:
        A mask of the bars at least a slot long, and what the others add up to: their time is the
        sum of ``share`` times ``slot_ns``.
    """
    long = bars.end_ns - bars.start_ns >= slot_ns
    return long, _stack(*_add_up(bars, ~long, first_ns, slot_ns), LEAST_HEIGHT)


def merge_ranks(bars: Bars, first_ns: int, slot_ns: float, ranks: int, world_size: int) -> Density:
    """Adds up all bars of ``ranks`` ranks at a time.

    ``share`` is that of the time of all of them.
    """
    together = replace(bars, rank=bars.rank // ranks * ranks)
    columns, share = _add_up(together, True, first_ns, slot_ns)
    return _stack(columns, share / np.minimum(ranks, world_size - columns[0]), 0.0)


def _add_up(bars: Bars, which: Ints | bool, first_ns: int, slot_ns: float) -> tuple[Ints, Ints]:
    """Cuts those ``which`` are meant at the edges of slots.

    Returns (rank, lane, slot, look) in ascending order, and the share of the slot that each takes.
    """
    start, end = (bars.start_ns - first_ns) / slot_ns, (bars.end_ns - first_ns) / slot_ns
    first = np.floor(start).astype(np.int64)
    pieces = np.where(which, np.maximum(np.ceil(end).astype(np.int64) - first, 1), 0)
    bar = np.repeat(np.arange(len(first)), pieces)
    slot = first[bar] + np.arange(len(bar)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    part = np.minimum(end[bar], slot + 1) - np.maximum(start[bar], slot)
    columns = np.stack([bars.rank[bar], bars.lane[bar], slot, bars.look[bar]]).astype(np.int64)
    if not len(bar):
        return columns, part
    sizes = tuple(columns.max(axis=1) + 1)
    keys, place = np.unique(np.ravel_multi_index(tuple(columns), sizes), return_inverse=True)
    return np.stack(np.unravel_index(keys, sizes)), np.bincount(place, weights=part)


def _stack(columns: Ints, share: Ints, least: float) -> Density:
    """Stacks what shares a slot, each at least ``least`` high.

    Stacks higher than the lane are shrunk.
    """
    rank, lane, slot, look = columns
    begins = np.append(True, np.diff(columns[:3], axis=1).any(axis=0))[: len(rank)]
    stack = np.cumsum(begins) - 1
    height = np.maximum(share, least)
    height /= np.maximum(np.bincount(stack, weights=height), 1.0)[stack]
    running = np.cumsum(height)
    top = np.clip(running - (running - height)[begins][stack], 0, 1)
    return Density(rank, lane, slot, look, share, np.clip(top - height, 0, 1), top)


SLOTS: Final = 1600  # pixels, about: what is shorter is merged with its neighbours
MERGED_SLOTS: Final = 400  # the same where ranks are merged
# share of the time before the first event from which on the axis begins there
LATE_START: Final = 0.15


@dataclass(frozen=True)
class TimeAxis:
    """Turns times of a trace into places on the axis.

    It calls ``first_ns`` 0 and ends at ``last_ns``; its unit has ``unit_ns``.
    """

    first_ns: int
    last_ns: int
    unit_ns: float
    unit: str

    @classmethod
    def of(cls, events: Events) -> TimeAxis:
        """Counts from the start of the run.

        Or, where ranks took long to get going, from the first event.
        """
        first, last = time_range(events)
        first = 0 if first < LATE_START * last else first
        unit_ns, unit = time_unit(max(last - first, 1))
        return cls(first, last, unit_ns, unit)

    @property
    def slot_ns(self) -> float:
        """Length of a pixel."""
        return max(self.last_ns - self.first_ns, 1) / SLOTS

    @property
    def label(self) -> str:
        """What stands under the axis."""
        if self.first_ns == 0:
            return f"time since the start of the run ({self.unit})"
        return (
            f"time since the first event ({self.unit}), which came {time_text(self.first_ns)} "
            "after the start of the run"
        )

    def at(self, time_ns: Ints | float) -> Ints:
        """Place of a time, or of many, on the axis."""
        return np.asarray((time_ns - self.first_ns) / self.unit_ns)


# of the axis: in a narrower box neither texture nor outline can be seen
LEAST_TEXTURED: Final = 8 / SLOTS
LEAST_TEXTURED_POINTS: Final = 3.0  # high, at least
WHITE: Final = "#FFFFFF"  # such a bar is its outline
MOST_NAMES: Final = 500  # words in boxes
LETTER: Final = 0.62  # width of a letter, as a share of the font's size
NAME_SIZE: Final = 8.0  # points
LEAST_SIZE: Final = 5.0  # points: smaller words cannot be read
ROW_NAME_POINTS: Final = 18.0  # from one row's name to the next, at least


def prepare_rows(
    ax: Axes, names: Sequence[str], length: float, time: str, *, above: float = 0.0
) -> None:
    """Gives axes of their final size a row for each name, and a time axis to ``length``.

    There are ``above`` points over the first row.
    """
    ax.set_xlim(-0.004 * length, 1.012 * length)
    ax.set_ylim(len(names) - 0.5, -0.5 - above / row_points(ax, len(names)))
    every = math.ceil(ROW_NAME_POINTS / row_points(ax, len(names)))
    ax.set_yticks(range(0, len(names), every), names[::every])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x", color=style.GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    label_time(ax, time)


def label_time(ax: Axes, text: str) -> None:
    """Labels the horizontal axis, and puts round numbers on it."""
    ax.set_xlabel(text, loc="left")
    ax.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def row_points(ax: Axes, rows: int) -> float:
    """Returns the height of a row in points."""
    return style.points(ax)[1] / max(rows, 1)


def look_of(number: int) -> Look:
    """Returns the look with a number as in ``Bars.look``; spans repeat theirs."""
    if number < len(OPERATION_LOOKS):
        return OPERATION_LOOKS[number]
    return SPAN_LOOKS[(number - len(OPERATION_LOOKS)) % len(SPAN_LOOKS)]


def draw_bars(rows: Rows, bars: Bars, which: Ints, axis: TimeAxis) -> None:
    """Draws the bars of a mask, to scale."""
    for number in np.unique(bars.look[which]).tolist():
        look, some = look_of(number), which & (bars.look == number)
        rows.draw(
            look,
            f"boxes-{number}",
            bars.rank[some],
            bars.lane[some],
            axis.at(bars.start_ns[some]),
            axis.at(bars.end_ns[some]),
            linewidth=0.8 if look.colour == WHITE else 0.0 if look.hatch else 0.5,
            zorder=2 if number in (POSTED, UNWAITED) else 3,
        )


def draw_density(rows: Rows, density: Density, slot: float) -> None:
    """Draws what bars add up to, in slots as wide as ``slot`` on the axis."""
    for number in np.unique(density.look).tolist():
        some = density.look == number
        start = density.slot[some] * slot
        rows.draw(
            look_of(number),
            f"density-{number}",
            density.rank[some],
            density.lane[some],
            start,
            start + slot,
            low=density.bottom[some],
            high=density.top[some],
            zorder=2.5,
        )


def draw_open_ends(rows: Rows, bars: Bars, axis: TimeAxis) -> None:
    """Puts an arrowhead at the end of each bar that never ended.

    There the trace ends, not the operation.
    """
    some = bars.is_open
    if some.any():
        rows.ax.scatter(
            axis.at(bars.end_ns[some]),
            rows.middle(bars.rank[some], bars.lane[some]),
            s=26,
            marker=">",
            c=np.where(bars.look[some] == UNFINISHED, VERMILLION, MUTED),
            linewidths=0,
            zorder=6,
            clip_on=False,
            gid="open-ends",
        )


def draw_span_names(rows: Rows, trace: Trace, bars: Bars, axis: TimeAxis) -> None:
    """Writes name, stage and microbatch into the spans where there is room, widest first."""
    spans = np.flatnonzero(bars.look >= len(OPERATION_LOOKS))
    if len(spans) == 0:
        return
    per_point = style.per_point(rows.ax)
    room = (bars.end_ns[spans] - bars.start_ns[spans]) / axis.unit_ns / per_point - 4
    lane = np.min((rows.bottom - rows.top)[: bars.depths])
    size = min(style.letters(NAME_SIZE), row_points(rows.ax, trace.world_size) * lane * 0.85)
    if size < style.least(LEAST_SIZE, NAME_SIZE):
        return
    widest = np.argsort(-room, kind="stable")[:MOST_NAMES]
    for bar, space in zip(spans[widest].tolist(), room[widest].tolist(), strict=True):
        for text in span_texts(trace, bars.event[bar]):
            if len(text) * LETTER * size <= space:
                middle = float(axis.at(bars.start_ns[bar] / 2 + bars.end_ns[bar] / 2))
                colour = look_of(bars.look[bar]).colour
                rows.write(bars.rank[bar], bars.lane[bar], middle, text, size=size, colour=colour)
                break


def span_texts(trace: Trace, event: int) -> list[str]:
    """What may be written into a span, from the longest text to the shortest."""
    events = trace.events
    label, stage, microbatch = events.label[event], events.stage[event], events.microbatch[event]
    name = span_text(events.tables.labels[label]) if label != NONE else ""
    number = str(microbatch) if microbatch != NONE else ""
    full = [
        name,
        f"stage {stage}" if stage != NONE else "",
        f"microbatch {microbatch}" if number else "",
    ]
    short = [name, number]
    texts = ", ".join(filter(None, full)), " ".join(filter(None, short)), number
    return list(filter(None, texts))


MOST_ARROWS: Final = 160
HEAD_POINTS: Final = 1.0  # width of the shaft, by which matplotlib measures the head


def choose_messages(trace: Trace, most: int = MOST_ARROWS, ranks: int = 1) -> Ints:
    """Picks the messages that get an arrow.

    All whose recv is done, or at most ``most``, evenly in time, of each way as many. A way leads
    from one row to another, and a row has ``ranks`` ranks; what stays in one gets no arrow.
    """
    messages, events = trace.messages, trace.events
    src, dst = messages.src.astype(np.int64) // ranks, messages.dst // ranks
    done = np.flatnonzero((events.done_ns[messages.recv] != NONE) & ((src != dst) | (ranks == 1)))
    if len(done) <= most:
        return done
    ends = src[done] * trace.world_size + dst[done]
    _, ways, sizes = np.unique(ends, return_inverse=True, return_counts=True)
    in_time = done[np.lexsort((events.post_ns[messages.send[done]], ways))]
    each = max(most // len(sizes), 1)
    # Ways take turns: arrows at one moment would stand in a line.
    turns = np.arange(each) + (np.arange(len(sizes)) * 0.618 % 1)[:, None]
    chosen = np.unique(
        (turns * sizes[:, None] / each).astype(np.int64) + (np.cumsum(sizes) - sizes)[:, None]
    )
    # of more ways than arrows every n-th
    return np.sort(in_time[chosen[:: -(-len(chosen) // most)]])


def draw_arrows(rows: Rows, trace: Trace, send_lane: int, axis: TimeAxis) -> int:
    """Draws arrows from where sends were posted to where their recvs were done.

    Returns how many.
    """
    messages, events = trace.messages, trace.events
    chosen = choose_messages(trace, ranks=rows.ranks)
    src, dst = messages.src[chosen], messages.dst[chosen]
    x, y = axis.at(events.post_ns[messages.send[chosen]]), rows.middle(src, send_lane)
    to_x, to_y = axis.at(events.done_ns[messages.recv[chosen]]), rows.middle(dst, send_lane + 1)
    # an arrow across many rows steps back
    far, across = abs(dst // rows.ranks - src // rows.ranks) > 1, trace.crosses(src, dst)
    looks = (
        (far & ~across, "#8C8C8C", 4.0, "arrows-far"),
        (across, VERMILLION, 4.4, "arrows-across"),
        (~far & ~across, INK, 4.5, "arrows"),
    )
    for some, colour, zorder, gid in looks:
        if some.any():
            rows.ax.quiver(
                x[some], y[some], (to_x - x)[some], (to_y - y)[some], angles="xy", scale_units="xy",
                scale=1, units="inches",
                width=HEAD_POINTS / 72, headwidth=6, headlength=7, headaxislength=6.5, minlength=0,
                color=colour, zorder=zorder, gid=gid,
            )  # fmt: skip
    return len(chosen)
