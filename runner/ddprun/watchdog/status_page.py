"""Status pages: what each rank is at, where others can read it without asking the rank.

A status page is a small file that its rank has mapped and writes a few bytes of at each turn: nothing is
locked, and nothing waits. Whoever reads may meet a half-written number; but status pages are read when ranks
stand still.
"""

import json
import mmap
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddprun_hooks.comm.trace import now_us

LINES = 1024
"""Lines whose numbers a status page has room for; ranks of further ones are only known to be there or not."""

_MAGIC = b"ddprun1\0"
_HEAD = struct.Struct("<8sqqq")  # magic, process id, rank, told
_STAGE = struct.Struct("<64s")
_TURN = struct.Struct("<q24sq")  # step, phase, since when
_COUNT = struct.Struct("<q")
_BEAT = struct.Struct("<qq")  # when, length of the note
_HEAD_AT, _STAGE_AT, _TURN_AT, _COUNTS_AT = 0, 32, 96, 256
_BEAT_AT = _COUNTS_AT + _COUNT.size * LINES
_NOTE_AT = _BEAT_AT + _BEAT.size
_BYTES = 32768
_TOLD_AT = 24

LIFELESS_S = 3.0
"""A rank whose watch has not written for so long is stopped, or a call holds Python's lock."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A collective that a rank has issued and that has not come to its end."""

    line: int
    name: str
    """Of the line."""

    number: int
    """Running number in the line, from 1."""

    ranks: tuple[int, ...]
    """Of the line."""

    peers: tuple[int, ...] | None
    """The ranks it waits for whatever they have issued; None: those that have not issued theirs."""

    op: str
    what: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """What a status page says."""

    rank: int
    pid: int
    state: str
    """The process's: a letter of `/proc/PID/stat`, or `gone`."""

    beat_age_s: float
    """Since the rank's watch wrote last."""

    stage: str
    step: int
    phase: str
    phase_age_s: float
    issued: tuple[int, ...]
    """Collectives issued, by line."""

    waits: tuple[Wait, ...]
    """What it waits for, oldest first."""

    at: str
    """Where its training thread is in Python code."""

    told: bool
    """It has told its log."""

    @property
    def stopped(self) -> bool:
        """By a signal or a debugger."""
        return self.state in ("T", "t")

    @property
    def lifeless(self) -> bool:
        """It does nothing, not even watch."""
        return self.stopped or self.state in ("Z", "gone") or self.beat_age_s > LIFELESS_S

    @property
    def lost(self) -> bool:
        """It does nothing, and not because it has told of a hang and ended, as every rank then does."""
        return self.lifeless and not self.told

    def plain(self) -> dict[str, Any]:
        """As JSON can carry it; `seen_from` reads it back."""
        return {**asdict(self), "waits": plain_waits(self.waits)}


def seen_from(plain: Mapping[str, Any]) -> Seen:
    """What `Seen.plain` gave, after JSON.

    Raises:
        TypeError, KeyError: it is something else.
    """
    waits = tuple(_wait_from(wait) for wait in plain["waits"])
    return Seen(**{**plain, "issued": tuple(plain["issued"]), "waits": waits})


def _wait_from(plain: Mapping[str, Any]) -> Wait:
    peers = plain["peers"]
    return Wait(
        **{**plain, "ranks": _all_of(plain["ranks"]), "peers": None if peers is None else tuple(peers)}
    )


def _span(ranks: Sequence[int]) -> list[int] | dict[str, int]:
    """Evenly spaced ranks, as those of a line are, in a few bytes however many they are."""
    if len(ranks) > 2 and tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])):
        return {"from": ranks[0], "to": ranks[-1], "by": ranks[1] - ranks[0]}
    return list(ranks)


def _all_of(span: Sequence[int] | Mapping[str, int]) -> tuple[int, ...]:
    if isinstance(span, Mapping):
        return tuple(range(span["from"], span["to"] + 1, span["by"]))
    return tuple(span)


