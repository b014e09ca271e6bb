"""Writes checkpoints on a thread of its own: each rank its files; rank 0 gives the checkpoint its name.

The ranks' threads speak through the store, never through collectives: a rank whose disk is slow makes no
other rank wait. A rank that does not see the run's folder sends its files to rank 0 over a process group that
only these threads use.
"""

import json
import math
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ddprun.checkpoint import folder
from ddprun.checkpoint.codec import EncodedState
from ddprun.checkpoint.folder import Checkpoint, FileRecords
from ddprun.host.rank_files import attempt_folder
from ddprun_hooks.comm.control import ControlChannel
from ddprun_hooks.comm.gpu import PinnedStaging

_LAST_FINISHED_KEY = "over"  # in the store: which checkpoint was finished last, and whether it was written


@dataclass(frozen=True, slots=True)
class CheckpointOutcome:
    """What came of one checkpoint; rank 0 knows."""

    step: int
    seconds: float
    checkpoint: Checkpoint | None = None
    problem: str | None = None  # why it was not written
    skipped: bool = False  # because a rank was still writing the one before


@dataclass(frozen=True, slots=True)
class _Job:
    number: int  # counts all that are enqueued; two may be of one step
    step: int
    unfinished: Path
    parts: Mapping[str, EncodedState]  # by the name of the files
    staged: PinnedStaging | None = None  # of a GPU's tensors in the parts, which may still be under way
    enqueued_ns: int = field(default_factory=time.monotonic_ns)


