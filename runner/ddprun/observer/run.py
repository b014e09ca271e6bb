"""`observe`: two lines in a script with DistributedDataParallel, and the folder of a run beside it.

`ddprun observe` is for a script that may not be changed: its first DistributedDataParallel is observed.
"""

import atexit
import functools
import itertools
import json
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddprun import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_SUCCESS, LAUNCHED_BY_DDPRUN_VARIABLE, __version__
from ddprun.config import load_trackers
from ddprun.engine.failures import (
    FailureContext,
    append_to_rank_log,
    make_ranks_and_watchdog,
    wait_for_first_failure,
    write_failure_summary,
)
from ddprun.engine.nonfinite import FiniteCheck
from ddprun.engine.reporter import Reporter, check_tracker_packages, open_trackers
from ddprun.engine.run_folder import RunFolderError, create_run_folder, default_run_folder, ranks_not_seeing
from ddprun.host import rank_files
from ddprun.observer.step_marker import StepMarker, TimedLoader, sends_buffers
from ddprun.parallel.ddp import sparse_parameters
from ddprun.parallel.ranks import RankEnvironment, Ranks
from ddprun.standard_streams import say
from ddprun.telemetry.clock import clock_for
from ddprun.telemetry.progress import Screen
from ddprun.telemetry.recorder import AgreedSteps, StepRecorder
from ddprun.telemetry.records import StageStarted, Summary
from ddprun.telemetry.step_timing import summary_fields
from ddprun.telemetry.stragglers import StragglerDetector
from ddprun.telemetry.writer import RecordCollector, log_event, versions, write_summary
from ddprun.track import RunInfo
from ddprun.units import format_count
from ddprun_hooks.comm.control_channel import open_control_channel
from ddprun_hooks.errors import format_ranks
from ddprun_hooks.registry import AnyHook, make_stack
from ddprun_hooks.standalone import Handle, backend_of, check_model, device_of, register_stack

_T = TypeVar("_T")

_STRAGGLER_WINDOW, _STRAGGLER_OVER = 20, 0.1  # as `timings` in a pipeline has them by default
_EXIT_WAIT_S = 5.0  # how long rank 0 waits for the others' totals when the script ends without `close`
_SYNC_POLICY = "every_step"
_INTERRUPTED = "interrupted"  # in the store: a rank has been
_run_counter = itertools.count()


def _agree_on_folder(ranks: Ranks, run_dir: str | os.PathLike[str] | None, name: str) -> Path:
    """Make the run's folder on rank 0; where that fails, all ranks raise RunFolderError."""

    def make() -> list[str]:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        folder = default_run_folder(name) if run_dir is None else Path(run_dir)
        if restarts != "0":
            folder = folder.with_name(f"{folder.name}-restart-{restarts}")
        try:
            create_run_folder(folder, {}, "run_dir")
        except RunFolderError as error:
            return ["", str(error)]
        return [str(folder), ""]

    path, problem = ranks.from_rank_0("run_dir", make)
    if problem:
        raise RunFolderError(problem)
    return Path(path)


def _ddp_in(model: Any) -> Any:
    """The one DistributedDataParallel that a module of torch.compile, or of Fabric, wraps; else the model."""
    inside = model.modules() if isinstance(model, torch.nn.Module) else ()
    found = [one for one in inside if isinstance(one, DistributedDataParallel)]
    return found[0] if len(found) == 1 else model


class _NotesOnlyScreen(Screen):
    """Says what happens, and leaves the progress to the script."""

    def show_step(self, done: int, agreed: AgreedSteps | None, own_loss: float, steps_per_s: float) -> None:
        """The script shows its own."""


