"""The state protocol: what is taken mid-run and given back goes on with the same bits."""

import copy
import os
from collections.abc import Callable
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from ddprun.checkpoint.folder import Checkpoint
from ddprun.config import load
from ddprun.engine.checkpoint_state import collect_state, restore_state
from ddprun.engine.failures import FailureContext, make_ranks_and_watchdog
from ddprun.engine.interrupts import SignalRequests
from ddprun.engine.loop import sync_after_step, train_step
from ddprun.engine.session import BestMetric, RunComponents, RunResults, RunState, Session
from ddprun.engine.setup import build_session
from ddprun.engine.stage_run import StageRun, begin_stage
from ddprun.parallel.ranks import RankEnvironment
from ddprun.sync.audit import AuditResult
from ddprun.sync.plan import ReplicaConsistency
from tests.hooks.test_stacks import assert_same
from tests.ranks import as_processes

PIPELINE = """
model:
  transformer: {width: 16, layers: 1, heads: 2, context: 8, dropout: 0.3}
data:
  text: {files: "*.txt", context: 8}
loader: {batch_size: 4}
optimizer: {adamw: {lr: 0.01}}
precision: fp16
hooks: HOOKS
stages: [{train: {steps: 100}}]
"""


def open_here(folder: Path, name: str) -> Session:
    loaded = load(folder / "p.yaml")
    ranks = make_ranks_and_watchdog(RankEnvironment.read(), 60.0, FailureContext())
    ranks.connect_store()
    ranks.join(torch.device("cpu"), "gloo")
    run_dir = folder / name
    run_dir.mkdir(exist_ok=True)
    return build_session(loaded, run_dir, ranks, torch.device("cpu"), "gloo", SignalRequests())


def go(stage_run: StageRun, steps: int) -> None:
    session = stage_run.session
    session.runtime.model.train()
    for batches in islice(session.runtime.feeds.for_stage(0).steps(stage_run.settings.accumulate), steps):
        step = session.state.current_step
        session.runtime.recorder.begin_step(step, 0)
        train_step(stage_run, batches, step)
        exchanged = sync_after_step(stage_run, step)
        session.state.step = step
        session.runtime.recorder.end_step(exchanged=exchanged)


def begin(session: Session) -> StageRun:
    stage: Any = session.runtime.loaded.pipeline.stages[0]
    return begin_stage(session, stage)


def bits(session: Session) -> list[bytes]:
    return [value.numpy().tobytes() for value in session.runtime.model.state_dict().values()]


def unbroken(folder: Path) -> list[bytes]:
    session = open_here(folder, "unbroken")
    go(begin(session), 11)
    return bits(session)


def first_part(folder: Path) -> None:
    session = open_here(folder, "first")
    go(begin(session), 6)
    session.runtime.recorder.wait_for_messages()
    torch.save(collect_state(session), folder / f"state-{os.environ['RANK']}")


def second_part(folder: Path) -> list[bytes]:
    session = open_here(folder, "second")
    state = torch.load(folder / f"state-{os.environ['RANK']}", weights_only=True)
    restore_state(session, state)
    found = Checkpoint(
        path=folder,
        step=6,
        world_size=session.runtime.ranks.size,
        nonfinite=None,
        layout="",
        files={},
    )
    more = {"new_rates": False, "checkpoint": found, "accept": lambda: None}
    session.state.resume_state = {**state, **more}
    stage_run = begin(session)
    assert session.state.step == 6
    go(stage_run, 5)
    return bits(session)


