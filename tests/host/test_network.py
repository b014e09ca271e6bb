"""Which network interface is used, as far as one host can tell."""

import os
from unittest import mock

import pytest

from ddprun.engine.failures import FailureContext, open_ranks
from ddprun.host import network
from ddprun.parallel.ranks import Environment
from tests.ranks import as_processes


@pytest.mark.parametrize("name", ["lo", "l", "=lo", "lo,nowhere", "^nowhere0,docker0"])
def test_what_the_user_has_named_holds(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Interfaces that NCCL shall not take need not be here."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", name)
    if name == "lo,nowhere":
        with pytest.raises(network.NetworkError, match=r"NCCL_SOCKET_IFNAME is lo,nowhere, but .* lo"):
            network.choose_interface("localhost")
    else:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
        network.choose_interface("127.0.0.1")
        assert os.environ["NCCL_SOCKET_IFNAME"] == name
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", "the one that is not named is chosen"


def test_localhost_is_this_host() -> None:
    assert network.is_this_host("localhost")


def test_gloo_wants_the_whole_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where NCCL takes what it begins with."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "l")
    with pytest.raises(network.NetworkError, match="GLOO_SOCKET_IFNAME is l, but the interfaces here are"):
        network.choose_interface("127.0.0.1")


@pytest.mark.parametrize(("variable", "value"), [("GLOO_SOCKET_IFNAME", "lo"), ("NCCL_SOCKET_IFNAME", "=lo")])
def test_the_loopback_leads_to_no_other_host(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """Gloo says so after a while, without the name of the variable."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(network.NetworkError, match=f"{variable} is lo, the loopback, through which no other"):
        network.choose_interface("192.0.2.1")


def connecting_on_clones() -> str:
    """What two of three ranks say that are on machines of one name."""
    ranks = open_ranks(Environment.read(), 20.0, FailureContext())
    ranks.host = "other" if ranks.rank == 1 else "clone"
    with mock.patch.object(network, "machine_id", return_value=f"machine {ranks.rank}"):
        try:
            ranks.connect()
        except network.NetworkError as error:
            return str(error)
    return ""


def test_machines_of_one_name_are_refused() -> None:
    """By all ranks, before they make process groups that would lead nowhere."""
    expected = f"ranks 0, 2 are on several hosts that are all called clone; {network.NAME_ADVICE}"
    assert as_processes(3, connecting_on_clones) == [expected] * 3
    assert network.shared_names([("a", "1"), ("a", "1"), ("b", "1")]) == [], "launchers on one machine"
    assert network.machine_id() == network.machine_id() != ""
