"""What a person sees of a run while it goes on: the screen, the event log, the trackers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from operator import itemgetter

from structlog.typing import FilteringBoundLogger

from ddprun.sync.audit import Finding
from ddprun.telemetry.control_message import Overflow
from ddprun.telemetry.progress import Screen
from ddprun.telemetry.recorder import GlobalStep, StepRecorder
from ddprun.telemetry.stragglers import Straggler
from ddprun.track.trackers import Trackers, nobody


class Reporter:
    """Tells how a run goes; rank 0's says it aloud.

    Args:
        screen: for lines and the progress bar.
        events: for `events.jsonl`.
        recorder: knows what this rank has found by itself.
    """

    def __init__(self, screen: Screen, events: FilteringBoundLogger, recorder: StepRecorder) -> None:
        self.screen = screen
        self.events = events
        self.trackers: Trackers = nobody()
        self.where = "before the first stage"
        """For an error's message."""

        self.apart_reported = False
        """The screen has said that ranks are apart, and not yet that they are equal again."""

        self._recorder = recorder
        self._straggler: Straggler | None = None

    def note(self, text: str) -> None:
        """Say something once."""
        self.screen.note(text)

    # Of the stage that is running.

    def begin_stage(self, name: str, steps: int | None, *, first: int, step: int) -> None:
        """A stage begins, or goes on.

        Args:
            name: of its kind.
            steps: how many it has; None where nobody can know.
            first: steps of the run before the stage.
            step: steps of the run that are done.
        """
        self._first, self._resumed_at, self._started = first, step, time.monotonic()
        self._newest: GlobalStep | None = None
        self._shown = self._overflows = 0
        self._straggler = None
        self.screen.begin(name, steps)

    def end_stage(self) -> None:
        """The stage is over."""
        self.screen.end()

    def skip(self, seconds: float) -> None:
        """Time that does not count as the stage's."""
        self._started += seconds

    def progress(self, known: Sequence[GlobalStep], step: int) -> None:
        """What all ranks newly know alike.

        Args:
            known: oldest first; may be empty.
            step: steps of the run that are done.
        """
        self._report_uncounted()
        for one in known:
            self._newest = one
            reports: list[tuple[int, Callable[[], None]]] = [
                *((at, partial(self._report_overflow, at, found)) for at, found in one.overflows),
                *((at, partial(self._report_straggler, at, late)) for at, late in one.straggler_changes),
            ]
            for _, report in sorted(reports, key=itemgetter(0)):
                report()
        if known:
            self._show(known[-1].steps[-1] - self._first, step)

    def progress_alone(self, done: int, step: int) -> None:
        """A step after which ranks know nothing of each other.

        Args:
            done: steps of the stage.
            step: steps of the run.
        """
        self._report_uncounted()
        self._show(done, step)

    def _show(self, done: int, step: int) -> None:
        done = self._shown = max(done, self._shown)
        rate = (step - self._resumed_at) / (time.monotonic() - self._started)
        self.screen.step(done, self._newest, self._recorder.own_loss, rate)

    def _report_uncounted(self) -> None:
        """Collectives that hooks issue by themselves: once for each, as all ranks run the same hooks."""
        for step, note in self._recorder.uncounted:
            self.events.warning("uncounted", step=step, hook=note.hook, op=note.op)
            self.note(str(note))
        self._recorder.uncounted.clear()

    def _report_straggler(self, step: int, now: Straggler | None) -> None:
        """A rank is late now, or no longer: the event each time, a line on the screen when one begins."""
        before, self._straggler = self._straggler, now
        if now is None:
            assert before is not None
            self.events.info("straggler_over", step=step, straggler=before.rank)
            return
        facts = {**asdict(now), "straggler": now.rank}
        del facts["rank"]
        self.events.warning("straggler", step=step, **facts)
        share = f"{now.late_us / now.step_us:.0%} of the time between two synchronisations"
        self.note(f"step {step}: {now.describe()}, {share}")

    def _report_overflow(self, step: int, found: Overflow) -> None:
        """A cast has made a mean infinite: the event each time, a line on the screen the first time."""
        self._overflows += 1
        names = list(found.params)
        self.events.warning(
            "overflow", step=step, hook=found.hook, kind=found.kind, bucket=found.bucket, params=names
        )
        if self._overflows == 1:
            self.note(
                f"step {step}: bucket {found.bucket} ({names[0]} … {names[-1]}) overflowed in "
                f"{found.hook}: finite {found.kind} values came back as infinity; use bf16, or a smaller "
                "loss (clip_norm comes too late)"
            )

    # Of audits.

    def audited(self, finding: Finding, step: int, *, at_end: bool) -> None:
        """Say when ranks are first apart in a stage, and when a stage's end has made them equal again."""
        if finding.farthest and not self.apart_reported:
            self.apart_reported = True
            self.note(
                f"audit, step {step}: the ranks are apart, by up to {finding.largest_distance:.3g} "
                f"(in {finding.farthest})"
            )
        elif at_end and not finding.farthest and self.apart_reported:
            self.apart_reported = False
            self.note(f"audit, step {step}: the ranks hold the same parameters again")
