"""A machine's own name may lead to loopback there, and to its address on the network elsewhere: it does not say that all ranks are here."""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ringsim.comm.bootstrap import Card, build_default_group, host, leave, listen, meet
from ringsim.errors import RendezvousFailed

DEBIAN = "127.0.1.1"
LOOPBACK = ipaddress.ip_network("127.0.0.0/8")


@pytest.fixture
def node07(monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns this machine's name, as Debian's /etc/hosts has it."""
    real = socket.getaddrinfo

    def look_up(host: Any, *rest: Any, **named: Any) -> Any:
        return real(DEBIAN if host == "node07" else host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    try:
        listen("node07", 0).close()
    except RendezvousFailed:
        pytest.skip("this system has 127.0.0.1 alone on its loopback interface")
    return "node07"


def meet_alone(head: str, world_size: int = 1, timeout_s: float = 20) -> Any:
    listener = listen(head, 0)
    assert ipaddress.ip_address(listener.getsockname()[0]) in LOOPBACK
    return meet(head, listener.getsockname()[1], 0, world_size, Card(world_size, "cpu", tuple(range(world_size))), timeout_s, listener)


@pytest.mark.parametrize(("head", "local"), [("127.0.0.1", True), (DEBIAN, True), ("localhost", True), ("node07", False)])
def test_gloo_is_kept_on_loopback_only_where_the_head_says_so_everywhere(node07: str, head: str, local: bool) -> None:
    rendezvous = meet_alone(head)
    assert rendezvous.loopback is local
    undo = build_default_group(rendezvous, 0, 1, "gloo", timedelta(seconds=20))
    assert ("GLOO_SOCKET_IFNAME" in os.environ) is local
    dist.destroy_process_group()
    undo()
    leave(rendezvous, 1)


def test_who_joins_by_the_name_does_not_take_it_for_local_either(node07: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun rank 0 joins too: the store is the agent's."""
    listener = listen(DEBIAN, 0)
    port = listener.getsockname()[1]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", str(port))
    store = host(listener, 20)
    for head, local in ((node07, False), (DEBIAN, True)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", head)
        assert meet(head, port, 0, 1, Card(1, "cpu", (0,)), 20).loopback is local
    del store


def test_missing_ranks_may_be_those_that_cannot_reach_loopback(node07: str) -> None:
    with pytest.raises(RendezvousFailed, match=r"rank 1 missing.*'node07' leads to 127\.0\.1\.1 on rank 0's own machine.*MASTER_ADDR"):
        meet_alone(node07, world_size=2, timeout_s=0.3)
    with pytest.raises(RendezvousFailed) as caught:
        meet_alone("127.0.0.1", world_size=2, timeout_s=0.3)
    assert "own machine" not in str(caught.value)
