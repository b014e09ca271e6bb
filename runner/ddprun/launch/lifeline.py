"""Idle connections between launchers, which break when a host is cut off.

A host that loses its power or its link closes no connection, and TCP retransmits unacknowledged data for
minutes. On an idle connection, the kernel sends a keepalive probe once a second (`man 7 tcp`, TCP_KEEPIDLE).
The kernel of the other host answers, whatever its processes do: a host whose processes are busy or stopped
does not count as lost.
"""

import errno
import json
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from torch.distributed import Store

from ddprun.standard_streams import say

LOST_AFTER_S = 3
_KEY = "ddprun/lifeline"
_CUT_OFF = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_TIMEOUT_S, _TICK_S = 10.0, 0.1
_TOKEN_BYTES = 16


class Lifeline:
    """The launcher of the first host listens, and each other launcher connects to it. Each start of the ranks
    has a lifeline of its own.

    Args:
        store: shared by all hosts, and new.
        index: this host among `count`.
        address: of this host, which the others reach.
        on_loss: called with the address of a host that no longer answers, repeatedly until the lifeline is
            closed.
    """

    def __init__(
        self, store: Store, index: int, count: int, address: str, on_loss: Callable[[str], None]
    ) -> None:
        self.lost_host: str | None = None
        self._store, self._on_loss = store, on_loss
        self._closed = threading.Event()
        self._selector = selectors.DefaultSelector()
        if index == 0:
            self._listen(address, count)
        run = self._connect_and_watch if index else self._watch
        threading.Thread(target=run, name="ddprun-lifeline", daemon=True).start()

    def close(self) -> None:
        """Stop watching; closes all connections."""
        self._closed.set()

    def _listen(self, address: str, count: int) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._token = secrets.token_hex(_TOKEN_BYTES)
        try:
            listener = socket.create_server((address, 0), family=family, backlog=count)
        except OSError as error:
            say(f"warning: cannot listen at {address}, so hosts that are cut off are noticed late: {error}")
            self._store.set(_KEY, "null")
            return
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._store.set(_KEY, json.dumps([address, listener.getsockname()[1], self._token]))

    def _connect_and_watch(self) -> None:
        try:
            while not self._store.check([_KEY]):  # `get` would block the store for other threads
                if self._closed.wait(_TICK_S):
                    return
            if (found := json.loads(self._store.get(_KEY))) is None:
                return
            address, port, token = found
            connection = socket.create_connection((address, port), timeout=_TIMEOUT_S)
            connection.sendall(token.encode())
            self._keep(connection, address)
        except OSError as error:
            say(f"warning: no connection to the first host, so it is noticed late if it is cut off: {error}")
        except RuntimeError:  # the store is gone, and the run with it
            return
        self._watch()

    def _watch(self) -> None:
        with self._selector as selector:
            while not self._closed.is_set() and self.lost_host is None:
                for key, _ in selector.select(_TICK_S):
                    with suppress(BlockingIOError):
                        key.data(key.fileobj)
            for key in [*selector.get_map().values()]:
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
        while self.lost_host is not None and not self._closed.wait(_TICK_S):
            self._on_loss(self.lost_host)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # no more descriptors, or it has gone already
            connection, (address, *_) = listener.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, partial(self._admit, address))

    def _admit(self, address: str, connection: socket.socket) -> None:
        """Something has come from whoever has connected: the token, or it is a stranger."""
        self._selector.unregister(connection)
        with suppress(OSError):
            if secrets.compare_digest(connection.recv(len(self._token)), self._token.encode()):
                self._keep(connection, address)
                return
        connection.close()

    def _keep(self, connection: socket.socket, address: str) -> None:
        for option, value in (
            (socket.TCP_KEEPIDLE, 1),
            (socket.TCP_KEEPINTVL, 1),
            (socket.TCP_KEEPCNT, LOST_AFTER_S - 1),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._read, address))

    def _read(self, address: str, connection: socket.socket) -> None:
        """The other launcher has ended, which is noticed without this, or its host does not answer."""
        try:
            connection.recv(1)
        except OSError as error:
            if error.errno in _CUT_OFF:
                self.lost_host = address
        self._selector.unregister(connection)
        connection.close()
