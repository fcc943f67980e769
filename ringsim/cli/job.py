"""``ringsim doctor`` inside a job: the ranks exchange facts about their hosts."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

import numpy as np

from ringsim.diagnose.failure import ranks_by_text
from ringsim.environment import count_crossings
from ringsim.errors import RingError, name_ranks
from ringsim.traces.units import count

Fact = tuple[bool, str, str]  # whether something works, its name, and details
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp
_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")


def examine_job() -> list[Fact] | None:
    """Builds the ring on all ranks of the job, as a program would.

    Every rank calls this function, which blocks until all ranks have called it, for at most 30 s.
    Returns the findings on rank 0, and None on other ranks.
    """
    from ringsim.comm.torch_private import default_store
    from ringsim.launch.clocks import name_clock
    from ringsim.ring import current_ring, destroy_distributed, initialize_distributed

    before = listening()  # a launcher may leave its own sockets open
    try:
        initialize_distributed()
        ring, store = current_ring(), cast("Any", default_store())
        mine = {
            "host": socket.gethostname(),
            "clock": name_clock(),
            "source": _SOURCE.read_text().strip() if _SOURCE.exists() else "unknown",
            "addresses": [
                address
                for inode, address in listening().items()
                if inode not in before and not ip_address(address).is_loopback
            ],
            "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        }
        store.set(f"ringsim/doctor/{ring.rank}", json.dumps(mine))
        said = (
            [json.loads(store.get(f"ringsim/doctor/{rank}")) for rank in range(ring.world_size)]
            if ring.rank == 0
            else []
        )
        destroy_distributed()
    except (RingError, RuntimeError) as error:
        return [(False, "job", str(error))]
    return [*_describe(said)] if said else None


def _describe(said: list[dict[str, Any]]) -> Iterator[Fact]:
    """Yields (works, what, detail) from the facts that the ranks sent, in rank order.

    Example:
        >>> rank = {"clock": "a", "source": "tsc", "interface": "eth0", "addresses": ["10.0.0.1"]}
        >>> for _, what, detail in _describe(
        ...     [{**rank, "host": host} for host in ("node0", "node1", "node0", "node1")]
        ... ):
        ...     print(f"{what}: {detail}")
        hosts: node0: ranks 0 and 2; node1: ranks 1 and 3
        networks: node0: eth0, 10.0.0.1; node1: eth0, 10.0.0.1
        clocks: 1 clock; node0: tsc; node1: tsc
        listening: node0: 2 sockets; node1: 2 sockets; none is open to every network
        ring: crosses hosts 4 times; 2 would suffice with initialize_distributed(ring_order="hosts")
    """
    hosts = [str(one["host"]) for one in said]
    ranks = ranks_by_text(dict(enumerate(hosts)))

    def of_each(tell: Any) -> str:
        return "; ".join(
            f"{host}: {tell([said[rank] for rank in some])}" for host, some in ranks.items()
        )

    def networks(some: list[dict[str, Any]]) -> str:
        used = sorted({address for one in some for address in one["addresses"]})
        return (
            ", ".join([some[0]["interface"] or "chosen by Gloo", *used])
            if used
            else "only loopback"
        )

    yield True, "hosts", "; ".join(f"{host}: {name_ranks(some)}" for host, some in ranks.items())
    yield True, "networks", of_each(networks)
    clocks = count(len({one["clock"] for one in said}), "clock")
    yield (
        True,
        "clocks",
        f"{clocks}; {of_each(lambda some: ', '.join(sorted({one['source'] for one in some})))}",
    )
    everywhere = sorted(
        {
            host
            for host, one in zip(hosts, said, strict=True)
            if any(ip_address(each).is_unspecified for each in one["addresses"])
        }
    )
    where = (
        f"open to every network on {', '.join(everywhere)}"
        if everywhere
        else "none is open to every network"
    )
    listens = of_each(lambda some: count(sum(len(one["addresses"]) for one in some), "socket"))
    yield not everywhere, "listening", f"{listens}; {where}"
    crossed, needed = count_crossings(hosts), count_crossings(sorted(hosts))
    hint = (
        f'; {needed} would suffice with initialize_distributed(ring_order="hosts")'
        if crossed > needed
        else ""
    )
    yield crossed == needed, "ring", f"crosses hosts {count(crossed, 'time')}{hint}"


def listening() -> dict[str, str]:
    """Returns the address of each socket that this process listens on, by inode (Linux only)."""
    found = {}
    inodes = set()
    for name in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed meanwhile
            inodes.add(os.readlink(name).removeprefix("socket:[").removesuffix("]"))
    for table in Path("/proc/self/net").glob("tcp*"):
        for words in map(str.split, table.read_text().splitlines()[1:]):
            if words[3] == _LISTENS and words[9] in inodes:
                # four-byte words in the byte order of this machine
                packed = bytes.fromhex(words[1].partition(":")[0])
                found[words[9]] = str(ip_address(np.frombuffer(packed, "u4").byteswap().tobytes()))
    return found
