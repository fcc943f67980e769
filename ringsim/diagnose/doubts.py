"""What the records leave open of recvs from any source, settled for the moments at which nothing is on its way.

A recv from any source and one from a particular rank, both open under one tag, may get the same message, and so may a send have either as
its other side. Who it was is not in the records before the one from any source is done, so ``analyse`` lets each of them hope. Where it is
known from elsewhere that nothing is on its way any more, hope is over: an operation that is still awaited has not got it. Of several that
a rank awaits at once, as those of a batch under one handle, any other may be what is missing: then hope stays.
"""

from __future__ import annotations

from dataclasses import replace

from ringsim.diagnose.waitfor import World

__all__ = ["doubt"]


def doubt(world: World) -> World:
    """Returns a world in which whatever others may have got instead is theirs.

    Args:
        world: the ranks at one moment at which nothing was on its way.

    Returns:
        The world, in which an operation that is awaited and ``doubtful`` is ``taken``, where its rank can wait for nothing else.

    Example:
        >>> from ringsim.traces.findings import Operation
        >>> from ringsim.diagnose.waitfor import Posted, RankView, analyse
        >>> from ringsim.traces.events import Group
        >>> operation = Operation(rank=0, op="recv", peer=1, tag=0, group="world")
        >>> mine = Posted(operation, Group("world", (0, 1)), awaited=True, counterparts=1, contested=1)
        >>> world = World((RankView("blocked", (mine,)), RankView("exited")))
        >>> analyse(world) is None, analyse(doubt(world)).ranks
        (True, (0,))
    """
    views = []
    for view in world.ranks:
        missing = [one for one in view.posted if one.awaited and (one.doubtful or not one.matched)]
        if len(missing) == 1 and missing[0].doubtful:
            view = replace(view, posted=tuple(replace(one, taken=True) if one is missing[0] else one for one in view.posted))
        views.append(view)
    return World(tuple(views))
