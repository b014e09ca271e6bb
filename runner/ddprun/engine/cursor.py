"""Where in its pipeline a run is."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_KEPT = ("next", "stage", "first_step", "first_epoch", "steps", "seconds", "run_seconds", "entries")


@dataclass(slots=True)
class Cursor:
    """Which stage runs or comes next, and where its steps began."""

    next: int = 0
    """The place in `stages` of the stage that runs, or that comes next."""

    stage: int | None = None
    """The last stage that takes steps that has begun; it runs if it is `next`."""

    first_step: int = 0
    """Steps of the run when that stage began."""

    first_epoch: int = 0
    """The epoch in which it began."""

    steps: int | None = None
    """How many steps that stage has; None where nobody can know."""

    seconds: float = 0.0
    """Time spent in it up to when it was looked at last."""

    run_seconds: float = 0.0
    """Time spent in all stages up to when it was looked at last."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    """The summary's entries of the stages that are done."""

    @property
    def mid_stage(self) -> bool:
        """A stage that takes steps has begun and not ended."""
        return self.stage == self.next

    looked_at_s: float = 0.0
    """When that was, on this process's clock."""

    run_looked_at_s: float = 0.0
    """The same, of `run_seconds`."""

    def begin(self, stage: int, step: int, epoch: int) -> None:
        """A stage that takes steps begins."""
        self.stage, self.first_step, self.first_epoch, self.seconds = stage, step, epoch, 0.0

    def start_clock(self) -> None:
        """Steps are taken from here on."""
        self.looked_at_s = time.monotonic()

    def start_run_clock(self) -> None:
        """The run's stages begin, or go on."""
        self.run_looked_at_s = time.monotonic()

    def run_elapsed_s(self) -> float:
        """Time spent in the run's stages so far, in all attempts; of one that was broken off, up to the
        checkpoint.
        """
        now = time.monotonic()
        self.run_seconds += now - self.run_looked_at_s
        self.run_looked_at_s = now
        return self.run_seconds

    def elapsed_s(self) -> float:
        """Time spent in the stage so far, in all attempts."""
        now = time.monotonic()
        self.seconds += now - self.looked_at_s
        self.looked_at_s = now
        return self.seconds

    def skip(self, seconds: float) -> None:
        """So much time did not count."""
        self.looked_at_s += seconds

    def end(self, entry: dict[str, Any]) -> None:
        """A stage is done."""
        self.entries.append(entry)
        self.next += 1

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {name: getattr(self, name) for name in _KEPT}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring it back."""
        for name in state.keys() & set(_KEPT):
            setattr(self, name, state[name])
        self.entries = list(state["entries"])