BEST = BestMetric(metric="loss", value=0.5, step=1)
AUDIT = AuditResult(differing=("weight",), odd_ranks=(1,), largest_distance=0.5, farthest="weight")
CHANGES: dict[str, Callable[[RunState], object]] = {
    "step": lambda state: setattr(state, "step", state.step + 1),
    "results.loss": lambda state: setattr(state.results, "loss", 0.5),
    "results.values": lambda state: setattr(state.results, "values", {"recon": 0.5}),
    "results.metrics": lambda state: setattr(state.results, "metrics", {"accuracy": 0.5}),
    "results.evaluated_step": lambda state: setattr(state.results, "evaluated_step", 3),
    "results.kept": lambda state: setattr(state.results, "kept", BEST),
    "results.best": lambda state: setattr(state.results, "best", BEST),
    "results.stop_metric": lambda state: setattr(state.results, "stop_metric", "accuracy"),
    "results.since_best": lambda state: setattr(state.results, "since_best", 2),
    "results.last_audit": lambda state: setattr(state.results, "last_audit", AUDIT),
    "results.farthest_apart": lambda state: setattr(state.results, "farthest_apart", 0.5),
    "cursor": lambda state: setattr(state.cursor, "first_epoch", 3),
    "replicas.parameters": lambda state: setattr(state.replicas, "parameters", "host"),
    "replicas.optimizer": lambda state: setattr(state.replicas, "optimizer", "host"),
    "replicas.mutated_at": lambda state: setattr(state.replicas, "mutated_at", 3),
    "replicas.averages_differ": lambda state: setattr(state.replicas, "averages_differ", False),
    "outer_momentum": lambda state: state.outer_momentum.update(all={"weight": torch.ones(2)}),
    "synchronizer": lambda state: setattr(state, "synchronizer", None),
    "schedule": lambda state: setattr(state, "schedule", None),
    "loaded_schedule": lambda state: setattr(state, "loaded_schedule", {"last_epoch": 0}),
}
"""By field of the state, and of what is inside `results` and `replicas`: a change of it."""


def changed_parts(folder: Path) -> dict[str, list[str]]:
    """For each change, the parts of a checkpoint that it changes."""
    session = open_here(folder, "changes")
    go(begin(session), 1)
    session.runtime.recorder.wait_for_messages()
    found = {}
    first = before = copy.deepcopy(collect_state(session))
    for name, change in CHANGES.items():
        change(session.state)
        now = copy.deepcopy(collect_state(session))
        found[name] = [part for part in now if repr(now[part]) != repr(before[part])]
        before = now
    for name, saved in (("not reset", first), ("not restored", before)):
        restore_state(session, saved)
        now = collect_state(session)
        found[name] = [part for part in now if repr(now[part]) != repr(saved[part])]
    return found


def test_a_checkpoint_holds_every_field_of_the_state(tmp_path: Path) -> None:
    """A field that is new has to be in it, and has to have a change here that shows it. All of it comes back;
    what the running stage keeps, which is gone by then, does so in `restore_stage_state`.
    """
    prepare(tmp_path, "[]", "{local_sgd: {every: 4}}", "schedule: CosineAnnealingLR\nema: 0.9")
    (found,) = as_processes(1, changed_parts, tmp_path)
    expected = {field.name for field in fields(RunState)} - {"resume_state", "results", "replicas"}
    expected |= {f"results.{name}" for name in RunResults.model_fields}
    expected |= {f"replicas.{field.name}" for field in fields(ReplicaConsistency)}
    expected -= {"replicas.hosts", "replicas.optimizer_is_read"}  # the stage and the optimizer say them anew
    assert expected == {*CHANGES}
    assert found.pop("not reset") == ["sync"]
    assert found.pop("not restored") == []
    assert [name for name, parts in found.items() if not parts] == []


def uncollected(folder: Path) -> list[str]:
    """Fields of RunComponents that have a state of which `collect_state` takes nothing."""
    session = open_here(folder, "uncollected")
    begin(session)
    objects = {field.name: getattr(session.runtime, field.name) for field in fields(RunComponents)}
    stateful = {name: one for name, one in objects.items() if hasattr(one, "state_dict")}
    assert {"model", "optimizer", "ema", "recorder", "stacks"} <= stateful.keys()
    asked = set[int]()
    for kind in {type(one) for one in stateful.values()}:

        def recording(self: Any, *rest: Any, _state_dict: Any = kind.state_dict, **named: Any) -> Any:
            asked.add(id(self))
            return _state_dict(self, *rest, **named)

        kind.state_dict = recording
    collect_state(session)
    return [name for name, one in stateful.items() if id(one) not in asked]