class ObservedRun:
    """Records the steps of a script that trains `model`, like those of a pipeline. Every rank must call it,
    as `ddprun.observe`, with the same arguments, before the first step. As a context manager, it closes
    itself.

    Args:
        model: on the default process group; no communication hook may be registered with it. May be
            compiled, or in a module around it, such as Fabric's.
        optimizer: one, or several; their steps end the run's steps. None: every optimizer of torch.optim that
            holds a parameter of the model.
        hooks: as in `ddprun_hooks.register`; none: a plain all-reduce of each bucket.
        scaler: the GradScaler, if one scales the loss.
        run_dir: a folder that is new or empty; None: a new one in `runs/NAME`. If torchrun has restarted
            the ranks, `-restart-N` is added.
        name: the name of the run; None: the script's file name.
        timeout_s: if a collective of this run takes longer, a report says which rank is missing and where it
            is, and the process ends. None: the timeout of the default process group.
        every: record every n-th step.
        track: where else rank 0 sends curves, as in a pipeline: names of trackers, or mappings of a name to
            options.

    Raises:
        HookSetupError: unknown hook, wrong options, or an unsuitable model.
        ValueError: an argument of no meaning, such as `every=0`.
        DisagreementError: the ranks were given different hooks.
        RunFolderError: the folder cannot be made, or is not empty.
        PipelineError: unknown tracker, wrong options, or a package that is not installed.
    """

    folder: Path
    """The run's folder, an absolute path."""

    hooks: Handle
    """The hooks' state: if hooks keep state, save `run.hooks.state_dict()` in each rank's checkpoint."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        hooks: AnyHook | Sequence[AnyHook] = (),
        scaler: torch.amp.GradScaler | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        every: int = 1,
        track: Sequence[str | Mapping[str, Any]] = (),
    ) -> None:
        check_model(model := _ddp_in(model))
        if not (isinstance(every, int) and every > 0):
            raise ValueError(f"every must be a whole number from 1 on, got {every!r}")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {timeout_s!r}")
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer or ()
        is_list = isinstance(optimizers, Sequence)
        if not (is_list and all(isinstance(one, Optimizer) for one in optimizers)):
            raise ValueError(
                f"optimizer must be an Optimizer of torch.optim, or a list of them: {optimizer!r}"
            )
        stack, self._device = make_stack(hooks), device_of(model)
        settings, trackers = load_trackers(json.dumps(track, default=str), "track")
        settings.check_environment()
        check_tracker_packages(settings, trackers)
        redact, redact_all = settings.secrets.redact, settings.secrets.redact_all
        self._name = name = name or Path(sys.argv[0]).stem or "script"
        if timeout_s is None:
            options: Any = dist.distributed_c10d._get_default_group()._get_backend(self._device).options
            timeout_s = options._timeout.total_seconds()
        self._context = context = FailureContext()
        environment = replace(RankEnvironment.read(), rank=dist.get_rank(), world_size=dist.get_world_size())
        self._ranks = ranks = make_ranks_and_watchdog(environment, timeout_s, context)
        watchdog = ranks.watchdog
        watchdog.start()
        with ExitStack() as undo:
            undo.callback(watchdog.close)
            ranks.adopt_process_group(f"ddprun-{next(_run_counter)}")
            shown = _agree_on_folder(ranks, run_dir, name)
            self._shown = str(shown)  # the folder as it was given, for messages
            self.folder = context.run_dir = shown.absolute()
            if self._device.type == "cuda":
                watchdog.device = self._device
            control = open_control_channel(ranks.timeout, watchdog)
            self.hooks = register_stack(
                model,
                stack,
                control,
                timeout=ranks.timeout,
                observer=watchdog,
                sends_buffers=sends_buffers(model),
                # DDP leaves buckets out with this option, and a process group is not told which.
                notes_buckets=not (sparse_parameters(model) or model.skip_all_reduce_unused_params),
            )
            self._backend = backend_of(self._device)
            remote = ranks_not_seeing(self.folder, ranks)
            self._records = RecordCollector(self.folder, control, remote, rank_files.attempt_folder())
            clock = clock_for(self._device)
            self._recorder = recorder = StepRecorder(
                clock=clock,
                control=control,
                writer=self._records.writer,
                every=every,
                stragglers=StragglerDetector(_STRAGGLER_WINDOW, _STRAGGLER_OVER),
            )
            recorder.exchanges_may_differ = True
            screen = _NotesOnlyScreen(redact, quiet=ranks.rank != 0)
            self._reporter = reporter = Reporter(screen, recorder, self._records.writer, redact_all)
            self._began = time.monotonic()
            self._loss: float | None = None  # mean over ranks in the newest step whose loss is known
            self._finite_check = FiniteCheck(model.module, control, recorder, reporter.report_nonfinite)
            self._layout_known = self._clocks_are_due = self._closed = self._told_of_skipped = False
            self._finite_check_is_due = False
            self._alone = False  # the other ranks may be gone
            self._error_before: BaseException | None = getattr(sys, "last_value", None)
            if not clock.lag_steps:  # else marks of the step before would have to be waited for
                self.hooks.on_last_bucket_sent = recorder.do_some_deferred
            of_groups = (group["params"] for one in optimizers for group in one.param_groups)
            # By which the script's optimizers are known.
            params = model.parameters() if optimizer is None else itertools.chain(*of_groups)
            calls = self.after_step, self.synchronize_if_due
            self.marks = StepMarker(self.hooks, recorder, watchdog, params, *calls)
            self.use_scaler(scaler)
            context.reporter, context.step = reporter, lambda: self.marks.step
            stage = StageStarted(stage=0, sync=_SYNC_POLICY, hooks=tuple(stack.names))
            for event in (recorder.compare_clocks(), stage):
                log_event(reporter.events, event)
            reporter.begin_stage("train", None, steps_before=0, step=0)
            recorder.begin_stage([])
            self.marks.attach(model)
            atexit.register(self._close_at_exit)
            reporter.note(f"ddprun {__version__}: observing {name}, in {shown}")
            if ranks.rank == 0 and trackers:  # last, so that whatever fails before leaves none open
                about = redact_all({"name": name, "hooks": list(stack.names), **settings.root.data()})
                info = RunInfo(name, self.folder, about, Path.cwd())
                open_trackers(settings, trackers, info, reporter, recorder, in_script=True)
            undo.pop_all()

    def use_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        """As the argument `scaler` does, for one that is made later."""
        self.marks.scaler = scaler
        if self.hooks.stack.names:  # else gradients stay as the script has scaled them
            self.hooks.use_scaler(scaler)

    def steps(self, loader: Iterable[_T]) -> TimedLoader[_T]:
        """Wrap a data loader, for one epoch or all: the time for each batch is then recorded as `data_us`.
        Without this, the time is part of `other_us`.
        """
        return TimedLoader(loader, self.marks)

    def note_loss(self, loss: Tensor) -> None:
        """Record the mean loss of the latest forward pass, shape (). This is not needed if the model returns
        its loss, alone or as `loss` in a mapping.
        """
        self.marks.note_loss(loss)

    def close(self) -> None:
        """Finish the records and write `summary.json`; every rank calls it, after its last step.

        A script that ends without `close` leaves the same files, with two exceptions: of the steps of the
        last half second, neither the mean loss nor how late other ranks were is known, and records of hosts
        that do not share the run's disk are lost.
        """
        if not self._stop_observing(alone=False):
            return
        try:
            self._handle_agreed_steps(self._recorder.end_stage())
            if self._finite_check.first_nonfinite is None:
                self._finite_check.check_parameters("continue", self.marks.step)
            self._records.collect()
        except BaseException as error:
            self._alone = True
            self._record_failure(error)
            raise
        self._write_run_summary(self._ranks.timeout.total_seconds())

    def __enter__(self) -> "ObservedRun":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        elif self._stop_observing(alone=True):
            self._record_failure(error)

    def after_step(self, exchanged: bool, at: object) -> None:
        """A step is over; `exchanged`: its gradients were averaged over ranks; `at`: where it ended."""
        agreed = self._recorder.end_step(exchanged=exchanged, at=at, alone=self._alone)
        self._handle_agreed_steps(agreed)

    def synchronize_if_due(self) -> None:
        """All ranks are about to take a forward pass: compare clocks, look for the first value that is not
        finite, and tell each other from here on when each bucket was ready, once DDP's buckets stay the same.
        """
        layout_is_new = self.hooks.layout_frozen and not self._layout_known
        due = layout_is_new or self._clocks_are_due or self._finite_check_is_due
        if not due or self._told_of_skipped:
            return
        self._handle_agreed_steps(self._recorder.wait_for_messages())
        if self._finite_check_is_due:
            self._finite_check_is_due = False
            self._finite_check.check_parameters("continue", self.marks.step)
        if self._clocks_are_due:
            self._clocks_are_due = False
            log_event(self._reporter.events, self._recorder.compare_clocks())
        if layout_is_new:
            self._layout_known = True
            self._recorder.begin_stage([self.hooks.params_by_bucket])
            self._reporter.log_start(
                self._ranks,
                self._device,
                self._backend,
                pipeline=self._name,
                buckets=self.hooks.bucket_layouts,
            )

    def _handle_agreed_steps(self, agreed: list[AgreedSteps]) -> None:
        self._clocks_are_due |= any(one.compare_clocks for one in agreed)
        if self._finite_check.first_nonfinite is None:
            self._finite_check_is_due |= any(one.nonfinite for one in agreed)
        if agreed and agreed[-1].loss is not None:
            self._loss = agreed[-1].loss
        skipped = next((one.skipped_exchange for one in agreed if one.skipped_exchange is not None), None)
        if skipped is not None and not self._told_of_skipped:
            self._told_of_skipped = True
            step, ranks = skipped
            self._reporter.events.warning("exchange_skipped", step=step, ranks=ranks)
            self._reporter.note(
                f"step {step}: {format_ranks(ranks)} exchanged no gradients, but the other ranks did: from "
                "here on, gradients of different steps are averaged"
            )
        self._reporter.show_progress(agreed, self.marks.step)

    # The end.

    def _stop_observing(self, *, alone: bool) -> bool:
        """Watch no longer; False: that is so already. `alone`: the other ranks may be gone."""
        if self._closed:
            return False
        self._closed, self._alone = True, alone
        atexit.unregister(self._close_at_exit)
        self.marks.detach()
        return True

    def _close_at_exit(self) -> None:
        """The interpreter ends without `close`."""
        if not self._stop_observing(alone=True):
            return
        error = getattr(sys, "last_value", None)
        if error is not None and error is not self._error_before:  # nobody has caught it
            self._record_failure(error)
            return
        self._recorder.salvage(wait_for_device=True)
        self._write_run_summary(_EXIT_WAIT_S)

    def _record_failure(self, error: BaseException) -> None:
        """Leave what is known, and why the script has failed, unless another rank failed first."""
        self._reporter.trackers.close_as_failed_from_main_thread()  # the failure is reported first
        rank, store = self._ranks.rank, self._ranks.store
        # torch makes a RuntimeError of one that is raised in a hook of backward.
        interrupted = isinstance(error, KeyboardInterrupt) or "KeyboardInterrupt()" in str(error)
        if not interrupted:
            append_to_rank_log(self.folder, rank, "".join(traceback.format_exception(error)).rstrip())
            wait_for_first_failure(error, self._ranks)
        with suppress(RuntimeError):  # the store's host has ended
            if interrupted:
                store.set(_INTERRUPTED, "1")
            else:
                interrupted = store.check([_INTERRUPTED])  # a broken exchange shows only that others ended
        if interrupted:
            self._recorder.salvage()  # a device may wait for a rank that was interrupted before
            self._write_run_summary(_EXIT_WAIT_S, interrupted=True)
            return
        self._reporter.salvage_records()
        if self._ranks.claim_first_failure(EXIT_FAILURE).rank == rank:
            message = f"{type(error).__name__}: {error}"
            write_failure_summary(self._context, {"rank": rank, "message": message})
            say(f"rank {rank} has failed in {self._shown}, so ranks that wait for it end: {message}")
        self._close_resources()

    def _write_run_summary(self, wait_s: float, *, interrupted: bool = False) -> None:
        """Write the summary on rank 0. What each rank has added up is in the store, since a script may have
        destroyed its process groups.
        """
        ranks, note, writer = self._ranks, self._reporter.note, self._records.writer
        writer.flush()
        own = [self._recorder.totals, writer.dropped, writer.failure]
        with suppress(RuntimeError):  # the store's host has ended
            ranks.store.set(f"end/{ranks.rank}", json.dumps(own))
        status = "interrupted" if interrupted else "done"
        summarizes = ranks.rank == 0 and ranks.first_failure() is None
        if summarizes and (summary := self._summarize(status, wait_s)) is not None:
            self._reporter.events.info("finished", status=status, step=self.marks.step)
            try:
                write_summary(self.folder, summary)
            except OSError as error:
                note(f"cannot write {self._shown}/summary.json: {error.strerror or error}")
            self._reporter.close_trackers(summary)
            note(f"{format_count(self.marks.step, 'step')} observed: ddprun report {self._shown}")
        self._close_resources()

    def _summarize(self, status: str, wait_s: float) -> Summary | None:
        """The run's summary, with the totals of all ranks; None: one has failed while this one waited."""
        of_ranks, until = dict[int, tuple[dict[str, float], int, str | None]](), time.monotonic() + wait_s
        for rank in range(self._ranks.size):
            key, left = f"end/{rank}", timedelta(seconds=max(0.01, until - time.monotonic()))
            with suppress(RuntimeError):  # it has not ended, or the store's host has
                self._ranks.store.wait([key], left)
                of_ranks[rank] = json.loads(self._ranks.store.get(key))
        missing = [rank for rank in range(self._ranks.size) if rank not in of_ranks]
        if missing and self._ranks.first_failure() is not None:
            return None  # that one has written it
        if missing:
            late = f"{format_ranks(missing)} did not end within {wait_s:g} s"
            self._reporter.note(f"the summary has no totals: {late}")
        totals = [] if missing else [one for one, _, _ in of_ranks.values()]
        failures = {rank: why for rank, (_, _, why) in of_ranks.items()}
        nonfinite = self._finite_check.first_nonfinite
        steps, seconds, hooks = self.marks.step, time.monotonic() - self._began, [*self.hooks.stack.names]
        stage = {"kind": "train", "index": 0, "steps": steps, "seconds": seconds, "sync": _SYNC_POLICY}
        stage |= {"hooks": hooks, "loss": self._loss, "interrupted": status != "done"}
        return Summary(
            status=status,
            steps=steps,
            loss=self._loss,
            seconds=seconds,
            trackers_dropped=self._reporter.trackers.dropped,
            stragglers=self._recorder.stragglers.episodes,
            world_size=self._ranks.size,
            world_sizes=[(1, self._ranks.size)],
            backend=self._backend,
            device=self._device.type,
            versions=versions(),
            records_dropped=sum(dropped for _, dropped, _ in of_ranks.values()),
            records_failure=self._reporter.note_incomplete_records(failures),
            nonfinite=None if nonfinite is None else asdict(nonfinite),
            run_dir=str(self.folder),
            stages=[stage],
            **(summary_fields(totals, steps) if totals else {}),
        )

    def _close_resources(self) -> None:
        self._reporter.trackers.close_as_failed()
        self._records.close()
        self._ranks.watchdog.close()
        if LAUNCHED_BY_DDPRUN_VARIABLE not in os.environ:
            self._ranks.watchdog.status_page.remove()


