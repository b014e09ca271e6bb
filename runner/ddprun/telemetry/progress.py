"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere; all on stderr.

Engine's reporter passes on what all ranks know (`recorder.AgreedSteps`), and shows the summary at the end.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.box import ASCII, ROUNDED
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ddprun.standard_streams import is_terminal
from ddprun.telemetry.recorder import AgreedSteps
from ddprun.telemetry.records import StragglerEpisode, Summary
from ddprun.telemetry.stragglers import straggler_totals
from ddprun.units import format_bytes, format_world_sizes

_LINES_PER_STAGE = 10
_LINE_EVERY_S = 30.0
_REDRAW_EVERY_S = 0.1
_console = partial(Console, stderr=True, highlight=False, markup=False, emoji=False)  # texts are as they are


class Screen:
    """Where rank 0 says how the run goes, in lines for a log file: about ten in each stage, and one every
    half minute. A `quiet` one, which every other rank has, says nothing. `redact` replaces secrets.
    """

    _box = ASCII

    def __init__(self, redact: Callable[[str], str], *, quiet: bool = False) -> None:
        self._redact = redact
        self._console = _console(quiet=quiet, color_system=None, width=100, soft_wrap=True)
        self._stage = ""
        self._steps: int | None = None
        self._steps_before_stage = self._next_step = 0
        self._next_time = 0.0

    def note(self, text: str) -> None:
        """Say something once."""
        self._console.print(self._redact(text))

    def begin_stage(self, stage: str, steps: int | None, steps_before: int) -> None:
        """A stage begins after `steps_before` steps of the run; `steps` is None where nobody can know."""
        self._stage, self._steps, self._steps_before_stage = stage, steps, steps_before
        self._next_step = 0 if steps is None else max(1, steps // _LINES_PER_STAGE)
        self._next_time = time.monotonic() + _LINE_EVERY_S

    def show_step(self, done: int, agreed: AgreedSteps | None, own_loss: float, steps_per_s: float) -> None:
        """`done` steps of the stage are finished; `agreed`: the newest of which all ranks know, if any.
        `own_loss` is rank 0's newest; `steps_per_s` counts since the stage began.
        """
        if self._steps is not None and done >= self._next_step:
            self._next_step += max(1, self._steps // _LINES_PER_STAGE)
        elif time.monotonic() < self._next_time:
            return
        self._next_time = time.monotonic() + _LINE_EVERY_S
        of = "" if self._steps is None else f"/{self._steps}"
        self.note(f"{self._stage}: step {done}{of}{self._step_details(done, agreed, own_loss, steps_per_s)}")

    def _step_details(
        self, done: int, agreed: AgreedSteps | None, own_loss: float, steps_per_s: float
    ) -> str:
        """What follows the stage's step: the run's, if it is another one; losses (rank 0's alone until ranks
        know more), speed, and who is late.
        """
        step = self._steps_before_stage + done  # of the run
        of_run = f" ({step} of the run)" if self._steps_before_stage else ""
        if agreed is None:
            return f"{of_run}, rank 0's loss {own_loss:.4f}, {steps_per_s:.1f} steps/s"
        late = "" if agreed.straggler is None else f"; {agreed.straggler.describe()}"
        means = [f"{name} {value:.4f}" for name, value in agreed.mean_values.items()]
        if agreed.loss is not None:
            means.insert(0, f"mean loss {agreed.loss:.4f}")
        newest = agreed.steps[-1]  # in which ranks last exchanged anything
        at = "" if newest >= step else f" at step {newest}"
        return f"{of_run}, {', '.join(means) or 'no loss yet'}{at}, {steps_per_s:.1f} steps/s{late}"

    def end_stage(self) -> None:
        """The stage is over."""

    def show_summary(self, summary: Summary) -> None:
        table = Table(show_header=False, box=self._box)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for row in summary_rows(summary):
            table.add_row(*row)
        self._console.print(table)


class ProgressBarScreen(Screen):
    _box = ROUNDED

    def __init__(self, redact: Callable[[str], str]) -> None:
        super().__init__(redact)
        self._console = _console()
        self._progress: Progress | None = None

    def begin_stage(self, stage: str, steps: int | None, steps_before: int) -> None:
        self._steps_before_stage = steps_before
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tail]}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,  # drawn between steps, never by a second thread
        )
        self._task = self._progress.add_task(stage, total=steps, tail="")
        self._progress.start()

    def show_step(self, done: int, agreed: AgreedSteps | None, own_loss: float, steps_per_s: float) -> None:
        assert self._progress is not None
        now = time.monotonic()
        if done != self._progress.tasks[0].total and now < self._next_time:
            return
        self._next_time = now + _REDRAW_EVERY_S
        tail = self._step_details(done, agreed, own_loss, steps_per_s).lstrip(" ,")
        self._progress.update(self._task, completed=done, tail=tail)
        self._progress.refresh()

    def end_stage(self) -> None:
        if self._progress is not None:
            self._progress.refresh()
            self._progress.stop()
            self._progress = None