class StatusPage:
    """The writer's end.

    Args:
        rank: whose it is.
        folder: where to make it; None: in memory without a name, which those of this host find under `/proc`.
    """

    def __init__(self, rank: int, folder: Path | None) -> None:
        self._in_folder = folder is not None
        if folder is None:
            handle = os.memfd_create(f"ddprun-status-{rank}")
            self.path = f"/proc/{os.getpid()}/fd/{handle}"
        else:
            self.path = str(folder / f"rank-{rank:05}.status")
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(handle, 0, _BYTES)  # to run out of room here, not at a write to the mapping
        self._map = mmap.mmap(handle, _BYTES)
        self._step, self._phase = 0, b"starting"
        self.turn(self._phase)
        self.beat({})
        _HEAD.pack_into(self._map, _HEAD_AT, _MAGIC, os.getpid(), rank, 0)

    def stage(self, name: str) -> None:
        """The stage that runs, as a message names it."""
        _STAGE.pack_into(self._map, _STAGE_AT, name.encode()[:64])

    def step(self, number: int) -> None:
        """The step that begins."""
        self._step = number

    def turn(self, phase: bytes) -> None:
        """What the training thread turns to, in at most 24 bytes."""
        _TURN.pack_into(self._map, _TURN_AT, self._step, phase, time.monotonic_ns() // 1000)

    def issued(self, line: int, count: int) -> None:
        """So many collectives of a line have been issued."""
        if line < LINES:
            _COUNT.pack_into(self._map, _COUNTS_AT + _COUNT.size * line, count)

    def beat(self, note: Mapping[str, Any]) -> None:
        """A sign of life, and what takes longer to say."""
        text = json.dumps(note).encode()
        if len(text) > _BYTES - _NOTE_AT:
            text = b"{}"
        self._map[_NOTE_AT : _NOTE_AT + len(text)] = text
        _BEAT.pack_into(self._map, _BEAT_AT, now_us(), len(text))

    def told(self) -> None:
        """This rank has told its log what it knows."""
        _COUNT.pack_into(self._map, _TOLD_AT, 1)

    def remove(self) -> None:
        """Take the status page away."""
        if self._in_folder:
            Path(self.path).unlink(missing_ok=True)


def read(path: str | Path) -> Seen | None:
    """Read a status page of this host; None if there is none, or none yet."""
    try:
        data = Path(path).read_bytes()
        magic, pid, rank, told = _HEAD.unpack_from(data, _HEAD_AT)
        if magic != _MAGIC:
            return None
        now = now_us()
        step, phase, since = _TURN.unpack_from(data, _TURN_AT)
        beat, length = _BEAT.unpack_from(data, _BEAT_AT)
        note = json.loads(data[_NOTE_AT : _NOTE_AT + length])
        counts = struct.unpack_from(f"<{LINES}q", data, _COUNTS_AT)
        waits, at = tuple(_wait_from(wait) for wait in note.get("waits", ())), str(note.get("at", ""))
    except (OSError, struct.error, ValueError, TypeError, KeyError, AttributeError):
        return None  # half of it is written
    used = max((place + 1 for place, count in enumerate(counts) if count), default=0)
    return Seen(
        rank=rank,
        pid=pid,
        state=state_of(pid),
        beat_age_s=(now - beat) / 1e6,
        stage=_STAGE.unpack_from(data, _STAGE_AT)[0].rstrip(b"\0").decode(errors="replace"),
        step=step,
        phase=phase.rstrip(b"\0").decode(errors="replace"),
        phase_age_s=(now - since) / 1e6,
        issued=counts[:used],
        waits=waits,
        at=at,
        told=bool(told),
    )


def read_all(folder: Path) -> dict[int, Seen]:
    """The status pages in a folder, by rank."""
    found = [read(path) for path in sorted(folder.glob("rank-*.status"))]
    return {seen.rank: seen for seen in found if seen is not None}


def state_of(pid: int) -> str:
    """The state of a process of this host (Linux): a letter as in `ps`, `gone`, or `?` if nobody can say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone" if Path("/proc/self").exists() else "?"
    except OSError:
        return "gone"


def plain_waits(waits: Sequence[Wait]) -> list[dict[str, Any]]:
    """For a status page's note."""
    return [{**asdict(wait), "ranks": _span(wait.ranks)} for wait in waits]


def claim(folder: Path | None, name: str) -> bool:
    """Be the first of a host's ranks to do something; True if they have no folder in which to agree."""
    if folder is None:
        return True
    try:
        (folder / name).open("x").close()
    except FileExistsError:
        return False
    except OSError:  # the launcher is gone, and its folder
        return True
    return True
