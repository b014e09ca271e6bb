"""Two hosts with something wrong between them or on one, examined by a real `ddprun doctor` on each."""

import contextlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import namespaces
from tests.namespaces import hosts
from tests.ranks import Finished, Running

PORT = 29400
FLAGS = ("--nnodes=2", f"--rdzv-endpoint=node0:{PORT}")

SLOW = "tc qdisc add dev e0 root tbf rate 100mbit burst 32kb latency 50ms"
SMALL_SHM = "mount -t tmpfs -o size=64k tmpfs /dev/shm"

_CLOSING = {
    "iptables": "iptables -A INPUT -i {link} -p tcp --dport {ports} --tcp-flags SYN,ACK SYN -j DROP",
    "nft": "nft add table ip t && nft 'add chain ip t c {{type filter hook input priority 0;}}' && "
    "nft add rule ip t c iifname {link} tcp dport {ports} 'tcp flags & (syn|ack) == syn' drop",
}
_FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


def _works(setup: str) -> bool:
    if namespaces.REASON is not None:
        return False
    command = ["unshare", "--net", "--mount", "sh", "-ec", setup]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _closing() -> str | None:
    for command in _CLOSING.values():
        for dash in (":", "-"):
            if _works(command.format(link="lo", ports=f"30000{dash}30001")):
                return command.replace("{ports}", "{low}" + dash + "{high}")
    return None


_CLOSED = _closing()


def closed(low: int, high: int) -> str:
    """Let nobody connect to these ports over the link."""
    assert _CLOSED is not None
    return _CLOSED.format(link="e0", low=low, high=high)


def skewed(seconds: int) -> dict[str, str]:
    """Variables under which a process sees another wall clock."""
    return {"LD_PRELOAD": str(_FAKETIME[0]), "FAKETIME": f"{seconds:+}s"}


_LINK_OF_ITS_OWN = "ip link add e0 type veth peer name e1 && ip link set e0 up && "
needs_tbf = pytest.mark.skipif(not _works(_LINK_OF_ITS_OWN + SLOW), reason="no tc, or a kernel without tbf")
needs_firewall = pytest.mark.skipif(_CLOSED is None, reason="neither iptables nor nft closes ports here")
needs_faketime = pytest.mark.skipif(not _FAKETIME, reason="libfaketime is not installed")


def examine(
    folder: Path,
    *arguments: str,
    setup: tuple[str, str] = ("true", "true"),
    environment: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {}),
    flags: Sequence[str] = FLAGS,
    module: Sequence[str] = (),
) -> tuple[Finished, Finished]:
    """Run the doctor on node0 and node1.

    Args:
        folder: where.
        arguments: of both, after `doctor`.
        setup: shell command on each host before it.
        environment: variables of each.
        flags: further arguments.
        module: run it as `python -m` of this.
    """
    words = ["doctor", *flags, *arguments]
    with hosts(2) as made, contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                Running(
                    *words,
                    cwd=folder,
                    module=module,
                    host=host,
                    setup=commands,
                    environment=variables,
                )
            )
            for host, commands, variables in zip(made, setup, environment, strict=True)
        ]
        one, two = (running.wait(60) for running in started)
    for done in (one, two):
        assert "Traceback" not in done.stderr, done.stderr
    return one, two


def findings(done: Finished, check: str = "", where: str = "") -> list[dict[str, Any]]:
    """What a report in JSON says, of one check or of all; of one place or of all."""
    found = json.loads(done.stdout)["findings"]
    return [one for one in found if check in ("", one["check"]) and where in ("", one["where"])]
