"""Whoever reaches a port of a run does not run code by it."""

import base64
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from ddprun.host import network, tcp_store
from ddprun.host.network import interface_by_address
from ddprun.launch.rendezvous import check_pickled_state, make_rendezvous_handler
from tests.launch.test_processes import ENDLESS, wait_for_steps
from tests.namespaces import Host, hosts, needs_namespaces
from tests.ranks import Running, free_port

NOBODY = 65534

ATTACK = f"""
import base64, encodings.idna, json, os, pickle, socket, sys
from datetime import timedelta
from torch.distributed import TCPStore

canary, places = sys.argv[1], json.loads(sys.argv[2])
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})


class Canary:
    def __reduce__(self):
        return os.mkdir, (canary,)


planted = base64.b64encode(pickle.dumps(Canary()))
seen = []
for address, port in places:
    try:
        socket.create_connection((address, port), timeout=2).close()
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
        keys = store.list_keys()
    except Exception as error:
        print(address, port, type(error).__name__, file=sys.stderr)
        continue
    seen += keys
    for key in keys:
        if "torch.rendezvous" in key:
            store.set(key.removeprefix("/"), planted)
print(json.dumps(seen))
"""


def listeners(pids: Sequence[int]) -> set[tuple[str, int]]:
    """Where these processes listen for TCP connections."""
    return {
        (found.laddr.ip, found.laddr.port)
        for pid in pids
        for found in psutil.Process(pid).net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
    }


