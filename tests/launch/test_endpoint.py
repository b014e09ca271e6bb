"""A public meeting point is warned about, and `--set` is handed on where `ps` does not look."""

import os
import socket
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from ddprun.config import load
from ddprun.host import network, tcp_store
from ddprun.launch.agent import make_agent
from ddprun.launch.flags import parse_torchrun_flags
from ddprun.launch.launcher import overrides_variable, take_inherited_overrides
from ddprun.launch.rendezvous import make_rendezvous_handler
from tests.ranks import Running, ddprun, free_port


@pytest.mark.parametrize(
    ("meeting_point", "address"),
    [
        ("8.8.8.8:29400", "8.8.8.8"),
        ("8.8.8.8", "8.8.8.8"),
        ("[2001:4860:4860::8888]:29400", "2001:4860:4860::8888"),
        ("2001:4860:4860::8888", "2001:4860:4860::8888"),
        ("[::ffff:8.8.8.8]:29400", "::ffff:808:808"),
        ("localhost:0", None),
        ("127.0.0.1:29400", None),
        ("10.1.2.3:29400", None),
        ("192.168.0.1:29400", None),
        ("172.16.0.1", None),
        ("169.254.1.1:29400", None),
        ("100.64.0.1:29400", None),
        ("[::1]:29400", None),
        ("[fe80::1%eth0]:29400", None),
        ("[fd00::1]:29400", None),
        ("", None),
        (":29400", None),
        ("no-such-host.invalid:29400", None),
        ("a..b:1", None),
    ],
)
def test_only_public_addresses_are_public(meeting_point: str, address: str | None) -> None:
    """Loopback, private, link-local and shared ones are not, in either kind of address."""
    told = network.public_address_warning(meeting_point)
    assert (told is None) == (address is None)
    assert told is None or ("no authentication" in told and str(address) in told)


