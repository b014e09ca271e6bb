"""A short run on this machine that a prediction is fitted to, or a saved run in its place."""

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddprun.config import LoadedPipeline, load
from ddprun.config.resolved import flow_yaml
from ddprun.explain.explain import explain
from ddprun.explain.model_probe import ModelProbe
from ddprun.predict import ShortRunError
from ddprun.predict.costs import RecordsError, read_costs
from ddprun.predict.hooks import HookSpecs
from ddprun.predict.links import Links
from ddprun.predict.model import CostModel
from ddprun.run_files import read_json_object
from ddprun.telemetry.reader import Run

STEPS_PER_STAGE = 24
STAGE_REPETITIONS = 2  # since a machine is not always equally fast
_QUIET = (
    "audit.every=0",
    "checkpoint={keep: 0}",
    "launch.max_restarts=0",
    "timings={every: 1, gradients: true}",
    "track=[]",
)
_DROPPED_OPTIONS = ("steps", "epochs", "sync", "hooks", "mutate", "update", "evaluate", "keep_best", "stop")
_LOG_LINES = 12


class NothingToMeasureError(Exception):
    """No stage of the pipeline has backward passes."""


def short_run_stages(
    loaded: LoadedPipeline, stacks: Sequence[HookSpecs], steps: int = STEPS_PER_STAGE
) -> str:
    """The stages of the short run, as YAML: without exchange, and with each stack of hooks.

    Raises:
        NothingToMeasureError: no stage of the pipeline has backward passes.
    """
    trained = [stage for stage in loaded.pipeline.stages if stage.name == "train"]
    if not trained:
        raise NothingToMeasureError("no stage trains, so there is nothing to predict")
    written = loaded.root.data().get("stages")
    options = dict(written[trained[0].index]["train"]) if written is not None else {}
    kept = {key: value for key, value in options.items() if key not in _DROPPED_OPTIONS}
    kept |= {"steps": steps, "schedule": None}
    settings: list[dict[str, Any]] = [{"hooks": ["noop"], "sync": "every_step"}, {"sync": "independent"}]
    settings += [{"hooks": list(stack), "sync": "every_step"} for stack in stacks]
    return flow_yaml([{"train": {**kept, **one}} for _ in range(STAGE_REPETITIONS) for one in settings])


def run_measurement(
    loaded: LoadedPipeline,
    pipeline: Path,
    overrides: Sequence[str],
    stacks: Sequence[HookSpecs],
    run_dir: Path,
    steps: int = STEPS_PER_STAGE,
    limit_s: float | None = None,
) -> None:
    """Run a pipeline's model and data on this machine, with each stack of hooks for some steps.

    A run that takes longer than `limit_s` is ended: what it has recorded until then tells the costs.

    Raises:
        NothingToMeasureError: no stage of the pipeline has backward passes.
        ShortRunError: it failed.
    """
    settings = [*overrides, f"stages={short_run_stages(loaded, stacks, steps)}", *_QUIET]
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
        output = "\n".join(done.stdout.strip().splitlines()[-_LOG_LINES:])
        raise ShortRunError(f"the short run in {run_dir} failed with exit code {done.returncode}:\n{output}")


def cost_model_of_run(
    run_dir: Path, links: Links, *, cores: float | None = None, probe: ModelProbe | None = None
) -> CostModel:
    """The cost model of a run in a folder, which had these links; `cores`: of a host, if not as recorded.

    Raises:
        NoRunError: the folder is not a run's.
        RecordsError: the run has no records that tell what a step costs.
        PipelineError: its pipeline cannot be read.
    """
    run = Run(run_dir)
    started = run.first_event("started") or {}
    by_host = Counter(started.get("hosts") or [""])
    if len(set(by_host.values())) > 1:
        raise RecordsError(f"{run_dir}: its hosts have different numbers of ranks")
    try:
        folder = Path(str(read_json_object(run_dir, "run.json", 1 << 20)["pipeline_folder"]))
    except (OSError, ValueError, KeyError) as error:
        raise RecordsError(f"{run_dir} has no run.json that says where its pipeline was") from error
    ran = load(run_dir / "pipeline.yaml", (), folder)
    explained = explain(ran, hosts=len(by_host), ranks_per_host=max(by_host.values()), probe=probe)
    costs = read_costs(run, len(explained.stages))
    return CostModel(explained, costs if cores is None else replace(costs, cores=cores), links)
