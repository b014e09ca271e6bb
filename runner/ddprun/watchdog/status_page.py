"""Status pages: what each rank is doing, where others can read it without asking the rank.

A status page is a small file that its rank has mapped and writes a few bytes of at each turn: nothing is
locked, and nothing waits. Whoever reads may find a half-written number; but status pages are read when ranks
stand still. Other hosts ask the launcher for those of its host: a secret there, one line of JSON back.
"""

import ctypes
import hmac
import mmap
import os
import secrets
import socket
import socketserver
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ddprun.host.processes import state_and_parent
from ddprun_hooks.comm.trace import now_us

MAX_SEQUENCES = 1024  # of a page; of ranks in further ones it is only known whether they are there

LIFELESS_AFTER_S = 3.0  # a rank whose watchdog is silent for so long is stopped, or a call holds the GIL

# What a rank does before it has connections to others. Nothing breaks if one of them ends meanwhile.
CONNECTION_SETUP_OPS = frozenset({"get", "init_process_group", "new_group"})
_ANSWER_TIMEOUT_S = 1.5  # how long a launcher has to answer
_QUESTION_BYTES = 1024
_ANSWER_BYTES = 16 << 20
_NOTE_BYTES = 1 << 17  # room for what a rank waits for, with the numbers of thousands of ranks
_MAGIC = b"ddprun2"


