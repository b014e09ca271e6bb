"""Asking the launcher of another host what its ranks are at: one line of JSON there, one back."""

import hmac
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from ddprun.watch.board import Seen, seen_from

ASK_S = 1.5
"""How long a launcher has to answer."""

_LINE_BYTES = 1024
_ANSWER_BYTES = 16 << 20


class Desk(socketserver.ThreadingTCPServer):
    """Answers for the ranks of one host. It tells what their boards say, and takes word of a hang.

    Args:
        address: of the interface that the ranks use; port 0 takes a free one.
        secret: whoever asks has to know it.
        look: gives the boards.
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
        threading.Thread(target=self.serve_forever, name="ddprun-desk", daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever asked is gone; nobody else need know."""


class _Answer(socketserver.StreamRequestHandler):
    timeout = ASK_S

    def handle(self) -> None:
        desk = self.server
        assert isinstance(desk, Desk)
        asked = json.loads(self.rfile.readline(_LINE_BYTES))
        if not hmac.compare_digest(str(asked["secret"]), desk.secret):
            return
        if asked["hang"]:
            desk.called()
        seen = {rank: one.plain() for rank, one in desk.look().items()}
        self.wfile.write(json.dumps(seen).encode() + b"\n")


def ask(desk: str, *, hang: bool) -> dict[int, Seen] | None:
    """What the ranks of another host are at; None if nobody answers in time.

    Args:
        desk: its name.
        hang: tell it that the run hangs.
    """
    address, _, secret = desk.partition("/")
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError, TypeError, KeyError):
        with socket.create_connection((host, int(port)), timeout=ASK_S) as connection:
            connection.sendall(json.dumps({"secret": secret, "hang": hang}).encode() + b"\n")
            with connection.makefile("rb") as answer:
                told = json.loads(answer.readline(_ANSWER_BYTES))
        return {int(rank): seen_from(plain) for rank, plain in told.items()}
    return None


def ask_all(desks: Sequence[str], *, hang: bool) -> dict[int, Seen]:
    """What the ranks behind several desks are at, those that answer; takes no longer than one."""
    if not desks:
        return {}
    with ThreadPoolExecutor(len(desks)) as pool:
        answers = pool.map(lambda desk: ask(desk, hang=hang), desks)
        return {rank: seen for answer in answers if answer for rank, seen in answer.items()}
