"""Weights & Biases, by its own package."""

from collections.abc import Mapping
from typing import Any

import wandb

from ddprun.config.options import Wandb
from ddprun.track.trackers import About, StepTold, curves


class WandbTracker:
    """One run there for a run here."""

    def __init__(self, settings: Wandb, about: About) -> None:
        self._every = settings.every
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            mode=settings.mode,
            name=about.folder.name,
            group=about.name,
            dir=str(about.folder),
            config=dict(about.pipeline),
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )

    def step(self, told: StepTold) -> None:
        """One point of every curve."""
        step = told.record["step"]
        if step % self._every == 0:
            self._run.log(curves(told), step=step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One point of every metric."""
        self._run.log({f"evaluate/{name}": value for name, value in values.items()}, step=step)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Say how it ended."""
        self._run.finish(exit_code=0 if summary.get("status") == "done" else 1)


def open_tracker(settings: Wandb, about: About) -> WandbTracker:
    """The tracker of a run."""
    return WandbTracker(settings, about)