def test_a_checkpoint_holds_every_state_of_the_runtime(tmp_path: Path) -> None:
    """What stays for the whole run may learn, too."""
    prepare(tmp_path, "[]", "every_step", "ema: 0.9")
    assert as_processes(1, uncollected, tmp_path) == [[]]


def prepare(folder: Path, hooks: str, sync: str = "every_step", more: str = "") -> None:
    (folder / "words.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    (folder / "p.yaml").write_text(PIPELINE.replace("HOOKS", hooks) + f"sync: {sync}\n{more}\n")


@pytest.mark.parametrize(
    "hooks", ["[bf16]", "[{topk: {density: 0.1}}]", "[{powersgd: {rank: 2}}, int8]", "[shared_memory]"]
)
def test_a_state_taken_after_six_steps_goes_on_with_the_same_bits(tmp_path: Path, hooks: str) -> None:
    """Model, optimizer, loss scale, hooks, data position and generators on 3 ranks, in new processes; nothing
    in the state is more than tensors and plain values, so it loads with `weights_only`.
    """
    prepare(tmp_path, hooks)
    whole = as_processes(3, unbroken, tmp_path)
    as_processes(3, first_part, tmp_path)
    resumed = as_processes(3, second_part, tmp_path)
    assert whole[0] == whole[1] == whole[2]
    assert resumed == whole


@pytest.mark.parametrize(
    ("sync", "hooks"),
    [
        ("{local_sgd: {every: 4}}", "[{topk: {density: 0.1}}]"),
        ("{hierarchical_sgd: {within: 1, across: 4, hosts: 3}}", "[int8]"),
        ("{hierarchical_sgd: {within: 2, across: 4, hosts: 1}}", "[{powersgd: {rank: 2}}]"),
        ("{diloco: {every: 4, fragments: 2, overlap_steps: 3}}", "[int8]"),
        ("{broadcast: {every: 4}}", "[]"),
        ("independent", "[]"),
    ],
)
def test_a_state_taken_in_mid_round_goes_on_with_the_same_bits(tmp_path: Path, sync: str, hooks: str) -> None:
    """After six steps: between two averages, and for DiLoCo with an exchange under way; each rank has weights
    of its own.
    """
    prepare(tmp_path, hooks, sync, "accumulate: 2")
    whole = as_processes(3, unbroken, tmp_path)
    as_processes(3, first_part, tmp_path)
    resumed = as_processes(3, second_part, tmp_path)
    assert whole[0] != whole[1], "ranks are apart"
    assert resumed == whole


def skipped(folder: Path) -> tuple[int, bool, bool]:
    session = open_here(folder, "skipped")
    stage_run = begin(session)
    go(stage_run, 3)
    before, weights = copy.deepcopy(session.runtime.stacks.first_stack.state_dict()), bits(session)
    assert session.runtime.precision.scaler is not None
    state = session.runtime.precision.scaler.state_dict()
    session.runtime.precision.scaler.load_state_dict({**state, "scale": 2.0**100})
    go(stage_run, 1)
    same_weights = bits(session) == weights
    try:
        assert_same(session.runtime.stacks.first_stack.state_dict(), before)
    except AssertionError:
        return session.state.step, same_weights, False
    return session.state.step, same_weights, True


@pytest.mark.parametrize("hooks", ["[int8]", "[{powersgd: {rank: 2}}, fp16]"])
def test_a_step_that_the_loss_scale_skips_leaves_weights_and_hooks_alone(tmp_path: Path, hooks: str) -> None:
    """A scale at which every gradient overflows: nothing has changed after the step, bit for bit."""
    prepare(tmp_path, hooks)
    assert as_processes(2, skipped, tmp_path) == [(4, True, True)] * 2
