"""Writes checkpoints on a thread of its own: each rank its files; one rank of each folder makes a checkpoint
of them.

The ranks' threads speak through the store: a rank whose disk is slow makes no other rank wait. Where ranks
see different folders, rank 0 first learns that all parts are written. Then the leaders of the folders send
each other what their folders lack, over a process group that only these threads use, and name the checkpoint.
When all leaders have done so, older checkpoints are deleted.
"""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist
from pydantic import BaseModel

from ddprun.checkpoint import folder
from ddprun.checkpoint.codec import EncodedState
from ddprun.checkpoint.folder import Checkpoint, FileRecords
from ddprun.checkpoint.location import CheckpointLocation, plan_transfers, run_transfers
from ddprun.standard_streams import say
from ddprun_hooks.comm.control_channel import ControlChannel
from ddprun_hooks.comm.gpu import PinnedStaging

# In the store: the numbers of the last checkpoint that is over, and of the last written.
_FINISHED_KEY = "over"


@dataclass(frozen=True, slots=True)
class CheckpointOutcome:
    """What came of one checkpoint; rank 0 knows."""

    step: int
    seconds: float
    checkpoint: Checkpoint | None = None
    problem: str | None = None  # why it was not written
    skipped: bool = False  # because a rank was still writing the one before


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    number: int  # counts all that are enqueued; two may be of one step
    step: int
    unfinished: Path
    parts: Mapping[str, EncodedState]  # by the name of the files
    staged: PinnedStaging | None = None  # of a GPU's tensors in the parts, which may still be under way
    skipped: str | None = None  # why this rank writes nothing; None: it does
    enqueued_ns: int = field(default_factory=time.monotonic_ns)


class _Report(BaseModel, frozen=True):
    """What became of one rank's parts of a checkpoint; as rank 0's verdict, of the whole checkpoint."""

    problem: str | None = None
    skipped: bool = False
    files: FileRecords = {}
    nonfinite: str | None = None
    held: dict[int, list[str]] = {}  # of a verdict: what each leader's folder has


