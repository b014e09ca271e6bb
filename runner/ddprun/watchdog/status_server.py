"""Asking the launcher of another host what its ranks are at: one line of JSON there, one back."""

import hmac
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from ddprun.watchdog.status_page import Seen, seen_from

ASK_S = 1.5
"""How long a launcher has to answer."""

_LINE_BYTES = 1024
_ANSWER_BYTES = 16 << 20


class StatusServer(socketserver.ThreadingTCPServer):
    """Answers for the ranks of one host. It tells what their status pages say, and takes word of a hang.

    Args:
        address: of the interface that the ranks use; port 0 takes a free one.
        secret: whoever asks has to know it.
        look: gives the status pages.
        called: a rank of another host has found a hang.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, address: str, secret: str, look: Callable[[], Mapping[int, Seen]], called: Callable[[], None]
    ) -> None:
        self.secret, self.look, self.called = secret, look, called
        super().__init__((address, 0), _Answer)

    @property
    def name(self) -> str:
        """By which `ask` finds it, for those who may."""
        host, port = self.server_address[:2]
        return f"{host!s}:{port}/{self.secret}"

    def open(self) -> None:
        """Answer from now on, on a thread."""
        threading.Thread(target=self.serve_forever, name="ddprun-status-server", daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever asked is gone; nobody else need know."""


class _Answer(socketserver.StreamRequestHandler):
    timeout = ASK_S

    def handle(self) -> None:
        server = self.server
        assert isinstance(server, StatusServer)
        asked = json.loads(self.rfile.readline(_LINE_BYTES))
        if not hmac.compare_digest(str(asked["secret"]), server.secret):
            return
        if asked["hang"]:
            server.called()
        seen = {rank: one.plain() for rank, one in server.look().items()}
        self.wfile.write(json.dumps(seen).encode() + b"\n")


def ask(server: str, *, hang: bool) -> dict[int, Seen] | None:
    """What the ranks of another host are at; None if nobody answers in time.

    Args:
        server: its name.
        hang: tell it that the run hangs.
    """
    address, _, secret = server.partition("/")
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError, TypeError, KeyError):
        with socket.create_connection((host, int(port)), timeout=ASK_S) as connection:
            connection.sendall(json.dumps({"secret": secret, "hang": hang}).encode() + b"\n")
            with connection.makefile("rb") as answer:
                told = json.loads(answer.readline(_ANSWER_BYTES))
        return {int(rank): seen_from(plain) for rank, plain in told.items()}
    return None


def ask_all(servers: Sequence[str], *, hang: bool) -> dict[int, Seen]:
    """What the ranks behind several servers are at, those that answer; takes no longer than one."""
    if not servers:
        return {}
    with ThreadPoolExecutor(len(servers)) as pool:
        answers = pool.map(lambda server: ask(server, hang=hang), servers)
        return {rank: seen for answer in answers if answer for rank, seen in answer.items()}
