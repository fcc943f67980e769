"""The address at which a rank looks for rank 0: machine names, and invalid addresses."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ringsim import destroy_distributed, initialize_distributed
from ringsim.errors import RendezvousFailed, RingError

DEBIAN = "127.0.1.1"
LOOPBACK = ipaddress.ip_network("127.0.0.0/8")


def free_port(head: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in head else socket.AF_INET) as taken:
        taken.bind((head, 0))
        port: int = taken.getsockname()[1]
        return port


def join(head: str, port: int, rank: int = 0, world_size: int = 1, timeout_s: float = 20) -> None:
    initialize_distributed(head, port, world_size, rank, rank, "cpu", timeout_s=timeout_s)


@pytest.fixture
def node07(monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns this machine's name, as in Debian's /etc/hosts.

    It resolves to loopback here, and to the network elsewhere.
    """
    real = socket.getaddrinfo

    def look_up(host: Any, *rest: Any, **named: Any) -> Any:
        return real(DEBIAN if host == "node07" else host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    try:
        free_port(DEBIAN)
    except OSError:
        pytest.skip("this system has only 127.0.0.1 on its loopback interface")
    return "node07"


@pytest.mark.parametrize(
    ("head", "local"), [(DEBIAN, True), ("localhost", True), ("node07", False)]
)
def test_gloo_is_kept_on_loopback_only_where_the_head_says_so_everywhere(
    node07: str, head: str, local: bool
) -> None:
    join(head, free_port(DEBIAN))
    assert ("GLOO_SOCKET_IFNAME" in os.environ) is local
    destroy_distributed()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_who_joins_by_the_name_does_not_take_it_for_local_either(
    node07: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun, rank 0 also joins, because the store belongs to the agent."""
    store = TCPStore(DEBIAN, 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    for head, local in ((node07, False), (DEBIAN, True)):
        join(head, store.port)
        assert ("GLOO_SOCKET_IFNAME" in os.environ) is local
        destroy_distributed()
    with pytest.raises(RendezvousFailed, match="rank 1 missing"):
        join(DEBIAN, store.port, world_size=2, timeout_s=0.3)


def test_missing_ranks_may_be_those_that_cannot_reach_loopback(node07: str) -> None:
    why = r"rank 1 missing.*'node07' resolves to 127\.0\.1\.1 on rank 0's machine.*MASTER_ADDR"
    with pytest.raises(RendezvousFailed, match=why):
        join(node07, free_port(DEBIAN), world_size=2, timeout_s=0.3)
    with pytest.raises(RendezvousFailed) as caught:
        join("127.0.0.1", free_port("127.0.0.1"), world_size=2, timeout_s=0.3)
    assert "resolves to" not in str(caught.value)


ELSEWHERE = r"cannot listen on .* as head_ip"
UNKNOWN = r".*this machine cannot resolve head_ip"
EVERYWHERE = "head_ip must be an address that the ranks can reach"


@pytest.mark.parametrize(
    ("head", "rank", "words"),
    [
        ("192.0.2.1", 0, ELSEWHERE),
        ("2001:db8::1", 0, ELSEWHERE),
        ("a name with spaces", 0, UNKNOWN),
        ("x" * 300, 1, UNKNOWN),
        ("0.0.0.0", 0, EVERYWHERE),
        ("::", 1, EVERYWHERE),
    ],
)
def test_a_head_that_cannot_be(head: str, rank: int, words: str) -> None:
    with pytest.raises(RingError, match=f"^{words}"):
        join(head, 29500, rank, 2, 0.3)


def test_a_name_that_is_not_answered_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: never.wait(30))
    words = r"cannot resolve head_ip 'slow\.example': no answer within"
    with pytest.raises(RendezvousFailed, match=words):
        join("slow.example", 29500, timeout_s=0.1)
    never.set()