@dataclass(eq=False)
class CheckpointWriter:
    """The checkpoints of one run in one location, on one rank."""

    location: CheckpointLocation
    store: dist.Store  # small values that all ranks share
    _: KW_ONLY
    token: str  # of this attempt at the run; the same on all ranks
    layout: str  # of hooks' state, for manifests
    keep: int  # how many checkpoints are kept
    every: int  # steps of the run from one to the next; 0: only those that are asked for
    control: ControlChannel | None  # for these threads alone; None if all ranks see one folder
    timeout_s: float  # how long a rank waits for what another one has to write
    # Called on the writing thread. before_write: ahead of each checkpoint. after_write: when a checkpoint is
    # over, with the time at which it was enqueued (ns of the monotonic clock).
    # find_nonfinite: names what in a part is not finite, None if nothing is.
    before_write: Callable[[], None] = lambda: None
    after_write: Callable[[int], None] = lambda _: None
    find_nonfinite: Callable[[EncodedState], str | None] = lambda _: None
    staging: PinnedStaging | None = None  # through which a GPU's tensors reach checkpoints; None: on a CPU

    def __post_init__(self) -> None:
        self.outcomes = queue.SimpleQueue[CheckpointOutcome]()  # of checkpoints that are over, on rank 0
        self._enqueued_count = 0  # checkpoints so far
        self.last_problem: str | None = None  # why the last one was not written; None: it was, or is being
        self.reported_causes = set[str]()  # what kept checkpoints from being written, since one was
        self.rank, self.root = self.location.rank, self.location.root
        self.store = dist.PrefixStore(f"checkpoints/{self.location.name}/{self.token}", self.store)
        self._jobs = queue.Queue[_Job | None]()
        self._current_job: _Job | None = None
        self._closing = False
        self._last_written = self._committed = -1  # numbers of jobs; the first one rank 0 knows
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
        number, before = self._enqueued_count, self._current_job
        self._enqueued_count += 1
        path = folder.unfinished_checkpoint_path(self.root, step, f"{self.token}-{number}")
        job = _Job(number, step, path, parts, staged)
        if wait or before is None:
            self._current_job = job
        else:
            text = f"rank {self.rank} was still writing the checkpoint of step {before.step}"
            job = replace(job, parts={}, skipped=text)
        self._jobs.put(job)  # also to skip it: the store may not answer, and training goes on
        if wait:
            self._jobs.join()
            if self.location.leads:  # all ranks have written their parts: what is unfinished stays so
                folder.recover_interrupted_writes(self.root)

    def wait(self, limit_s: float, interrupted: Callable[[], bool]) -> None:
        """Wait until this rank is not writing, so that it skips nothing; in memory, until no rank is. It
        waits no longer than so long, and not once it is `interrupted`.
        """
        _wait_until(lambda: self._current_job is None or interrupted(), time.monotonic() + limit_s)

    def close(self) -> None:
        """Finish what is being written, and end the thread."""
        self._closing = True
        self._jobs.put(None)
        self._thread.join()

    def _thread_main(self) -> None:
        while (job := self._jobs.get()) is not None:
            started, outcome = time.monotonic(), None
            try:
                self._write(job)
                outcome = self._assemble(job, started) if self.location.leads else None
            except Exception as error:
                # The store or the other ranks are gone: the run is about to end, and says why itself.
                outcome = CheckpointOutcome(job.step, time.monotonic() - started, problem=repr(error))
            if job.staged is not None:
                job.staged.release()
            heard_first = self.location.leads or self.location.in_memory
            if heard_first:
                self._share_outcome_and_prune(job, outcome)
            if self._current_job is job:
                self._current_job = None
            if self.rank == 0 and outcome is not None:
                self.outcomes.put(outcome)
            self._jobs.task_done()
            if not heard_first:
                self._share_outcome_and_prune(job, None)

    def _share_outcome_and_prune(self, job: _Job, outcome: CheckpointOutcome | None) -> None:
        """Rank 0 stores what became of a checkpoint; the others wait for it: leaders, to delete older ones
        then; ranks that lead no folder only until their next one waits, or the end of the run.
        """
        leads, last_over, last_written = self.location.leads, -1, self._last_written

        def is_over() -> bool:
            nonlocal last_over, last_written
            if self.store.check([_FINISHED_KEY]):
                last_over, last_written = json.loads(self.store.get(_FINISHED_KEY))
            return last_over >= job.number

        try:
            if self.rank == 0:
                if outcome is not None and outcome.checkpoint is not None:
                    self._last_written = job.number
                self.store.set(_FINISHED_KEY, json.dumps([job.number, self._last_written]))
            until = time.monotonic() + 2 * self.timeout_s
            _wait_until(lambda: is_over() or (not leads and self._has_newer_job(job)), until)
            if last_over < job.number:
                return
            if leads and last_written >= job.number:
                folder.prune(self.root, self.keep)
            elif self._committed == job.number:  # another leader could not name it
                folder.remove_tree(self.root / folder.checkpoint_name(job.step))
            if job.parts:
                self.after_write(job.enqueued_ns)
        except RuntimeError:  # the store is gone: the run is about to end
            pass
        except Exception as error:  # such as too little memory; without this thread training would wait
            say(f"rank {self.rank}: after the checkpoint of step {job.step}: {error!r}")

    def _has_newer_job(self, job: _Job) -> bool:
        return self._closing or self._current_job not in (None, job)

    def _write(self, job: _Job) -> None:
        if job.staged is not None:
            job.staged.wait()
        if job.skipped is not None:
            self._report_to_rank_0(job, "part", _Report(problem=job.skipped, skipped=True))
            self.after_write(job.enqueued_ns)
            return
        self.before_write()
        try:
            files: FileRecords = {}
            for name, state in job.parts.items():
                files |= folder.write_part(job.unfinished, name, state)
            nonfinite = next(filter(None, map(self.find_nonfinite, job.parts.values())), None)
            report = _Report(files=files, nonfinite=nonfinite)
        except Exception as error:  # such as too little memory: rank 0 need not wait for this rank
            report = _Report(problem=self._write_error_text(error))
        self._report_to_rank_0(job, "part", report)

    def _report_to_rank_0(self, job: _Job, phase: str, report: _Report) -> None:
        self.store.set(f"{job.number}/{phase}/{self.rank}", json.dumps(report.model_dump()))

    def _collect_reports(self, job: _Job, phase: str, ranks: Iterable[int]) -> list[_Report]:
        """On rank 0: what each of these ranks reports of a phase, or that it is late."""
        until, found = time.monotonic() + self.timeout_s, list[_Report]()
        for rank in ranks:
            key = f"{job.number}/{phase}/{rank}"
            if _wait_until(partial(self.store.check, [key]), until):
                found.append(_Report(**json.loads(self.store.get(key))))
                self.store.delete_key(key)
            else:
                late = f"rank {rank} has not written its part within {self.timeout_s:g} s"
                found.append(_Report(problem=late))
        return found

    def _assemble(self, job: _Job, started: float) -> CheckpointOutcome:
        """On a leader: make a checkpoint of the parts; says what came of it, on rank 0 for all folders."""
        key = f"{job.number}/verdict"
        if self.rank == 0:
            verdict = self._merge_reports(job)
            if self.control is not None:
                self.store.set(key, json.dumps(verdict.model_dump()))
        else:
            if not _wait_until(partial(self.store.check, [key]), time.monotonic() + 2 * self.timeout_s):
                raise TimeoutError
            verdict = _Report(**json.loads(self.store.get(key)))
        problem, checkpoint = verdict.problem, None
        if problem is None:
            try:
                checkpoint = self._make_whole_and_commit(job, verdict)
            except OSError as error:
                problem = self._write_error_text(error)
        if problem is not None:
            folder.remove_tree(job.unfinished)
        if self.control is not None and verdict.problem is None:
            problem = self._share_problem(job, problem)
        checkpoint = None if problem is not None else checkpoint
        return CheckpointOutcome(job.step, time.monotonic() - started, checkpoint, problem, verdict.skipped)

    def _merge_reports(self, job: _Job) -> _Report:
        """On rank 0: wait for the reports of all ranks, and join them."""
        of_ranks = self._collect_reports(job, "part", range(len(self.location.leaders)))
        if worst := next((one for one in of_ranks if one.problem), None):
            return worst
        files: FileRecords = {}
        for one in reversed(of_ranks):  # of what several ranks have, rank 0's counts
            files |= one.files
        held = {
            leader: [
                name
                for rank in self.location.members(leader)
                for name, described in of_ranks[rank].files.items()
                if described == files[name]
            ]
            for leader in self.location.folder_leaders
        }
        nonfinite = next(filter(None, (one.nonfinite for one in of_ranks)), None)
        return _Report(files=dict(sorted(files.items())), nonfinite=nonfinite, held=held)

    def _make_whole_and_commit(self, job: _Job, verdict: _Report) -> Checkpoint:
        """On a leader: get what its folder lacks from other leaders, and name the checkpoint."""
        kept = self.location.files_kept()
        if self.control is not None:
            transfers = plan_transfers(kept, verdict.held)
            run_transfers(self.control, self.rank, job.unfinished, transfers, verdict.files)
        checkpoint = Checkpoint(
            path=self.root / folder.checkpoint_name(job.step),
            step=job.step,
            world_size=len(self.location.leaders),
            nonfinite=verdict.nonfinite,
            layout=self.layout,
            files=verdict.files,
        )
        folder.commit(job.unfinished, checkpoint, kept[self.rank])
        self._committed = job.number
        return checkpoint

    def _share_problem(self, job: _Job, problem: str | None) -> str | None:
        """What has kept some leader from naming a checkpoint; rank 0 waits for all, and knows."""
        self._report_to_rank_0(job, "named", _Report(problem=problem))
        if self.rank != 0:
            return problem
        found = self._collect_reports(job, "named", self.location.folder_leaders)
        self.store.delete_key(f"{job.number}/verdict")
        return next((one.problem for one in found if one.problem), None)

    def _write_error_text(self, error: Exception) -> str:
        text = getattr(error, "strerror", None) or str(error) or repr(error)
        return f"rank {self.rank} cannot write it: {text}"


def _wait_until(condition: Callable[[], bool], until: float) -> bool:
    """Poll, less and less often; False: the monotonic clock has passed `until`."""
    pause = 0.002
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(1.25 * pause, 0.1)
    return True
