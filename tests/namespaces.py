"""Hosts with a network of their own on this machine: network namespaces (Linux, root)."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_HEADER_BYTES = 14 + 20 + 32
"""Of Ethernet, IPv4, and TCP with a time stamp."""

_SEGMENT_BYTES = 1500 - 20 - 32
"""What a packet carries besides."""


def _missing() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    probe = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True, check=False
    )
    return f"no namespaces here: {probe.stderr.strip()}" if probe.returncode else None


REASON = _missing()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=REASON or "")


@dataclass(frozen=True)
class Host:
    """A network namespace with an address, and the command prefix that runs something in it."""

    name: str
    address: str
    namespace: str

    def prefix(self, setup: str = "true") -> list[str]:
        """Run what follows on this host, with its host name, after the shell command `setup`."""
        script = f'hostname {self.name} && {setup} && exec "$@"'
        return [
            "ip",
            "netns",
            "exec",
            self.namespace,
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-ec",
            script,
            "sh",
        ]

    @contextmanager
    def namespaces(self, setup: str, cwd: Path) -> Iterator[list[int]]:
        """Descriptors of new namespaces on this host that `setup` has prepared, for setns(2)."""
        command = [*self.prefix(setup), "sh", "-c", "echo ready; exec sleep infinity"]
        with subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n", process.communicate()
                files = [Path(f"/proc/{process.pid}/ns/{name}") for name in ("net", "uts", "mnt")]
                with ExitStack() as stack:
                    yield [stack.enter_context(file.open("rb")).fileno() for file in files]
            finally:
                process.kill()

    def tx_bytes(self, interface: str) -> int:
        """Bytes sent over an interface since the namespace was made."""
        return int(self._read(f"/sys/class/net/{interface}/statistics/tx_bytes"))

    def tx_payload_bytes(self, interface: str) -> int:
        """Of them those that programs gave to TCP: without the headers of packets, and counted once if they
        were sent again. How the kernel cuts a stream, and what it loses on a full queue, vary by percents.
        """
        packets = int(self._read(f"/sys/class/net/{interface}/statistics/tx_packets"))
        rows = [line.split() for line in self._read("/proc/net/snmp").splitlines() if line.startswith("Tcp:")]
        again = int(dict(zip(*rows, strict=True))["RetransSegs"])
        return self.tx_bytes(interface) - _HEADER_BYTES * packets - _SEGMENT_BYTES * again

    def cut(self) -> None:
        """Take the link to the other host down."""
        _ip("-n", self.namespace, "link", "set", "e0", "down")

    def mend(self) -> None:
        """Take the link up again."""
        _ip("-n", self.namespace, "link", "set", "e0", "up")

    def _read(self, path: str) -> str:
        command = ["ip", "netns", "exec", self.namespace, "cat", path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """`count` hosts, node0 and node1: two are linked by interface e0, one stands alone with its loopback."""
    assert count in (1, 2)
    tag = uuid.uuid4().hex[:8]
    made = [Host(f"node{i}", f"10.77.0.{i + 1}", f"ddprun-{tag}-{i}") for i in range(count)]
    try:
        for host in made:
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            folder = Path("/etc/netns") / host.namespace  # `ip netns exec` puts these over /etc
            folder.mkdir(parents=True, exist_ok=True)
            names = "".join(f"{other.address} {other.name}\n" for other in made)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        if count == 2:
            one, two = made
            link = ["link", "add", "e0", "netns", one.namespace, "type", "veth"]
            _ip(*link, "peer", "name", "e0", "netns", two.namespace)
            for host in made:
                _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "e0")
                _ip("-n", host.namespace, "link", "set", "e0", "up")
        else:
            _ip("-n", made[0].namespace, "addr", "add", f"{made[0].address}/32", "dev", "lo")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / host.namespace, ignore_errors=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
