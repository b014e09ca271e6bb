"""Connections between launchers: who is let in, and what is no loss. `test_elastic` cuts hosts off."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import HashStore

from ddprun.launch.host_keepalive import HostKeepalive


@pytest.fixture
def lost() -> list[str]:
    return []


@pytest.fixture
def made(lost: list[str]) -> Iterator[tuple[HashStore, HostKeepalive, HostKeepalive]]:
    """The lifelines of two hosts, which are both this one."""
    store = HashStore()
    both = [HostKeepalive(store, index, 2, "127.0.0.1", lambda: lost.append("a host")) for index in range(2)]
    yield store, both[0], both[1]
    for one in both:
        one.close()
    wait_until(lambda: not running())


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ddprun-lifeline"]


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_end_of_a_launcher_is_no_loss(
    made: tuple[HashStore, HostKeepalive, HostKeepalive], lost: list[str]
) -> None:
    _, first, second = made
    wait_until(lambda: len(running()) == 3)  # one listens, and each end watches
    second.close()
    wait_until(lambda: len(running()) == 1)
    assert not lost
    assert first.lost_host is None


def test_strangers_are_sent_away_and_hold_nobody_up(
    made: tuple[HashStore, HostKeepalive, HostKeepalive],
) -> None:
    """One that says nothing, one that says something else."""
    store, *_ = made
    address, port, token = json.loads(store.get("ddprun/lifeline"))
    wait_until(lambda: len(running()) == 3)
    with (
        socket.create_connection((address, port), timeout=10),
        socket.create_connection((address, port), timeout=10) as liar,
        socket.create_connection((address, port), timeout=10) as friend,
    ):
        liar.sendall(b"x" * len(token))
        assert liar.recv(1) == b""
        friend.sendall(token.encode())
        wait_until(lambda: len(running()) == 5)  # with the silent one
        friend.settimeout(0.2)
        with pytest.raises(TimeoutError):
            friend.recv(1)


def test_an_address_that_is_not_here_is_told_and_ends_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = HashStore()
    first = HostKeepalive(store, 0, 2, "203.0.113.9", print)
    second = HostKeepalive(store, 1, 2, "127.0.0.1", print)
    first.close()
    second.close()
    wait_until(lambda: not running())
    said = capsys.readouterr().err
    assert said.startswith("ddprun: warning: cannot listen at 203.0.113.9, so hosts that are cut off")
    assert said.count("\n") == 1
