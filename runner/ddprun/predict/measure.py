"""A short run on this machine that a prediction is fitted to, or a saved run in its place."""

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddprun.config import Loaded, load
from ddprun.config.resolved import flow
from ddprun.explain.explain import explain
from ddprun.explain.model_probe import ModelProbe
from ddprun.predict import ShortRunError
from ddprun.predict.costs import RecordsError, read
from ddprun.predict.hooks import Stack
from ddprun.predict.links import Links
from ddprun.predict.model import CostModel
from ddprun.report.runs import Run
from ddprun.run_files import read_object

STEPS = 24  # of each stage
TURNS = 2  # each stage comes so often, since a machine is not always equally fast
_QUIET = (
    "audit.every=0",
    "checkpoint={keep: 0}",
    "launch.max_restarts=0",
    "timings={every: 1, gradients: true}",
    "track=[]",
)
_DROPPED = (
    "steps",
    "epochs",
    "sync",
    "hooks",
    "mutate",
    "update",
    "evaluate",
    "keep_best",
    "stop",
)
_LOG_LINES = 12


class NothingToMeasureError(Exception):
    """No stage of the pipeline has backward passes."""


def stages_for(loaded: Loaded, stacks: Sequence[Stack], steps: int = STEPS) -> str:
    """The stages of the short run, as YAML: without exchange, and with each stack of hooks.

    Raises:
        NothingToMeasureError: no stage of the pipeline has backward passes.
    """
    trained = [stage for stage in loaded.pipeline.stages if stage.name == "train"]
    if not trained:
        raise NothingToMeasureError("no stage trains, so there is nothing to predict")
    written = loaded.root.data().get("stages")
    options = dict(written[trained[0].index]["train"]) if written is not None else {}
    kept = {key: value for key, value in options.items() if key not in _DROPPED}
    kept |= {"steps": steps, "schedule": None}
    settings: list[dict[str, Any]] = [{"hooks": ["noop"], "sync": "every_step"}, {"sync": "independent"}]
    settings += [{"hooks": list(stack), "sync": "every_step"} for stack in stacks]
    return flow([{"train": {**kept, **one}} for _ in range(TURNS) for one in settings])


def measure(
    loaded: Loaded,
    pipeline: Path,
    overrides: Sequence[str],
    stacks: Sequence[Stack],
    run_dir: Path,
    steps: int = STEPS,
    limit_s: float | None = None,
) -> None:
    """Run a pipeline's model and data on this machine, with each stack of hooks for some steps.

    A run that takes longer than `limit_s` is ended: what it has recorded until then tells the costs.

    Raises:
        NothingToMeasureError: no stage of the pipeline has backward passes.
        ShortRunError: it failed.
    """
    settings = [*overrides, f"stages={stages_for(loaded, stacks, steps)}", *_QUIET]
    command = [sys.executable, "-P", "-m", "ddprun", "run", str(pipeline), "--run-dir", str(run_dir)]
    command += ["--nnodes", "1", *(word for setting in settings for word in ("--set", setting))]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return
    if done.returncode:
        said = "\n".join(done.stdout.strip().splitlines()[-_LOG_LINES:])
        raise ShortRunError(f"the short run in {run_dir} failed with exit code {done.returncode}:\n{said}")


def fitted(
    run_dir: Path, links: Links, *, cores: float | None = None, probe: ModelProbe | None = None
) -> CostModel:
    """The cost model of a run in a folder, which had these links; `cores`: of a host, if not as recorded.

    Raises:
        NoRunError: the folder is not a run's.
        RecordsError: the run has no records that tell what a step costs.
        PipelineError: its pipeline cannot be read.
    """
    run = Run(run_dir)
    started = run.first("started") or {}
    by_host = Counter(started.get("hosts") or [""])
    if len(set(by_host.values())) > 1:
        raise RecordsError(f"{run_dir}: its hosts have different numbers of ranks")
    try:
        folder = Path(str(read_object(run_dir, "run.json", 1 << 20)["pipeline_folder"]))
    except (OSError, ValueError, KeyError) as error:
        raise RecordsError(f"{run_dir} has no run.json that says where its pipeline was") from error
    ran = load(run_dir / "pipeline.yaml", (), folder)
    explained = explain(ran, hosts=len(by_host), ranks_per_host=max(by_host.values()), probe=probe)
    costs = read(run, len(explained.stages))
    return CostModel(explained, costs if cores is None else replace(costs, cores=cores), links)
