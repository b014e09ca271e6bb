"""A short run on this machine that a prediction is fitted to, or a saved run in its place."""

import os
import reprlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import psutil

from ddprun.config import LoadedPipeline, load
from ddprun.config.yaml_writer import flow_yaml
from ddprun.explain.explain import StageExplanation, explain
from ddprun.predict import MeasurementRunError
from ddprun.predict.cost_model import CostModel, fit_cost_model
from ddprun.predict.costs import CostsUnknownError, StageCosts, check_predictable, costs_of_run
from ddprun.predict.links import Links
from ddprun.run_files import read_pipeline_folder
from ddprun.standard_streams import say
from ddprun.telemetry.reader import RecordedRun
from ddprun.telemetry.records import StageStarted
from ddprun.units import format_bytes
from ddprun_hooks.config.options import parse_hook_spec

HookSpecs = Sequence[Any]  # hooks as a pipeline file has them
STEPS_PER_STAGE = 24
STAGE_REPETITIONS = 2  # since a machine is not always equally fast
QUIET_OVERRIDES = ("audit.every=0", "checkpoint={keep: 0}", "launch.max_restarts=0", "track=[]")
"""Overrides of a short run: it does nothing beside training."""

_NO_SCHEDULE_OF_RUN = "schedule=null"  # `over: run` allows a stage none of its own

_LOG_LINES = 12
_COMPUTATION_KEYS = ("model", "data", "loss", "precision", "compile")
_SENT_TOLERANCE = 0.01
_FULL_SHARE, _FOREIGN_SHARE = 0.9, 0.1  # of the cores' time: above it, all are busy; others keep them busy


def distinct_stacks_without_noop(stacks: Iterable[HookSpecs]) -> list[HookSpecs]:
    """Each stack of hooks once; without `noop`, which the short run has anyway."""
    found: list[HookSpecs] = []
    for stack in stacks:
        if stack not in found and "noop" not in stack:
            found.append(stack)
    return found


def _measurement_stage_options(
    loaded: LoadedPipeline, steps: int = STEPS_PER_STAGE, **settings: Any
) -> dict[str, Any]:
    """The pipeline's first train stage with these settings, as the short run has it."""
    if not (trained := loaded.pipeline.train_stages()):
        raise CostsUnknownError("no stage trains, so there is nothing to predict")
    settings |= {"schedule": None, "warmup_steps": 0, "mutate": None}
    return loaded.stage_with_steps(trained[0], steps, only_training=True, **settings)


def measurement_stages_yaml(
    loaded: LoadedPipeline, stacks: Sequence[HookSpecs], steps: int = STEPS_PER_STAGE
) -> str:
    """The stages of the short run, as YAML; raises CostsUnknownError if no stage of the pipeline trains."""
    own: list[dict[str, Any]] = [{"hooks": ["noop"]}, {"sync": "independent"}]
    own += [{"hooks": list(stack)} for stack in stacks]
    stages = [_measurement_stage_options(loaded, steps, **({"sync": "every_step"} | one)) for one in own]
    return flow_yaml(stages * STAGE_REPETITIONS)


def run_measurement(
    loaded: LoadedPipeline,
    stacks: Sequence[HookSpecs],
    run_dir: Path,
    *,
    overrides: Sequence[str] = (),
    limit_s: float | None = None,
) -> None:
    """Run a pipeline's model and data on this machine, with each stack of hooks for some steps; warn if other
    processes took the cores' time meanwhile.

    `overrides` are added to those with which the pipeline was loaded. A run that takes longer than `limit_s`
    is ended: what it has recorded until then tells the costs. Raises MeasurementRunError if it fails, and as
    `measurement_stages_yaml` does.
    """
    say(f"a short run measures what steps cost here, in {run_dir}")
    settings = [
        *loaded.overrides,
        *overrides,
        f"stages={measurement_stages_yaml(loaded, stacks)}",
        *QUIET_OVERRIDES,
    ]
    # Shares are for stages that average gradients in every step, which not all of these do.
    settings += ["timings={every: 1, gradients: true}", "loader.balance=null", _NO_SCHEDULE_OF_RUN]
    command = [sys.executable, "-P", "-m", "ddprun", "run", str(loaded.path), "--run-dir", str(run_dir)]
    command += ["--nnodes", "1", *(word for setting in settings for word in ("--set", setting))]
    psutil.cpu_percent()  # counts from here
    start_s, own_s = time.monotonic(), _children_cpu_s()
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",  # as text
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return  # the CPU time of killed ranks is not known
    if done.returncode:
        output = "\n".join(done.stdout.strip().splitlines()[-_LOG_LINES:])
        raise MeasurementRunError(
            f"the short run in {run_dir} failed with exit code {done.returncode}:\n{output}"
        )
    cores_s = (time.monotonic() - start_s) * (psutil.cpu_count() or 1)
    own_share = (_children_cpu_s() - own_s) / cores_s
    if warning := contention_warning(psutil.cpu_percent() / 100, own_share):
        say(f"warning: {warning}; measure again when it is quiet")


def _children_cpu_s() -> float:
    """CPU time of child processes that have ended, and of theirs."""
    times = os.times()
    return times.children_user + times.children_system


def contention_warning(busy: float, own: float) -> str:
    """A warning if the cores were all busy, and not only with child processes; shares of their time."""
    foreign = max(0.0, busy - own)
    if busy < _FULL_SHARE or foreign < _FOREIGN_SHARE:
        return ""
    text = "this machine was busy while its costs were measured: other processes took "
    return f"{text}{foreign:.0%} of its cores' time, so the predicted step times are too long"