observe = ObservedRun


def _call_with_first(kind: Any, call: Callable[[Any], None]) -> None:
    """Call `call` with the next object of this class, and replace its constructor until that is made."""
    construct = kind.__init__

    @functools.wraps(construct)
    def construct_and_call(made: Any, *args: Any, **kwargs: Any) -> None:
        construct(made, *args, **kwargs)
        kind.__init__ = construct
        call(made)

    kind.__init__ = construct_and_call


def run_observed_script(script: str, is_module: bool, arguments: Sequence[str], **options: Any) -> int:
    """Run a script as `python script arguments…` would, or a module as `python -m`, with `observe(model,
    **options)` for its first DistributedDataParallel, and its first GradScaler; gives the exit code. The
    constructors of these classes are replaced in this process, until they have been called.
    """
    run: ObservedRun | None = None
    scaler: torch.amp.GradScaler | None = None

    def observe_model(model: DistributedDataParallel) -> None:
        nonlocal run
        run = observe(model, scaler=scaler, **options)

    def use_scaler(made: torch.amp.GradScaler) -> None:
        nonlocal scaler
        scaler = made
        if run is not None:
            run.use_scaler(scaler)

    _call_with_first(DistributedDataParallel, observe_model)
    _call_with_first(torch.amp.GradScaler, use_scaler)
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(script)))
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except KeyboardInterrupt as error:
        sys.last_value = error
        raise
    except Exception as error:
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        if innermost.f_globals is vars(runpy):  # which has found nothing that can be run
            say(str(error))
            return EXIT_BAD_INPUT
        sys.last_value = error  # as the interpreter does when nobody catches an exception
        sys.excepthook(type(error), error, error.__traceback__)
        return EXIT_FAILURE
    if run is None:
        say(f"{script} made no DistributedDataParallel, so nothing was observed")
    return EXIT_SUCCESS