@pytest.mark.parametrize(
    ("endpoint", "read"),
    [
        ("node0", ("node0", 29400)),
        ("node0:0", ("node0", 0)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
        ("::1", ("::1", 29400)),
        *((wrong, None) for wrong in ("", ":1", "node0:", "node0:x", "node0:\xb2", "[::1]:65536")),
    ],
)
def test_an_endpoint_has_a_host_and_a_port(endpoint: str, read: tuple[str, int] | None) -> None:
    """An empty host, or a port that no socket has, was waited for without a word."""
    if read is None:
        with pytest.raises(ValueError, match="is not HOST:PORT, with a port up to 65535"):
            network.host_and_port(endpoint)
    else:
        assert network.host_and_port(endpoint) == read


def test_a_name_is_what_it_resolves_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """One public address of a name is enough."""

    def look_up(host: str, port: None) -> list[tuple[object, ...]]:
        found = {"inside": ["10.0.0.1"], "outside": ["10.0.0.1", "8.8.4.4"]}[host]
        return [(0, 0, 0, "", (address, 0)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert network.public_address_warning("inside:1") is None
    assert "outside:1 (8.8.4.4)" in str(network.public_address_warning("outside:1"))


def test_a_silent_name_server_does_not_hold_a_run_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for two seconds."""
    answer = threading.Event()

    def look_up(host: str, port: None) -> list[tuple[object, ...]]:
        answer.wait(30)
        return []

    monkeypatch.setattr(network, "_LOOK_UP_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    start = time.monotonic()
    try:
        assert network.public_address_warning("slow:1") is None
        assert time.monotonic() - start < 20
    finally:
        answer.set()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "p.yaml").write_text(
        "model:\n  mlp: {inputs: 64, outputs: 10}\ndata: digits\noptimizer: sgd\n"
    )
    return tmp_path


def test_a_run_warns_once(folder: Path) -> None:
    """Before it tries to meet anybody, and once."""
    flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "192.88.98.1:9"]
    flags += ["--rdzv-conf", "read_timeout=2,connect_timeout=2"]
    with Running("p.yaml", *flags, cwd=folder) as running:
        assert running.process.stderr is not None
        line = running.process.stderr.readline()
        assert line.startswith("ddprun: warning: the rendezvous is at the public address 192.88.98.1:9."), (
            line
        )


def test_a_host_to_which_no_other_comes_says_so(folder: Path) -> None:
    """Torchelastic's own error has no words."""
    flags = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-conf=join_timeout=1"]
    done = ddprun("p.yaml", *flags, cwd=folder)
    assert done.code == 1
    assert "cannot reach the other hosts at 127.0.0.1:" in done.stderr
    assert "fewer than 2 hosts came in time, or the others run without this one" in done.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_master_addr_that_is_no_host_is_named(folder: Path, rank: str) -> None:
    """By each host, before torch tries it for as long as timeout_s says."""
    variables = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "29500"}
    with Running("p.yaml", cwd=folder, environment=variables) as running:
        assert running.process.stderr is not None
        lines = [running.process.stderr.readline() for _ in range(2 if rank == "0" else 1)]
        assert running.process.poll() is None
    assert lines[-1] == (
        "ddprun: warning: this host cannot resolve MASTER_ADDR=nowhere.invalid; trying for 600 s "
        "(launch.timeout_s): check the name, or write an address\n"
    )


@pytest.mark.parametrize("endpoint", [{"rdzv_endpoint": "[::1]:29655"}, {"master_addr": "::1"}])
def test_ranks_get_an_ipv6_address_as_it_is(
    folder: Path, endpoint: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in brackets, as no host is called."""
    monkeypatch.setattr(multiprocessing, "get_subprocess_handler", None)  # put back after the test
    read = parse_torchrun_flags({"nnodes": "2", "node_rank": "1", **endpoint}, ["-m", "ddprun"])
    config, _, _ = torchrun.config_from_args(read)
    agent = make_agent(config, "python", [], folder, load(folder / "p.yaml"), None)
    spec = agent.get_worker_group().spec
    assert (spec.master_addr, spec.master_port) == ("::1", 29655 if "rdzv_endpoint" in endpoint else 29500)


def test_a_variable_of_torchelastics_is_named(folder: Path) -> None:
    """Where torch would only say that it is no number."""
    done = ddprun("p.yaml", cwd=folder, environment={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "abc"})
    told = "ddprun: TORCH_ELASTIC_SHUTDOWN_TIMEOUT is 'abc'; it must be a whole number of seconds\n"
    assert (done.code, done.stderr) == (2, told)


def test_overrides_are_passed_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order and as they are; processes that the ranks start do not see them."""
    overrides = ["name=a b", "data={x: 'ü\n'}", "=", "seed=1"]
    before = dict(os.environ)
    for name, value in overrides_variable(overrides).items():
        monkeypatch.setenv(name, value)
    assert take_inherited_overrides() == tuple(overrides)
    assert os.environ == before
    assert take_inherited_overrides() == ()


def test_a_server_answers_or_it_is_said_why_not() -> None:
    """A port that somebody listens on, with a host name or an address; and one on which nobody does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert network.connection_problem("localhost", port) == ""
        assert network.connection_problem("127.0.0.1", port) == ""
    assert network.connection_problem("127.0.0.1", port) == "connection refused"
    assert network.connection_problem("no.such.host.invalid", 1) == "name or service not known"


def test_another_programs_port_is_no_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections, and says nothing that torch would understand, which waits for ever."""
    monkeypatch.setattr(tcp_store, "_ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        parameters = RendezvousParameters("c10d", endpoint, "x", 2, 2, read_timeout="1")
        message = f"another program may have port {listener.getsockname()[1]}"
        with pytest.raises(RendezvousConnectionError, match=message):
            make_rendezvous_handler(parameters)


def test_a_host_that_cannot_reach_the_rendezvous_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """In time, and not that another program has the port, where there is none: torch waits twice as long."""
    monkeypatch.setattr(tcp_store, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    parameters = RendezvousParameters("c10d", endpoint, "x", 2, 2, read_timeout="1", is_host="false")
    message = f"{socket.gethostname()} cannot connect to {endpoint}: connection refused"
    with pytest.raises(RendezvousConnectionError, match=message):
        make_rendezvous_handler(parameters)