def attack(canary: Path, places: Sequence[tuple[str, int]]) -> list[str]:
    """Be another local user, if this is root: plant an object wherever the state of a rendezvous lies."""
    done = subprocess.run(
        [sys.executable, "-c", ATTACK, str(canary), json.dumps([*places])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_another_user_of_the_host_runs_no_code(tmp_path: Path) -> None:
    """All ports of a run on one host are on loopback, and nothing that lies behind them is unpickled."""
    (tmp_path / "endless.yaml").write_text(ENDLESS)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    tmp_path.chmod(0o755)
    with Running("endless.yaml", "--run-dir", "run", cwd=tmp_path) as running:
        ranks = wait_for_steps(running, tmp_path / "run")
        stores = listeners([running.process.pid])
        assert stores, "the ranks' store is reached over TCP"
        places = stores | listeners(ranks)
        everywhere = [address for address in interface_by_address() if ":" not in address]
        seen = attack(open_to_all / "canary", [(ip, port) for ip in everywhere for _, port in stores])
        assert any("ddprun" in key for key in seen), "the attacker reached no store"
        running.process.send_signal(signal.SIGINT)
        done = running.wait(60)
    assert not (open_to_all / "canary").exists()
    assert {ip for ip, _ in places} == {"127.0.0.1"}
    assert done.code == 130, done.stderr


class Canary:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def meeting(port: int, address: str = "127.0.0.1") -> RendezvousParameters:
    """Of two hosts, by c10d."""
    return RendezvousParameters(
        "c10d", f"{address}:{port}", "run", 2, 2, local_addr=address, join_timeout=20, is_host=True
    )


def test_hosts_unpickle_nothing_but_their_own_state(tmp_path: Path) -> None:
    """torchelastic would; here the host that finds a stranger's object says so and ends."""
    port = free_port()
    handler = make_rendezvous_handler(meeting(port))
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    planted = base64.b64encode(pickle.dumps(Canary(tmp_path / "canary"))).decode()
    store.set("torch.rendezvous.run", planted)
    with pytest.raises(RendezvousStateError, match=r"mkdir, which no host of a run puts there"):
        handler.next_rendezvous()
    assert not (tmp_path / "canary").exists()


def test_hosts_still_meet() -> None:
    """What two hosts put into the store is what may be there."""
    port = free_port()
    first = make_rendezvous_handler(meeting(port))
    parameters = meeting(port)
    parameters.config["is_host"] = False
    second = make_rendezvous_handler(parameters)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda one=one: found.append(one.next_rendezvous()), daemon=True)
        for one in (first, second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted((one.rank, one.world_size) for one in found) == [(0, 2), (1, 2)]
    assert len({one.bootstrap_store_info.master_port for one in found}) == 1
    assert {ip for ip, _ in listeners([os.getpid()])} <= {"127.0.0.1", "::1"}
    for one in (first, second):
        one.shutdown()


@pytest.mark.parametrize("state", [b"", b"no pickle", pickle.dumps(print), pickle.dumps({"a": os.system})])
def test_state_of_another_kind_is_refused(state: bytes) -> None:
    """Damaged or foreign, it is never loaded."""
    with pytest.raises(RendezvousStateError):
        check_pickled_state(state)


@pytest.mark.parametrize(
    ("host", "found", "address"),
    [
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("localhost", ["::1", "127.0.0.1"], "127.0.0.1"),
        ("10.0.0.1", ["10.0.0.1"], "10.0.0.1"),
        ("10.0.1.1", ["10.0.1.1"], "10.0.1.1"),  # another interface, named by its address
        ("me", ["10.0.0.1"], "10.0.0.1"),
        ("me", ["127.0.1.1"], None),  # as some distributions have it; elsewhere the name leads elsewhere
        ("me", ["10.0.1.1"], None),  # not where this host's own way out is
        ("me", ["10.0.0.1", "10.0.1.1"], None),
        ("service", ["10.9.9.9"], None),
        ("unknown", [], None),
    ],
)
def test_a_store_listens_where_ranks_reach_it(
    monkeypatch: pytest.MonkeyPatch, host: str, found: list[str], address: str | None
) -> None:
    """On one address where that is sure, else on every interface."""
    own = {"127.0.0.1": "lo", "10.0.0.1": "e0", "10.0.1.1": "e1"}
    monkeypatch.setattr(network, "resolve_addresses", lambda name: found)
    monkeypatch.setattr(network, "interface_by_address", lambda: own)
    monkeypatch.setattr(network, "address_towards", lambda name: "10.0.0.1")
    assert tcp_store.listen_address(host) == address


def test_localhost_is_reached_in_either_kind_of_address() -> None:
    """A server for `localhost` listens on 127.0.0.1; a client of that name finds it."""
    served = tcp_store.open_store("localhost", 0, serve=True, timeout=timedelta(seconds=10))
    client = tcp_store.open_store("localhost", served.port, serve=False, timeout=timedelta(seconds=10))
    client.set("key", "value")
    assert served.get("key") == b"value"
    assert network.LOOPBACK == "127.0.0.1"


def listening_on(host: Host) -> set[str]:
    """The addresses of a host on which anything listens, in hexadecimal as the kernel shows them."""
    listed = subprocess.run(
        ["ip", "netns", "exec", host.namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = [line.split() for line in listed.splitlines()]
    return {row[1].partition(":")[0] for row in rows if len(row) > 3 and row[3] == "0A"}


@needs_namespaces
@pytest.mark.netns
def test_on_one_host_nothing_listens_on_the_address_of_its_name(tmp_path: Path) -> None:
    """Where Gloo, left to itself, would listen."""
    (tmp_path / "endless.yaml").write_text(ENDLESS)
    with hosts(2) as (host, _), Running("endless.yaml", "--run-dir=run", cwd=tmp_path, host=host) as running:
        wait_for_steps(running, tmp_path / "run")
        assert listening_on(host) == {"0100007F"}
        running.process.send_signal(signal.SIGINT)
        assert running.wait(60).code == 130


@needs_namespaces
@pytest.mark.netns
def test_on_two_hosts_only_the_named_address_listens(tmp_path: Path) -> None:
    """The store of the rendezvous, that of the ranks and Gloo are on the address that leads to the other
    host, and on no other; not where a host's own name leads, as some distributions have it.
    """
    (tmp_path / "endless.yaml").write_text(ENDLESS)
    flags = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29400"]
    own_name = 'echo "127.0.1.1 $(hostname)" > /etc/hosts'
    with hosts(2) as made:
        first, second = (
            Running("endless.yaml", *flags, "--run-dir=run", cwd=tmp_path, host=host, setup=own_name)
            for host in made
        )
        with first, second:
            wait_for_steps(first, tmp_path / "run")
            assert first.process.poll() is None, first.wait().stderr
            listening = [listening_on(host) for host in made]
            for running in (first, second):
                running.process.send_signal(signal.SIGINT)
            codes = [running.wait(60).code for running in (first, second)]
    assert listening == [{"01004D0A"}, {"02004D0A"}]
    assert codes == [130, 130]
