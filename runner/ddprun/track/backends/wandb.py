"""Weights & Biases, by its own package."""

import threading
from collections.abc import Mapping
from typing import Any, Literal

from ddprun.track import CurveTracker, RunInfo

_INIT_LOCK = threading.Lock()  # trackers begin each on a thread of its own


class Wandb(CurveTracker):
    """Weights & Biases. Needs the package wandb."""

    class Options(CurveTracker.Options):
        project: str = "ddprun"
        """Where the run appears."""

        entity: str | None = None
        """User or team; null: the account's own."""

        mode: Literal["online", "offline"] = "online"
        """`offline` keeps it in the run's folder, for `wandb sync`."""

    needs = "wandb"

    def __init__(self, options: Options, run: RunInfo) -> None:
        import wandb

        super().__init__(options, run)
        with _INIT_LOCK:
            self._run = wandb.init(
                project=options.project,
                entity=options.entity,
                mode=options.mode,
                name=run.folder.name,
                group=run.name,
                dir=str(run.own_folder("wandb").parent),
                config=dict(run.pipeline),
                # The first is also the one to which `wandb.log` in code of the user's writes.
                reinit="create_new" if wandb.run else None,
                settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
            )
        # W&B's own steps count calls of `log`, the user's too, and it drops points of a step that is past.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self, summary: Mapping[str, Any]) -> None:
        self._run.finish(exit_code=0 if summary.get("status") == "done" else 1)
