"""What you see of a run while it lasts: the screen, the event log, the trackers."""

import importlib.util
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
import torch

from ddprun import __version__
from ddprun.config import LoadedSettings, PipelineError
from ddprun.config.choices import Choice
from ddprun.engine.compiling import GraphCompiler
from ddprun.engine.nonfinite import NonfiniteFinding
from ddprun.host.device import device_name
from ddprun.host.processes import END_RANK_SIGNAL, SIGNAL_EXIT_BASE, cores
from ddprun.parallel.ranks import Ranks
from ddprun.plugins import TRACKERS
from ddprun.sync.audit import AuditResult
from ddprun.telemetry.progress import Screen
from ddprun.telemetry.recorder import AgreedSteps, StepRecorder
from ddprun.telemetry.records import SharesSet, Started, StepRecord, StragglerEpisode, Summary
from ddprun.telemetry.writer import RecordWriter, log_event, make_event_logger
from ddprun.track import RunInfo, StepInfo, Tracker
from ddprun.track.trackers import Trackers
from ddprun.units import abbreviated_list, format_count
from ddprun_hooks import Hook
from ddprun_hooks.buckets import BucketLayout
from ddprun_hooks.comm.trace import BucketTrace
from ddprun_hooks.errors import format_ranks
from ddprun_hooks.payload import Finding

_MOST_RANKS_SHOWN = 8


