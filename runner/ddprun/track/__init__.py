"""Where else curves and metrics go: `Tracker` is the base of each, and a module of `backends` has one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ddprun import options
from ddprun.plugins import Plugin
from ddprun.run_files import check_folder_if_exists
from ddprun.telemetry.records import PARTS, StepRecord


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a tracker may know of the run; secrets are left out of it."""

    name: str  # the pipeline's
    folder: Path
    pipeline: Mapping[str, Any]
    started_in: Path  # the working directory when the run began, to which relative paths refer

    def own_folder(self, name: str) -> Path:
        """Where a tracker may keep files of its own; need not exist. Raises WrongFileTypeError."""
        check_folder_if_exists(self.folder, name)
        return self.folder / name


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One step of rank 0."""

    record: StepRecord  # a line of `steps/rank-00000.jsonl` (`docs/records.md`), its fields as attributes
    sent_bytes: Mapping[tuple[str, str], int]  # bytes that rank 0 sent, by kind and by the names of the hooks


class Tracker(Plugin):
    """Shows the curves and metrics of a run elsewhere.

    It runs on a separate thread on rank 0. An exception ends the tracker, but not the run.
    """

    class Options(options.Options):
        """Base of the options of trackers: nothing unknown, no other types, finite numbers only."""

    needs: ClassVar[str] = ""
    """The package that the tracker imports when it is created, by its import name."""

    def __init__(self, options: Any, run: RunInfo) -> None:
        """Begin; `options` are the `Options` of its class, as the pipeline has them."""

    def log_step(self, step: StepInfo) -> None:
        """A step has ended, and its record is complete."""

    def log_eval_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """An evaluation has measured these finite values after so many steps."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """The run has ended: flush. `summary` is as in `summary.json`, or `{"status": "failed"}`."""


class CurveTracker(Tracker):
    """Adds the curves of every n-th step, as its option `every` says, and all metrics: one `add` for both."""

    class Options(Tracker.Options):
        every: options.PositiveInt = 10
        """Steps from one point of a curve to the next."""

    def __init__(self, options: Any, run: RunInfo) -> None:
        self._every: int = options.every

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each of these curves."""
        raise NotImplementedError

    def log_step(self, step: StepInfo) -> None:
        if step.record.step % self._every == 0:
            self.add(step.record.step, curves(step))

    def log_eval_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.add(step, {f"evaluate/{name}": value for name, value in values.items()})


def curves(step: StepInfo) -> dict[str, float]:
    """A step's numbers, in seconds and bytes, by the names under which trackers show them."""
    record = step.record
    found: dict[str, float | None] = {
        f"time/{part[:-3]}_seconds": getattr(record, part) / 1e6 for part in (*PARTS, "step_us", "cpu_us")
    }
    found |= {"loss/rank_0": record.loss, "loss/mean": record.mean_loss, "grad_norm": record.grad_norm}
    found |= {f"values/{name}": value for name, value in (record.mean_values or {}).items()}
    found |= {f"lr/group_{index}": lr for index, lr in enumerate(record.lr or ())}
    norms = record.group_grad_norms or ()
    if len(norms) > 1:
        found |= {f"grad_norm/group_{index}": norm for index, norm in enumerate(norms)}
    found["communication/bytes"] = sum(step.sent_bytes.values())
    return finite_only(found)


def finite_only(values: Mapping[str, float | None]) -> dict[str, float]:
    """Those that are numbers: a curve has no point at NaN or an infinity, nor where nothing was measured."""
    return {n: float(value) for n, value in values.items() if value is not None and math.isfinite(value)}
