"""Runs programs in SimGrid, for `test_other_simulators.py`.

Reads them as JSON, and writes when each rank ends, in seconds. Each ordered pair of ranks has a
link of its own, on which a message takes its latency and then its bytes; no protocol costs more.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from simgrid import Actor, Engine, LinkInRoute, Mailbox, NetZone, this_actor

PLAIN = (
    "model:CM02",
    "loopback-lat:0",
    "TCP-gamma:0",
    "crosstraffic:0",
    "latency-factor:1",
    "bandwidth-factor:1",
    "weight-S:0",
)


def follow(number: int, rank: int, program: list[list[Any]], ends: list[float]) -> None:
    def box(source: int, to: int) -> Any:
        return Mailbox.by_name(f"{number}: {source}>{to}")

    for what, *about in program:
        if what == "work":
            this_actor.sleep_for(about[0])
        elif what == "send":
            box(rank, about[0]).put(b"", about[1])
        elif what == "recv":
            box(about[0], rank).get()
        else:
            to, source, size_bytes = about
            sending, receiving = (
                box(rank, to).put_async(b"", size_bytes),
                box(source, rank).get_async(),
            )
            sending.wait()
            (receiving[0] if isinstance(receiving, tuple) else receiving).wait()
    ends[rank] = Engine.clock


def main() -> None:
    asked = json.load(sys.stdin)
    engine = Engine(
        ["simgrid", "--log=root.thres:critical", *(f"--cfg=network/{each}" for each in PLAIN)]
    )
    zone, ends = NetZone.create_full_zone("all"), []
    for number, program in enumerate(asked["programs"]):
        hosts = [zone.create_host(f"{number}: {rank}", 1e9).seal() for rank in range(len(program))]
        ends.append([0.0] * len(hosts))
        for source, one in enumerate(hosts):
            for to, other in enumerate(hosts):
                if source != to:
                    link = (
                        zone.create_link(f"{number}: {source}>{to}", 1 / asked["beta_s_per_byte"])
                        .set_latency(asked["alpha_s"])
                        .seal()
                    )
                    zone.add_route(
                        one.netpoint, other.netpoint, None, None, [LinkInRoute(link)], False
                    )
        for rank, host in enumerate(hosts):
            Actor.create(f"{number}: {rank}", host, follow, number, rank, program[rank], ends[-1])
    zone.seal()
    engine.run()
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