def cost_models_of_run(
    run_dir: Path, links: Links, like: LoadedPipeline | None = None, *, cores: float | None = None
) -> Iterator[CostModel]:
    """The cost model of a run in a folder, which had these links; `cores`: of a host, if not as recorded.
    After it those of each half, if the run takes the same stages twice, as a short run does.
    `like` is the pipeline to predict: a warning says where the run's differs from it, and of an observed
    script it says what the records do not. Raises NoRunError, CostsUnknownError if its records do not tell,
    PipelineError if its file cannot be read, or as `check_predictable`.
    """
    run = RecordedRun(run_dir)
    by_host = Counter(run.started.hosts or [""])
    if len(set(by_host.values())) > 1:
        raise CostsUnknownError(f"{run_dir}: its hosts have different numbers of ranks")
    if like is not None and run.is_observed:
        ran = _script_as_pipeline(run, like)
    else:
        try:
            folder = read_pipeline_folder(run_dir)
        except (OSError, ValueError) as error:
            raise CostsUnknownError(f"{run_dir} has no run.json that says where its pipeline was") from error
        ran = load(run_dir / "pipeline.yaml", (), folder)
        if like is not None:
            _warn_if_measured_run_differs(run_dir, ran, like)
    check_predictable(ran)
    explained = explain(ran, hosts=len(by_host), ranks_per_host=max(by_host.values()))
    costs = costs_of_run(run, len(explained.stages))
    if like is not None and run.is_observed:
        _check_script_sends_as_stage(run, ran.path, explained.stages[0], costs.stages[0])
    costs = costs if cores is None else replace(costs, cores=cores)
    parts, stages = [costs], ran.as_dict()["stages"]
    half = len(stages) // STAGE_REPETITIONS
    if stages == stages[:half] * STAGE_REPETITIONS and all(one.steps for one in costs.stages):
        nothing = [StageCosts()] * half
        parts += [replace(costs, stages=[*costs.stages[:half], *nothing])]
        parts += [replace(costs, stages=[*nothing, *costs.stages[half:]])]
    return (fit_cost_model(explained, one, links) for one in parts)


def _warn_if_measured_run_differs(run_dir: Path, ran: LoadedPipeline, like: LoadedPipeline) -> None:
    """Warn if what a run computed in a step is not what a pipeline computes."""
    before, after = ran.as_dict(), like.as_dict()
    names = [name for name in _COMPUTATION_KEYS if before[name] != after[name]]
    if before["loader"]["batch_size"] != after["loader"]["batch_size"]:
        names.append("loader.batch_size")
    if names:
        say(
            f"warning: {run_dir} ran with other settings than {like.path} has ({', '.join(names)}): "
            "computation is predicted to take as long as in that run"
        )


def _script_as_pipeline(run: RecordedRun, like: LoadedPipeline) -> LoadedPipeline:
    """A pipeline like another, but with one stage, whose steps are those of an observed script."""
    counts = Counter(
        sum(part == "backward" for part, _ in step.laps)
        for rank in run.ranks[:1]
        for step in run.step_records(rank)
    )
    passes = max([1, *(count for count, _ in counts.most_common(1))])
    hooks: list[Any] = next((list(event.hooks) for event in run.events_of(StageStarted)), [])
    for stage in like.pipeline.train_stages():
        specs = stage.effective_settings(like.pipeline).hook_specs
        if [parse_hook_spec(hook)[0] for hook in specs] == hooks:
            hooks = specs
    steps = _measurement_stage_options(like, sync="every_step", hooks=hooks, accumulate=passes)
    say(
        f"{run.folder} observed a script: its records give times, buckets, ranks, cores, the names of hooks "
        f"and accumulate: {passes}; {like.path} gives the rest"
    )
    overrides = (*like.overrides, _NO_SCHEDULE_OF_RUN, f"stages={flow_yaml([steps])}")
    return load(like.path, overrides, like.folder)


def _check_script_sends_as_stage(
    run: RecordedRun, path: Path, stage: StageExplanation, costs: StageCosts
) -> None:
    """Raise CostsUnknownError if an observed script sent other buckets, or more or less, than the stage."""
    found = [(one.get("dtype"), one.get("numel"), one.get("params")) for one in run.started.buckets]
    sent = [
        (bucket, len(pattern.steps) / stage.cycle)
        for pattern, exchange, bucket in stage.step_buckets()
        if exchange.route.kind == "gradient"
    ]
    planned = [(bucket.dtype, bucket.numel, list(bucket.params)) for bucket, _ in sent]
    for number, (ours, theirs) in enumerate(zip_longest(found, planned)):
        if ours != theirs:
            its, other = (
                f"{one[1]} {one[0]} values of {reprlib.repr(one[2])}" if one else "missing"
                for one in (ours, theirs)
            )
            raise CostsUnknownError(
                f"{run.folder}: bucket {number} is {its}, but in {path} it is {other}; the script and the "
                "pipeline must have the same model and the same options of DDP"
            )
    per_step = sum(share * bucket.sent.per_rank for bucket, share in sent)
    if abs(costs.sent_bytes - per_step) > _SENT_TOLERANCE * per_step:
        raise CostsUnknownError(
            f"{run.folder}: a rank sent {format_bytes(costs.sent_bytes)} in a step, but in {path} it sends "
            f"{format_bytes(per_step)}; hooks must have the same options, and only the last backward pass of "
            "a step may exchange gradients"
        )
