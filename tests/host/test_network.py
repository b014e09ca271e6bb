"""Which network interface is used, as far as one host can tell."""

import os
from functools import partial

import pytest

from ddprun.host import network


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
    for choose in (partial(network.choose_interface, "127.0.0.1"), network.choose_loopback):
        with pytest.raises(network.NetworkError, match="GLOO_SOCKET_IFNAME is l, but the interfaces here"):
            choose()


@pytest.mark.parametrize(("variable", "value"), [("GLOO_SOCKET_IFNAME", "lo"), ("NCCL_SOCKET_IFNAME", "=lo")])
def test_the_loopback_leads_to_no_other_host(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """Gloo says so after a while, without the name of the variable."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(network.NetworkError, match=f"{variable} is lo, the loopback, through which no other"):
        network.choose_interface("192.0.2.1")


def test_names_that_several_machines_have_are_found() -> None:
    """Several launchers on one machine have one name, and are no fault."""
    assert network.duplicate_host_names([("a", "1"), ("b", "3"), ("a", "2")]) == ["a"]
    assert network.duplicate_host_names([("a", "1"), ("a", "1"), ("b", "1")]) == [], (
        "launchers on one machine"
    )
    assert network.machine_id() == network.machine_id() != ""
