"""Idle connections between launchers, which break when a host is cut off.

A host that loses its power or its link closes no connection, and TCP retransmits unacknowledged data for
minutes. On an idle connection, the kernel sends a keepalive probe once a second (`man 7 tcp`, TCP_KEEPIDLE).
The kernel of the other host answers, whatever its processes do: a host whose processes are busy or stopped
does not count as lost.
"""

import errno
import json
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from torch.distributed import Store

from ddprun.standard_streams import say

_LOST_AFTER_S = 3
_KEY = "ddprun/lifeline"
_CUT_OFF_ERRNOS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_TIMEOUT_S, _TICK_S = 10.0, 0.5
_TOKEN_BYTES = 16


class HostKeepalive:
    """The launcher of the first host listens, and each other launcher connects to it. Each start of the ranks
    has a lifeline of its own.

    Args:
        store: shared by all hosts, and new.
        index: this host among `count`.
        address: of this host, which the others reach.
        on_loss: called when a host no longer answers, and repeatedly until the lifeline is closed.
    """

    def __init__(
        self, store: Store, index: int, count: int, address: str, on_loss: Callable[[], object]
    ) -> None:
        self.lost_host: str | None = None
        self._store, self._on_loss = store, on_loss
        self._closed = threading.Event()
        if index:
            self._start_thread(self._connect_and_watch)
        else:
            self._listen(address, count)

    def close(self) -> None:
        """Stop watching; closes all connections."""
        self._closed.set()

    def _start_thread(self, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name="ddprun-lifeline", daemon=True).start()

    def _listen(self, address: str, count: int) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._token = secrets.token_hex(_TOKEN_BYTES)
        try:
            listener = socket.create_server((address, 0), family=family, backlog=count)
        except OSError as error:
            say(f"warning: cannot listen at {address}, so hosts that are cut off are noticed late: {error}")
            return
        self._store.set(_KEY, json.dumps([address, listener.getsockname()[1], self._token]))
        self._start_thread(partial(self._accept, listener))

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(_TICK_S)
        with listener:
            while not self._closed.is_set():
                # Nobody has come, or has gone already, or there are no more descriptors or threads.
                with suppress(OSError, RuntimeError):
                    connection, (address, *_) = listener.accept()
                    self._start_thread(partial(self._authenticate_and_watch, connection, address))

    def _authenticate_and_watch(self, connection: socket.socket, address: str) -> None:
        """Whoever has connected sends the token, or is a stranger."""
        connection.settimeout(_TIMEOUT_S)
        with connection, suppress(OSError):
            if secrets.compare_digest(connection.recv(len(self._token)), self._token.encode()):
                self._watch(connection, address)

    def _connect_and_watch(self) -> None:
        try:
            while not self._store.check([_KEY]):  # `get` would block the store for other threads
                if self._closed.wait(_TICK_S):
                    return
            address, port, token = json.loads(self._store.get(_KEY))
            with socket.create_connection((address, port), timeout=_TIMEOUT_S) as connection:
                connection.sendall(token.encode())
                self._watch(connection, address)
        except OSError as error:
            say(f"warning: no connection to the first host, so it is noticed late if it is cut off: {error}")
        except RuntimeError:  # the store is gone, and the run with it
            return

    def _watch(self, connection: socket.socket, address: str) -> None:
        """Until the other launcher has ended, which is noticed without this, or its host does not answer."""
        for option, value in (
            (socket.TCP_KEEPIDLE, 1),
            (socket.TCP_KEEPINTVL, 1),
            (socket.TCP_KEEPCNT, _LOST_AFTER_S - 1),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.settimeout(_TICK_S)
        while not self._closed.is_set() and self.lost_host is None:
            try:
                connection.recv(1)
                return
            except OSError as error:
                if error.errno in _CUT_OFF_ERRNOS and not self._closed.is_set():
                    self.lost_host = address
                    say(f"the host {address} has not answered for {_LOST_AFTER_S} s: it is cut off")
                elif error.errno is not None:  # None: a tick without news
                    return
        while self.lost_host == address and not self._closed.is_set():
            self._on_loss()
            self._closed.wait(_TICK_S)