def screen_for(rank: int, redact: Callable[[str], str]) -> Screen:
    on_terminal = rank == 0 and is_terminal(sys.stderr)
    return ProgressBarScreen(redact) if on_terminal else Screen(redact, quiet=rank != 0)


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """The closing table of a run."""
    step_s, exposed_s = summary.seconds_in_steps or 1.0, summary.exposed_communication_s or 0.0
    sizes = summary.world_sizes or [(1, summary.world_size or 0)]
    waits = [f"rank {rank}: {s:.2f} s" for rank, s in enumerate(summary.straggler_wait_s or [])]
    return [
        ("status", summary.status),
        ("ranks", f"{format_world_sizes(sizes)} on {summary.device} over {summary.backend}"),
        ("steps", f"{summary.steps:,} ({summary.steps_per_s:.1f} a second)"),
        ("mean loss, last known", "-" if summary.loss is None else f"{summary.loss:.4f}"),
        *(
            (f"mean {name}, last known", "-" if value is None or math.isnan(value) else f"{value:.4f}")
            for name, value in (summary.values or {}).items()
        ),
        *((f"held-out {name}", f"{value:.4f}") for name, value in (summary.metrics or {}).items()),
        *_best_and_early_stop_rows(summary),
        ("sent by all ranks", format_bytes(summary.wire_bytes or 0)),
        ("communication", f"{summary.communication_s:.2f} s on the wire or in hooks"),
        ("  of which exposed", f"{exposed_s:.2f} s ({exposed_s / step_s:.0%} of step time)"),
        ("  waiting for the last rank", ", ".join(waits[:8] + ["…"] * (len(waits) > 8))),
        ("stragglers", _stragglers(summary.stragglers or ())),
        *_audit_rows(summary.audit),
        ("run folder", str(summary.run_dir)),
    ]


def _best_and_early_stop_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """What is kept of the best evaluation, and which stages have ended early."""
    if (best := summary.best) is not None:
        where = f"{best['value']:.4f} after step {best['step']:,}, in {best['file']}"
        yield f"best {best['metric']}", where
    for stage in summary.stages or ():
        if stage.get("stopped_early"):
            yield "stopped early", f"stages[{stage['index']}], after {stage['steps']:,} steps"


def _stragglers(episodes: Sequence[StragglerEpisode]) -> str:
    if not episodes:
        return "none"
    worst, *rest = straggler_totals(episodes)
    where = "" if worst.bucket is None else f", bucket {worst.bucket}"
    more = f"; and {sum(one.episodes for one in rest)} more" if rest else ""
    return f"rank {worst.rank} by {worst.late_us / 1000:.1f} ms ({worst.cause}{where}) {worst.when()}{more}"


def _audit_rows(audit: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if audit is None:
        return []
    now = "all equal" if audit["equal"] else f"differ by up to {audit['largest_distance']:.3g}"
    if audit["equal"] and (before := audit["largest_distance_ever"]):
        now += f"; before, they differed by up to {before:.3g}"
    return [("ranks' parameters", now)]