@dataclass(eq=False)
class CheckpointWriter:
    """The checkpoints of one run, on one rank."""

    root: Path  # the folder of all checkpoints, as rank 0 sees it
    store: dist.Store  # small values that all ranks share
    _: KW_ONLY
    token: str  # of this attempt at the run; the same on all ranks
    rank: int
    world_size: int
    keep: int  # how many checkpoints are kept
    remote_ranks: Sequence[int]  # ranks that do not see the run's folder
    control: ControlChannel | None  # for these threads alone; None if no rank is remote
    parts_timeout_s: float  # how long rank 0 waits for the other ranks' parts
    # Called on the writing thread. before_write: ahead of each checkpoint. after_write: when a checkpoint is
    # over, with the time at which it was enqueued (ns of the monotonic clock) and whether it was written.
    # find_nonfinite: names what in a part is not finite, None if nothing is.
    before_write: Callable[[], None] = lambda: None
    after_write: Callable[[int, bool], None] = lambda _, __: None
    find_nonfinite: Callable[[EncodedState], str | None] = lambda _: None

    def __post_init__(self) -> None:
        self.outcomes = queue.SimpleQueue[CheckpointOutcome]()  # of checkpoints that are over, on rank 0
        self.enqueued_count = 0  # checkpoints so far
        self.last_problem: str | None = None  # why the last one was not written; None: it was, or is being
        self.reported_causes = set[str]()  # what kept checkpoints from being written, since one was
        # On rank 0: why there is no checkpoint of the run's end; None: there is, or none is due.
        self.final_problem: str | None = None
        self.store = dist.PrefixStore(f"checkpoints/{self.token}", self.store)
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        if self.rank in self.remote_ranks:
            self._scratch = tempfile.TemporaryDirectory(prefix="ddprun-", dir=attempt_folder())
            self.root = Path(self._scratch.name)
        self._jobs = queue.Queue[_Job | None]()
        self._current_job: _Job | None = None
        self._thread = threading.Thread(target=self._thread_main, name="ddprun-checkpoints", daemon=True)
        self._thread.start()

    def enqueue(
        self,
        step: int,
        parts: Mapping[str, EncodedState],
        *,
        staged: PinnedStaging | None = None,
        wait: bool = False,
    ) -> None:
        """Have this rank's parts of a checkpoint written; called by all ranks with the same steps.

        One that comes while the one before it is still being written is skipped. With `wait` all are waited
        for, until they are written or given up. `staged`: of tensors in the parts, to be released.
        """
        job, before = self._make_next_job(step, parts, staged), self._current_job
        if wait or before is None:
            self._current_job = job
            self._jobs.put(job)
        else:
            text = f"rank {self.rank} was still writing the checkpoint of step {before.step}"
            self._report_to_rank_0(job, text, skipped=True)
            self.after_write(job.enqueued_ns, False)
            if staged is not None:
                staged.wait()
                staged.release()
            if self.rank == 0:
                self._jobs.put(replace(job, parts={}, staged=None))
        if wait:
            self._jobs.join()
            if self.rank == 0:  # all ranks have written their parts: what is unfinished stays so
                folder.recover_interrupted_writes(self.root)

    def report_missed_checkpoints(self, count: int) -> None:
        """Give up checkpoints that this rank never reached, up to the `count` that another has enqueued."""
        while self.enqueued_count < count:
            job = self._make_next_job(0, {})
            self._report_to_rank_0(job, f"rank {self.rank} had stopped before")
            if self.rank == 0:
                self._jobs.put(job)

    def _make_next_job(
        self, step: int, parts: Mapping[str, EncodedState], staged: PinnedStaging | None = None
    ) -> _Job:
        number, self.enqueued_count = self.enqueued_count, self.enqueued_count + 1
        return _Job(
            number, step, folder.unfinished_path(self.root, step, f"{self.token}-{number}"), parts, staged
        )

    def close(self) -> None:
        """Finish what is being written, and end the thread."""
        self._jobs.put(None)
        self._thread.join()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _thread_main(self) -> None:
        while (job := self._jobs.get()) is not None:
            started, outcome = time.monotonic(), None
            try:
                if job.parts:
                    self._write(job)
                if self.rank == 0:
                    checkpoint, problem, skipped = self._assemble(job)
                    seconds = time.monotonic() - started
                    outcome = CheckpointOutcome(job.step, seconds, checkpoint, problem, skipped)
                elif job.parts and self._scratch is not None:
                    self._send_files_if_wanted(job)
            except Exception as error:
                # The store or the other ranks are gone: the run is about to end, and says why itself.
                outcome = CheckpointOutcome(job.step, time.monotonic() - started, problem=repr(error))
            if job.staged is not None:
                job.staged.release()
            if self._current_job is job:
                self._current_job = None
            if outcome is not None and job.step:  # 0: from `report_missed_checkpoints`; this rank had stopped
                self.outcomes.put(outcome)
            self._jobs.task_done()
            self._broadcast_outcome(job, outcome)

    def _broadcast_outcome(self, job: _Job, outcome: CheckpointOutcome | None) -> None:
        """Rank 0 stores what became of a checkpoint; others wait for it, unless their next one is waiting."""
        last_finished = (-1, False)

        def is_over() -> bool:
            nonlocal last_finished
            if self.store.check([_LAST_FINISHED_KEY]):
                last_finished = json.loads(self.store.get(_LAST_FINISHED_KEY))
            return last_finished[0] >= job.number

        with suppress(RuntimeError):  # the store is gone: the run is about to end
            if self.rank == 0:
                written = outcome is not None and outcome.checkpoint is not None
                self.store.set(_LAST_FINISHED_KEY, json.dumps([job.number, written]))
            _wait_until(lambda: is_over() or not self._jobs.empty())
        if last_finished[0] >= job.number and job.parts:
            self.after_write(job.enqueued_ns, last_finished[0] == job.number and last_finished[1])

    def _write(self, job: _Job) -> None:
        if job.staged is not None:
            job.staged.wait()
        self.before_write()
        try:
            files: FileRecords = {}
            for name, state in job.parts.items():
                files |= folder.write_part(job.unfinished, name, state)
        except OSError as error:
            self._report_to_rank_0(job, self._cannot_write(error))
        else:
            found = [self.find_nonfinite(state) for state in job.parts.values()]
            self._report_to_rank_0(job, None, files, folder.most_severe_nonfinite(found))

    def _report_to_rank_0(
        self,
        job: _Job,
        problem: str | None,
        files: FileRecords | None = None,
        nonfinite: str | None = None,
        *,
        skipped: bool = False,
    ) -> None:
        report = [problem, skipped, files or {}, nonfinite]
        self.store.set(f"{job.number}/{self.rank}", json.dumps(report))

    def _assemble(self, job: _Job) -> tuple[Checkpoint | None, str | None, bool]:
        """On rank 0: make all parts a checkpoint, or say why there is none, and whether it was skipped."""
        problems: list[tuple[str, bool]] = []
        sizes: dict[int, FileRecords] = {}
        nonfinite: list[str | None] = []
        until = time.monotonic() + self.parts_timeout_s
        for rank in range(self.world_size):
            key = f"{job.number}/{rank}"
            if not _wait_until(partial(self.store.check, [key]), until):
                late = f"rank {rank} has not written its part within {self.parts_timeout_s:g} s"
                problems.append((late, False))
                continue
            problem, skipped, sizes[rank], not_finite = json.loads(self.store.get(key))
            self.store.delete_key(key)
            nonfinite.append(not_finite)
            problems += [(problem, skipped)] if problem else []
        if self.remote_ranks:
            self.store.set(f"{job.number}/verdict", "drop" if problems else "send")
        if not problems:
            for rank in self.remote_ranks:  # all of them send, also after one whose files cannot be written
                assert self.control is not None
                try:
                    folder.receive_files(self.control, rank, job.unfinished, sizes[rank])
                except OSError as error:
                    problems.append((self._cannot_write(error), False))
        if not problems:
            try:
                files = {name: described for part in sizes.values() for name, described in part.items()}
                worst = folder.most_severe_nonfinite(nonfinite)
                checkpoint = folder.commit(job.unfinished, job.step, self.world_size, files, worst)
                folder.prune(self.root, self.keep)
                return checkpoint, None, False
            except OSError as error:
                problems.append((self._cannot_write(error), False))
        folder.remove_tree(job.unfinished)
        return None, *problems[0]

    def _cannot_write(self, error: OSError) -> str:
        return f"rank {self.rank} cannot write it: {error.strerror or error}"

    def _send_files_if_wanted(self, job: _Job) -> None:
        assert self.control is not None
        verdict = f"{job.number}/verdict"
        until = time.monotonic() + 2 * self.parts_timeout_s
        if _wait_until(partial(self.store.check, [verdict]), until) and self.store.get(verdict) == b"send":
            folder.send_files(self.control, 0, job.unfinished, folder.file_names(job.parts))
        folder.remove_tree(job.unfinished)


def _wait_until(condition: Callable[[], bool], until: float = math.inf) -> bool:
    """Poll, less and less often; False: the monotonic clock has passed `until`."""
    pause = 0.01
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    return True