class _Page(ctypes.LittleEndianStructure):
    """The file; times are microseconds of the monotonic clock."""

    _fields_ = (
        ("magic", ctypes.c_char * 8),
        ("pid", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("reported", ctypes.c_int64),
        ("stage", ctypes.c_char * 64),
        ("step", ctypes.c_int64),
        ("phase", ctypes.c_char * 32),
        ("phase_since", ctypes.c_int64),
        ("issued", ctypes.c_int64 * MAX_SEQUENCES),
        ("beat", ctypes.c_int64),
        ("note", ctypes.c_char * _NOTE_BYTES),
    )


@dataclass(frozen=True, slots=True)
class UnfinishedCollective:
    """A collective that a rank has issued and that has not ended."""

    index: int  # index of its sequence
    name: str  # name of its sequence
    number: int  # running number in the sequence, from 1
    ranks: tuple[int, ...]
    peers: tuple[int, ...] | None  # awaited whatever they have issued; None: those that have not issued it
    op: str
    what: str


_NOTE_ADAPTER = TypeAdapter(
    tuple[Sequence[UnfinishedCollective], str]
)  # `waits` and `code_location` of a `RankStatus`


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a status page says."""

    rank: int
    pid: int
    state: str  # the process's: a letter of `/proc/PID/stat`, or `gone`
    beat_age_s: float  # since the rank's watchdog wrote last
    stage: str
    step: int
    phase: str
    phase_age_s: float
    issued: tuple[int, ...]  # collectives issued, by sequence
    waits: tuple[UnfinishedCollective, ...]  # what the rank waits for, oldest first
    code_location: str  # where its training thread is in Python code
    hang_reported: bool  # it has reported a hang in its log

    @property
    def is_connecting(self) -> bool:
        """Whether it waits for ranks to which there is no connection yet that would break if they ended."""
        return bool(self.waits) and self.waits[0].op in CONNECTION_SETUP_OPS

    def issued_count(self, sequence: int) -> int:
        """How many collectives of a sequence the rank has issued."""
        return self.issued[sequence] if sequence < len(self.issued) else 0

    @property
    def is_suspended(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        return self.state in ("T", "t")

    @property
    def is_lifeless(self) -> bool:
        """It does nothing; not even its watchdog does."""
        return self.is_suspended or self.state in ("Z", "gone") or self.beat_age_s > LIFELESS_AFTER_S

    @property
    def is_unexpectedly_lifeless(self) -> bool:
        """It does nothing, and not because it has reported a hang and ended, as every rank then does."""
        return self.is_lifeless and not self.hang_reported


STATUSES_ADAPTER = TypeAdapter(dict[int, RankStatus])  # to JSON and back


class StatusPage:
    """The writer's end; without a folder it is in memory without a name, which others find under `/proc`."""

    def __init__(self, rank: int, folder: Path | None) -> None:
        self._in_folder = folder is not None
        if folder is None:
            handle = os.memfd_create(f"ddprun-status-{rank}")
            self.path = f"/proc/{os.getpid()}/fd/{handle}"
        else:
            self.path = str(folder / f"rank-{rank:05}.status")
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        size = ctypes.sizeof(_Page)
        try:
            os.posix_fallocate(handle, 0, size)  # to run out of room here, not at a write to the mapping
            self._page = _Page.from_buffer(mmap.mmap(handle, size))
        except OSError:
            self.remove()
            raise
        finally:
            if self._in_folder:  # without one, the path leads through the descriptor
                os.close(handle)
        self._issued = self._page.issued
        self.set_phase(b"starting")
        self.write_heartbeat()
        self._page.pid, self._page.rank, self._page.magic = os.getpid(), rank, _MAGIC

    def set_phase(self, phase: bytes, step: int | None = None, stage: str | None = None) -> None:
        """What the training thread turns to, in at most 32 bytes; with what begins by it: a `step` of the run
        (0: none), a `stage`, as messages name it.
        """
        page = self._page
        if stage is not None:
            page.stage = stage.encode()[:64]
        if step is not None:
            page.step = step
        page.phase, page.phase_since = phase, time.monotonic_ns() // 1000

    def set_issued_count(self, index: int, count: int) -> None:
        """So many collectives of a sequence have been issued."""
        if index < MAX_SEQUENCES:
            self._issued[index] = count

    def write_heartbeat(self, waits: Sequence[UnfinishedCollective] = (), at: str = "") -> None:
        """A sign of life, with what this rank waits for and where its training thread is."""
        text = _NOTE_ADAPTER.dump_json((waits, at))
        self._page.note = text if len(text) <= _NOTE_BYTES else b'[[],""]'
        self._page.beat = now_us()

    def set_hang_reported(self) -> None:
        """This rank has reported in its log what it knows."""
        self._page.reported = 1

    def remove(self) -> None:
        if self._in_folder:
            Path(self.path).unlink(missing_ok=True)


def read_page(path: str | Path) -> RankStatus | None:
    """Read a status page of this host; None if there is none, or none yet."""
    try:
        page = _Page.from_buffer_copy(Path(path).read_bytes())
        if page.magic != _MAGIC:
            return None
        waits, at = _NOTE_ADAPTER.validate_json(page.note)
    except (OSError, ValueError):
        return None  # half of it is written
    now, issued = now_us(), tuple(page.issued)
    return RankStatus(
        rank=page.rank,
        pid=page.pid,
        state=state_and_parent(page.pid)[0],
        beat_age_s=(now - page.beat) / 1e6,
        stage=page.stage.decode(errors="replace"),
        step=page.step,
        phase=page.phase.decode(errors="replace"),
        phase_age_s=(now - page.phase_since) / 1e6,
        issued=issued[: max((index + 1 for index, count in enumerate(issued) if count), default=0)],
        waits=tuple(waits),
        code_location=at,
        hang_reported=bool(page.reported),
    )


def read_pages(folder: Path) -> dict[int, RankStatus]:
    """The status pages in a folder, by rank."""
    found = [read_page(path) for path in sorted(folder.glob("rank-*.status"))]
    return {status.rank: status for status in found if status is not None}


def claim_once(folder: Path | None, name: str) -> bool:
    """Be the first of a host's ranks to do something; True if they have no folder in which to agree."""
    if folder is None:
        return True
    try:
        (folder / name).open("x").close()
    except FileExistsError:
        return False
    except OSError:  # the launcher is gone, and its folder
        pass
    return True


class HangStatusServer(socketserver.ThreadingTCPServer):
    """Answers for the ranks of one host, at a free port of the address of the interface that they use. Ranks
    of another host ask when they have found a hang: it calls `on_hang_found` and sends the status pages.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # with 5, the kernel has whoever comes after that try again a second later

    def __init__(
        self, address: str, read_statuses: Callable[[], dict[int, RankStatus]], hang_found: Callable[[], None]
    ) -> None:
        self.read_statuses, self.on_hang_found, self.secret = read_statuses, hang_found, secrets.token_hex(8)
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), _StatusRequestHandler)
        host, port = self.server_address[:2]
        self.endpoint = f"{host!s}:{port}/{self.secret}"  # host:port/secret, for `announce_hang_and_ask`

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever asked is gone; nobody else need know."""


class _StatusRequestHandler(socketserver.StreamRequestHandler):
    timeout = _ANSWER_TIMEOUT_S

    def handle(self) -> None:
        server = self.server
        assert isinstance(server, HangStatusServer)
        if hmac.compare_digest(self.rfile.readline(_QUESTION_BYTES).strip(), server.secret.encode()):
            server.on_hang_found()
            self.wfile.write(STATUSES_ADAPTER.dump_json(server.read_statuses()) + b"\n")


def announce_hang_and_ask(server: str) -> dict[int, RankStatus] | None:
    """The status pages of another host, which learns that the run hangs; None if nobody answers in time."""
    address, _, secret = server.partition("/")
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_ANSWER_TIMEOUT_S) as connection:
            connection.sendall(f"{secret}\n".encode())
            with connection.makefile("rb") as answer:
                return STATUSES_ADAPTER.validate_json(answer.readline(_ANSWER_BYTES))
    except (OSError, ValueError):
        return None


def announce_hang_to_all(servers: Sequence[str]) -> dict[int, RankStatus]:
    """The status pages behind several servers, those that answer; takes no longer than one."""
    if not servers:
        return {}
    with ThreadPoolExecutor(len(servers)) as pool:
        answers = [answer for answer in pool.map(announce_hang_and_ask, servers) if answer]
    return {rank: status for answer in answers for rank, status in answer.items()}