class Reporter:
    """Reports how a run goes; the screen shows what rank 0 reports."""

    def __init__(
        self,
        screen: Screen,
        recorder: StepRecorder,
        writer: RecordWriter,
        redact_all: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> None:
        self.screen, self.writer, self.redact_all, self._recorder = screen, writer, redact_all, recorder
        rank = recorder.rank
        self.events = make_event_logger(writer if rank == 0 else None, redact_all, rank=rank)
        self.trackers = Trackers()
        self.location = "before the first stage"  # for an error's message
        self.difference_reported = False  # that ranks differ, and not yet that they are equal again
        self._straggler: StragglerEpisode | None = None
        self._shares: Sequence[int] = ()
        self._choices: dict[tuple[int, str, int], str] = {}  # by hook, kind of payload and bucket
        self._recompile_limit_reported = self._drift_reported = False
        self._noted: set[str] = set()

    def note(self, text: str) -> None:
        self.screen.note(text)

    def note_once(self, text: str) -> None:
        """Say something that stays true, only when it is first known."""
        if text not in self._noted:
            self._noted.add(text)
            self.note(text)

    def salvage_records(self) -> None:
        """Write what can be recorded without the other ranks: the run has failed."""
        with suppress(Exception):  # what has failed may have left a step that cannot be read
            self._recorder.salvage()
        self.writer.flush()

    def log_start(
        self,
        ranks: Ranks,
        device: torch.device,
        backend: str,
        *,
        pipeline: str,
        buckets: Iterable[BucketLayout],
        digest: str = "",
        groups: Sequence[str] = (),
    ) -> None:
        """Log how the run starts; `pipeline`: its name, `groups`: of parameters, by name."""
        started = Started(
            version=__version__,
            pipeline=pipeline,
            digest=digest,
            world_size=ranks.size,
            hosts=list(ranks.placement.hosts),
            device=device.type,
            backend=backend,
            cores=cores(),
            device_name=device_name(device),
            buckets=[layout.to_plain_data() for layout in buckets],
            groups=list(groups),
        )
        log_event(self.events, started)

    def note_incomplete_records(self, failures: Mapping[int, str | None]) -> str | None:
        """Say of which ranks records could not be written, given why by rank; gives the first reason."""
        incomplete = [rank for rank, why in failures.items() if why]
        if not incomplete:
            return None
        why = failures[incomplete[0]]
        self.note(f"the records of {format_ranks(incomplete)} are incomplete: {why}")
        return why

    def close_trackers(self, summary: Summary) -> None:
        """Let the trackers flush at the end of a run."""
        if unflushed := self.trackers.close(msgspec.to_builtins(summary)):
            self.note(f"{', '.join(unflushed)}: still flushing; the run does not wait for it")

    # Of the stage that is running.

    def begin_stage(self, name: str, steps: int | None, *, steps_before: int, step: int) -> None:
        """A stage of so many steps begins, after `steps_before` of the run, or is resumed after `step`."""
        self._steps_before_stage, self._resumed_at, self._started = steps_before, step, time.monotonic()
        self._shown = self._overflows = 0
        self._straggler = None
        self.screen.begin_stage(name, steps, steps_before)

    def exclude_time(self, seconds: float) -> None:
        """Time that does not count as the stage's, nor in the progress line's rate."""
        self._started += seconds

    def show_progress(self, agreed_steps: Sequence[AgreedSteps], step: int) -> None:
        """Show what all ranks have just learned, oldest first, after `step` steps of the run."""
        for one in agreed_steps:
            for overflow in one.overflows:
                self._report_overflow(*overflow)
            for change in one.straggler_changes:
                self._report_straggler(*change)
        if agreed_steps:
            self.show_step(agreed_steps[-1].steps[-1] - self._steps_before_stage, step)

    def show_step(self, done: int, step: int) -> None:
        """Show a step, after `done` of the stage and `step` of the run."""
        done = self._shown = max(done, self._shown)
        rate = (step - self._resumed_at) / (time.monotonic() - self._started)
        self.screen.show_step(done, self._recorder.agreed, self._recorder.own_loss, rate)

    def report_hook_choices(self, step: int, hooks: Sequence[Hook]) -> None:
        """Report what hooks have chosen for buckets up to a step, where it has changed."""
        for index, hook in enumerate(hooks):
            changed: dict[str, dict[str, str]] = {}
            for (kind, bucket), choice in hook.choices().items():
                if self._choices.get((index, kind, bucket)) != choice:
                    self._choices[index, kind, bucket] = choice
                    changed.setdefault(kind, {})[str(bucket)] = choice
            if changed:
                self.events.info("choices", step=step, choices=changed)

    def report_sample_shares(
        self, stage: int, step: int, shares: Sequence[int], speeds: Sequence[float]
    ) -> None:
        """Report the samples of each rank in a micro-batch from `step` on, if they are other ones in the
        stage; none: they are not shared unequally. `speeds` of the ranks are in any unit, empty if they are
        not known.
        """
        if (stage, *shares) == self._shares or not shares:
            return
        self._shares, fastest = (stage, *shares), max(speeds, default=1.0)
        speeds = [round(speed / fastest, 3) for speed in speeds]
        log_event(self.events, SharesSet(step=step, stage=stage, samples=list(shares), speeds=speeds))
        text = ", ".join(f"rank {rank} {share}" for rank, share in enumerate(shares))
        if len(shares) > _MOST_RANKS_SHOWN:
            text = f"{min(shares)} to {max(shares)} a rank,"
        slowest = min(speeds, default=1.0)
        slow = f" (rank {speeds.index(slowest)} is {slowest:.2f} times as fast)" if slowest < 1 else ""
        self.note(f"shares from step {step} on: {text} of {sum(shares)} samples{slow}")

    def _report_straggler(self, step: int, now: StragglerEpisode | None) -> None:
        """A rank is late now, or no longer: the event each time, a line on the screen when one begins."""
        before, self._straggler = self._straggler, now
        if now is None:
            assert before is not None
            self.events.info("straggler_over", step=step, straggler=before.rank)
            return
        facts = msgspec.to_builtins(now)
        self.events.warning("straggler", step=step, straggler=facts.pop("rank"), **facts)
        share = f"{now.late_us / now.step_us:.0%} of the time between two synchronisations"
        self.note(f"step {step}: {now.describe()}, {share}")

    def _report_overflow(self, step: int, trace: BucketTrace[int], finding: Finding) -> None:
        """A cast has made a mean infinite: the event each time, a line on the screen the first time."""
        self._overflows += 1
        hook, kind, bucket = finding.hook, trace.kind, trace.bucket
        names = [param.name for param in trace.params]
        self.events.warning("overflow", step=step, hook=hook, kind=kind, bucket=bucket, params=names)
        if self._overflows == 1:
            self.note(
                f"step {step}: bucket {bucket} ({names[0]} … {names[-1]}) overflowed in {hook}: finite "
                f"{kind} values came back as infinity; use bf16, or scale the loss down (clip_norm acts "
                "only after the exchange)"
            )

    def report_nonfinite(self, found: NonfiniteFinding) -> None:
        self.events.warning("nonfinite", **asdict(found))
        self.note(found.describe())

    def report_compilation(
        self, compiler: GraphCompiler, what: str, blocks: Sequence[str], seconds: float
    ) -> None:
        """Report what has been compiled before the first step, and how long it took."""
        graphs, parts = len(compiler.graphs), sum(len(graph.parts) for graph in compiler.graphs)
        compiler.reported_graphs = graphs
        self.events.info(
            "compiled",
            blocks=list(blocks),
            graphs=graphs,
            parts=parts,
            breaks=[asdict(one) for one in compiler.breaks],
            seconds=round(seconds, 3),
        )
        made = format_count(graphs, "graph")
        made += f", cut into {parts} at the size of buckets" if parts > graphs else ""
        made += f", {format_count(len(compiler.breaks), 'graph break')}" if compiler.breaks else ""
        self.note(f"compiled {what} in {seconds:.1f} s: {made}")

    def report_recompiles(self, compiler: GraphCompiler, step: int) -> None:
        """Report graphs that were compiled in a step or an evaluation, whose time holds theirs."""
        more = len(compiler.graphs) - compiler.reported_graphs
        compiler.reported_graphs += more
        if more:
            self.events.info("compiled_more", step=step, graphs=more, all_graphs=compiler.reported_graphs)
        if compiler.at_recompile_limit and not self._recompile_limit_reported:
            self._recompile_limit_reported = True
            self.events.warning("compiled_no_more", step=step, all_graphs=compiler.reported_graphs)
            self.note(
                f"step {step}: torch.compile has reached its limit of {compiler.reported_graphs} graphs, "
                "and batches of further sizes run uncompiled: write compile: {dynamic: true}"
            )

    def report_frozen_differ(self, names: Sequence[str]) -> None:
        """Report frozen parameters of which not all ranks hold the same, though nothing trains them."""
        self.events.warning("frozen_differ", where=self.location, params=list(names))
        self.note(
            f"{self.location}: something has changed parameters that require no gradient, and not alike on "
            f"all ranks: {abbreviated_list(names)}; where ranks synchronise, they are made equal"
        )

    def report_audit(self, result: AuditResult, step: int, *, at_end: bool) -> None:
        """Report when ranks first differ in a stage, and when a stage's end has made them equal again."""
        if result.farthest and not self.difference_reported:
            self.difference_reported = True
            self.note(
                f"audit, step {step}: the ranks differ by up to {result.largest_distance:.3g} "
                f"(in {result.farthest})"
            )
        elif at_end and not result.farthest and self.difference_reported:
            self.difference_reported = False
            self.note(f"audit, step {step}: the ranks hold the same parameters again")

    def warn_ranks_differ_once(self, text: str) -> None:
        """Report once that ranks differ which have to be equal."""
        if not self._drift_reported:
            self._drift_reported = True
            self.note(f"warning: {text}")


# Trackers.


def check_tracker_packages(loaded: LoadedSettings, track: Sequence[Choice]) -> None:
    """Raise a PipelineError that names the packages which trackers need and which are not installed."""
    faults = []
    for index, choice in enumerate(track):
        tracker: type[Tracker] = TRACKERS.load(choice.name)
        needs = tracker.needs
        if needs and importlib.util.find_spec(needs) is None:
            text = f"{choice.name} needs the package {needs}, which is not installed"
            package = f"'ddprun[{choice.name}]'" if choice.source == "built-in" else needs
            faults.append(loaded.fault(f"track[{index}]", text, f"pip install {package}"))
    if faults:
        raise PipelineError(faults)


def open_trackers(
    loaded: LoadedSettings,
    track: Sequence[Choice],
    run: RunInfo,
    reporter: Reporter,
    recorder: StepRecorder,
    *,
    in_script: bool = False,
) -> None:
    """Open the trackers of the run, or of an observed script, and give them every step; on rank 0 alone."""

    def failed(name: str, why: str) -> None:
        reporter.events.warning("tracker_failed", tracker=name, reason=why)
        reporter.note(f"{name} has failed and receives nothing more of this run: {why}")

    makers = []
    for index, choice in enumerate(track):
        filled = loaded.expand_env_and_folder(f"track[{index}]", choice).options
        changed = {key: value for key, value in filled.items() if value != choice.options[key]}
        assert choice.settings is not None
        options = choice.settings.model_copy(update=changed)
        tracker: type[Tracker] = TRACKERS.load(choice.name)
        makers.append((choice.name, partial(tracker, options, run)))
    trackers = reporter.trackers = Trackers(makers, failed)
    _fail_trackers_when_ended(trackers, in_script=in_script)

    def observe(record: StepRecord, traces: Sequence[BucketTrace[int]]) -> None:
        sent: Counter[tuple[str, str]] = Counter()
        for trace in traces:
            sent[trace.kind, ",".join(trace.hooks) or "all_reduce"] += trace.wire_bytes
        trackers.log_step(StepInfo(record, sent))

    recorder.on_step_record = observe


def _fail_trackers_when_ended(trackers: Trackers, *, in_script: bool) -> None:
    """Close the trackers as failed when the launcher ends this rank, as when another one has failed. torchrun
    does so with SIGTERM: to the engine that is a request to stop, and stays one; what a script does with it
    comes first.

    A thread does it, since the main thread may be waiting in a collective, where no handler runs.
    """
    number = signal.SIGTERM if in_script else END_RANK_SIGNAL

    def handler(*_: object) -> None:
        """The thread below does the work."""

    def is_installed() -> bool:
        return signal.getsignal(number) is handler

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(number) is not signal.SIG_DFL:
        return
    signal.signal(number, handler)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)  # gets the number of each signal at once

    def undo_in_child() -> None:  # the pipe is this rank's
        if is_installed():
            signal.set_wakeup_fd(-1)
            signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=undo_in_child)

    def exit_when_ended() -> None:
        while not (number in os.read(read, 64) and is_installed()):
            pass
        trackers.close_as_failed()
        os._exit(SIGNAL_EXIT_BASE + number)

    threading.Thread(target=exit_when_ended, name="ddprun-ended", daemon=True).start()
