"""What a stage tells while it runs: the progress line, and events."""

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from operator import itemgetter

from ddprun.engine.session import Session
from ddprun.telemetry.global_step import GlobalStep
from ddprun.telemetry.overflow import Overflow
from ddprun.telemetry.stragglers import Straggler


class ProgressReporter:
    """Tells the screen and the event log how a stage goes.

    Args:
        session: the stage's.
        first: steps before the stage.
    """

    def __init__(self, session: Session, first: int) -> None:
        self._first = first
        self._resumed_at = session.step - first
        self._session = session
        self._started = time.monotonic()
        self._overflows = 0
        self._late: Straggler | None = None
        self._shown = 0
        self._newest: GlobalStep | None = None

    def tell(self, words: list[GlobalStep]) -> None:
        """What ranks newly know alike."""
        self._tell_uncounted()
        for agreed in words:
            self._newest = agreed
            self._session.loss = agreed.mean_losses[-1]
            events: list[tuple[int, Callable[[], None]]] = [
                *((step, partial(self._tell_overflow, step, found)) for step, found in agreed.overflows),
                *((step, partial(self._tell_straggler, step, late)) for step, late in agreed.news),
            ]
            for _, tell in sorted(events, key=itemgetter(0)):
                tell()
        if words:
            self._show(words[-1].steps[-1] - self._first)

    def skip(self, seconds: float) -> None:
        """So much time did not count."""
        self._started += seconds

    def between(self, done: int) -> None:
        """A step after which ranks know nothing of each other."""
        self._tell_uncounted()
        self._show(done)

    def _show(self, done: int) -> None:
        done = self._shown = max(done, self._shown)
        taken = self._session.step - self._first - self._resumed_at  # `done` may be some steps ago
        rate = taken / (time.monotonic() - self._started)
        self._session.screen.step(done, self._newest, self._session.recorder.own_loss, rate)

    def _tell_uncounted(self) -> None:
        """Collectives that hooks issue by themselves: once for each, as all ranks run the same hooks."""
        recorder = self._session.recorder
        for step, note in recorder.uncounted:
            self._session.events.warning("uncounted", step=step, hook=note.hook, op=note.op)
            self._session.screen.note(str(note))
        recorder.uncounted.clear()

    def _tell_straggler(self, step: int, now: Straggler | None) -> None:
        """A rank is late now, or no longer: the event each time, a line on the screen when one begins."""
        before, self._late = self._late, now
        if now is None:
            assert before is not None
            self._session.events.info("straggler_over", step=step, straggler=before.rank)
            return
        facts = {**asdict(now), "straggler": now.rank}
        del facts["rank"]
        self._session.events.warning("straggler", step=step, **facts)
        share = f"{now.late_us / now.step_us:.0%} of the time between two synchronisations"
        self._session.screen.note(f"step {step}: {now.describe()}, {share}; the others wait for it")

    def _tell_overflow(self, step: int, found: Overflow) -> None:
        """A cast has made a mean infinite: the event each time, a line on the screen the first time."""
        self._overflows += 1
        names = list(found.params)
        self._session.events.warning(
            "overflow", step=step, hook=found.hook, kind=found.kind, bucket=found.bucket, params=names
        )
        if self._overflows == 1:
            self._session.screen.note(
                f"step {step}: bucket {found.bucket} ({names[0]} … {names[-1]}) overflowed in "
                f"{found.hook}: finite {found.kind} values came back as infinity; use bf16, or a smaller "
                "loss (clip_norm comes too late)"
            )
