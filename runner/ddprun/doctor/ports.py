"""Whether hosts reach each other at ports that the kernel chooses, as Gloo and NCCL need it."""

import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from ddprun.doctor.findings import Finding, pair_of

_ANSWERS_S = 3.0
_COUNT = 3
"""A firewall may leave some ports open; so many are tried."""

_AT_ONCE = 32
_TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class Doors:
    """Where a host listens."""

    address: str
    ports: tuple[int, ...]
    token: str
    """What it answers: somebody else might listen there in another network of the same numbers."""


class Open:
    """Listens at an address of this host, at ports that the kernel chooses, until the block is left."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        token = secrets.token_hex(_TOKEN_BYTES // 2)
        self._sockets = [socket.create_server((address, 0), family=family) for _ in range(_COUNT)]
        ports = tuple(int(one.getsockname()[1]) for one in self._sockets)
        self.doors = Doors(address, ports, token)
        for one in self._sockets:
            threading.Thread(target=self._answer, args=(one,), daemon=True).start()

    def _answer(self, listener: socket.socket) -> None:
        with suppress(OSError):  # closed
            while True:
                peer, _ = listener.accept()
                with suppress(OSError), peer:
                    peer.sendall(self.doors.token.encode())

    def __enter__(self) -> "Open":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def closed(doors: Sequence[Doors | None]) -> list[list[tuple[int, str]]]:
    """For each host the ports at which it cannot be reached from here, and why.

    Args:
        doors: of each host; None is not tried.
    """

    def knock(place: tuple[Doors, int]) -> str:
        where, port = place
        try:
            with socket.create_connection((where.address, port), timeout=_ANSWERS_S) as one:
                one.settimeout(_ANSWERS_S)
                told = one.recv(_TOKEN_BYTES, socket.MSG_WAITALL).decode(errors="replace")
        except TimeoutError:
            return "no answer"
        except OSError as error:
            return (error.strerror or str(error)).lower()
        return "" if told == where.token else "somebody else answers"

    places = [(one, port) for one in doors if one is not None for port in one.ports]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = dict(zip(places, pool.map(knock, places), strict=True))
    return [
        [(port, answers[one, port]) for port in one.ports if answers[one, port]] if one is not None else []
        for one in doors
    ]


def port_findings(
    names: Sequence[str], doors: Sequence[Doors], found: Sequence[Sequence[Sequence[tuple[int, str]]]]
) -> list[Finding]:
    """What there is to say of each pair of hosts.

    Args:
        names: of the hosts.
        doors: of the hosts.
        found: `found[i][j]`: ports of host j that host i cannot reach, and why.
    """
    told = []
    for one in range(len(names)):
        for other in range(one + 1, len(names)):
            where = pair_of(names[one], names[other])
            faults = [
                _fault(where, names[here], names[there], doors[here], doors[there], found[here][there])
                for here, there in ((one, other), (other, one))
                if found[here][there]
            ]
            told += faults or [
                Finding(
                    where=where,
                    check="ports",
                    level="ok",
                    found=f"{_COUNT} ports that the kernel chose can be reached both ways",
                )
            ]
    return told


def _fault(
    where: str, here: str, there: str, from_: Doors, to: Doors, ports: Sequence[tuple[int, str]]
) -> Finding:
    listed = ", ".join(f"{there}:{port}" for port, _ in ports)
    whys = ", ".join(dict.fromkeys(why for _, why in ports))
    some = "" if len(ports) == len(to.ports) else f" (of {len(to.ports)} that were tried)"
    return Finding(
        where=where,
        check="ports",
        level="problem",
        found=f"{here} cannot connect to {listed}{some}: {whys}",
        do=f"open all TCP ports on {there} ({to.address}) for {here} ({from_.address}): Gloo and NCCL take "
        "any of net.ipv4.ip_local_port_range, and which cannot be chosen; no collective was tried",
        value={"from": here, "to": there, "closed": [port for port, _ in ports]},
    )
