"""Writes checkpoints on a thread of its own, each rank its files; rank 0 gives the checkpoint its name.

The ranks' threads speak through the store, never through collectives: a rank whose disk is slow makes no
other rank wait. Where a rank does not see the run's folder, its files go to rank 0 over a process group that
only these threads use.
"""

import json
import queue
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ddprun.checkpoint import folder
from ddprun.checkpoint.folder import Checkpoint, Files
from ddprun_hooks.exchange import Control

_LOOK_EVERY_S = 0.01
_LOOK_AT_LEAST_EVERY_S = 0.5
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one checkpoint; rank 0 knows."""

    step: int
    seconds: float
    written: Checkpoint | None = None
    problem: str | None = None
    """Why it was not written."""


@dataclass(frozen=True, slots=True)
class _Job:
    step: int
    parts: Mapping[str, folder.Apart]
    """By the name of the files."""


class CheckpointWriter:
    """The checkpoints of one run, on one rank.

    Args:
        root: the folder of all checkpoints, as rank 0 sees it.
        store: small values that all ranks share.
        token: of this attempt at the run; the same on all ranks.
        rank, ranks: this rank, and how many there are.
        keep: how many checkpoints are kept.
        away: ranks that do not see the run's folder.
        control: for these threads alone; None if no rank is away.
        limit_s: how long rank 0 waits for the other ranks' parts.
    """

    def __init__(
        self,
        root: Path,
        store: dist.Store,
        *,
        token: str,
        rank: int,
        ranks: int,
        keep: int,
        away: Sequence[int],
        control: Control | None,
        limit_s: float,
    ) -> None:
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        """Of checkpoints that are over, on rank 0."""

        self._store = dist.PrefixStore(f"checkpoints/{token}", store)
        self._token, self._rank, self._ranks, self._keep = token, rank, ranks, keep
        self._away, self._control, self._limit_s = away, control, limit_s
        self._scratch = tempfile.TemporaryDirectory(prefix="ddprun-") if rank in away else None
        self._root = root if self._scratch is None else Path(self._scratch.name)
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._under_way: int | None = None
        self._thread = threading.Thread(target=self._work, name="ddprun-checkpoints", daemon=True)
        self._thread.start()

    def put(self, step: int, parts: Mapping[str, folder.Apart], *, wait: bool = False) -> None:
        """Have a checkpoint written; called by all ranks with the same steps.

        A checkpoint that comes while the one before it is still being written is left out, unless `wait`.

        Args:
            step: of the run.
            parts: this rank's files by name.
            wait: until it is written, or given up.
        """
        if wait or self._under_way is None:
            self._under_way = step
            self._jobs.put(_Job(step, parts))
        else:
            self._post(step, f"rank {self._rank} was not done with that of step {self._under_way}", {})
            if self._rank == 0:
                self._jobs.put(_Job(step, {}))
        if wait:
            self._jobs.join()

    def close(self) -> None:
        """Finish what is being written, and end the thread."""
        self._jobs.put(None)
        self._thread.join()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            started = time.monotonic()
            try:
                if job.parts:
                    self._write(job)
                if self._rank == 0:
                    self.outcomes.put(self._finish(job.step, started))
                elif job.parts and self._scratch is not None:
                    self._send(job)
            except Exception as error:
                # The store or the other ranks are gone: the run is about to end, and says why itself.
                self.outcomes.put(Outcome(job.step, time.monotonic() - started, problem=repr(error)))
            if self._under_way == job.step:
                self._under_way = None
            self._jobs.task_done()

    def _write(self, job: _Job) -> None:
        """Write this rank's files, and tell rank 0."""
        try:
            files: Files = {}
            for name, state in job.parts.items():
                files |= folder.write(folder.unfinished(self._root, job.step, self._token), name, state)
        except OSError as error:
            self._post(job.step, f"rank {self._rank} cannot write it: {error.strerror or error}", {})
        else:
            self._post(job.step, None, files)

    def _post(self, step: int, problem: str | None, files: Files) -> None:
        self._store.set(f"{step}/{self._rank}", json.dumps([problem, files]))

    def _finish(self, step: int, started: float) -> Outcome:
        """On rank 0: wait for all parts, and make them a checkpoint."""
        problems: list[str] = []
        files: Files = {}
        sizes: dict[int, Files] = {}
        keys = [f"{step}/{rank}" for rank in range(self._ranks)]
        until, pause = time.monotonic() + self._limit_s, _LOOK_EVERY_S
        for rank, key in enumerate(keys):
            while not self._store.check([key]) and time.monotonic() < until:
                time.sleep(pause)
                pause = min(2 * pause, _LOOK_AT_LEAST_EVERY_S)
            if not self._store.check([key]):
                problems.append(f"rank {rank} has not written its part within {self._limit_s:g} s")
                continue
            problem, sizes[rank] = json.loads(self._store.get(key))
            self._store.delete_key(key)
            files |= sizes[rank]
            problems += [problem] if problem else []
        if self._away:
            self._store.set(f"{step}/verdict", "drop" if problems else "send")
        if not problems:
            try:
                for rank in self._away:
                    self._receive(rank, step, sizes[rank])
                written = folder.commit(self._root, step, self._token, self._ranks, files)
                folder.prune(self._root, self._keep)
                return Outcome(step, time.monotonic() - started, written)
            except OSError as error:
                problems.append(f"rank 0 cannot write it: {error.strerror or error}")
        folder.discard(self._root, step, self._token)
        return Outcome(step, time.monotonic() - started, problem=problems[0])

    # Ranks that do not see the run's folder.

    def _send(self, job: _Job) -> None:
        """Give this rank's files to rank 0, if it wants them."""
        assert self._control is not None
        verdict = f"{job.step}/verdict"
        while not self._store.check([verdict]):
            time.sleep(_LOOK_EVERY_S)
        source = folder.unfinished(self._root, job.step, self._token)
        if self._store.get(verdict) == b"send":
            for name in job.parts:
                for path in folder.paths(source, name):
                    with path.open("rb") as file:
                        while data := file.read(_CHUNK_BYTES):
                            self._control.send_bytes(data, 0)
        folder.discard(self._root, job.step, self._token)

    def _receive(self, rank: int, step: int, files: Files) -> None:
        """Take the files of another host's rank; all of them, even if the disk is full after the first."""
        assert self._control is not None
        problem: OSError | None = None
        target = folder.unfinished(self._root, step, self._token)
        for name, told in files.items():
            left = told["bytes"]
            while left:
                data = self._control.receive_bytes(rank)
                left -= len(data)
                try:
                    with (target / name).open("ab") as file:
                        file.write(data)
                except OSError as error:
                    problem = error
        if problem is not None:
            raise problem
        folder.check_received(target, files)
