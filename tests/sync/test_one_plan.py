"""A policy's plan is the one place that says what is sent: run, explain and process groups follow it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddprun.config import load
from ddprun.engine.worker import run_worker
from ddprun.explain.explain import explain
from ddprun.sync import OuterOptimizer, Partition, StageFacts, SyncPlan, Transfer
from ddprun.sync.policies.gossip import Gossip
from ddprun.sync.policies.local_sgd import LocalSgd
from tests.engine.running import lines
from tests.ranks import as_processes

PIPELINE = """
model: {mlp: {inputs: 64, hidden: [16], outputs: 10}}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.05}}
sync: {local_sgd: {every: 2}}
stages: [{train: {steps: 7}}]
"""


def _halves(ranks: int) -> Sequence[Sequence[int]]:
    return [range(ranks // 2), range(ranks // 2, ranks)]


def _plan(policy: LocalSgd, stage: StageFacts) -> SyncPlan:
    """Parameters within each half of the ranks every third step, and among all ranks at the stage's end."""
    halves = Partition("halves", _halves)
    return SyncPlan(transfers=(Transfer("parameters", 3, among=halves), Transfer("parameters", every=0)))


def test_a_change_among_the_parts_of_a_partition_is_refused() -> None:
    with pytest.raises(ValueError, match='not among the parts of "halves": there, average the parameters'):
        Transfer("change", 3, among=Partition("halves", _halves))


@pytest.mark.parametrize(("first", "second"), [((0, 1), (0, 1)), ((0, 2), (0, 2)), ((0, 1), (1, 2))])
def test_two_outer_optimizers_of_the_same_parameters_are_refused(
    first: tuple[int, int], second: tuple[int, int]
) -> None:
    """Their momentum is kept by the parameter's name."""
    outer = OuterOptimizer(lr=0.7, momentum=0.9)
    changes = [Transfer("change", 8, fragment=one, outer=outer) for one in (first, second)]
    SyncPlan(transfers=(changes[0], Transfer("change", 4, fragment=second, outer=outer, among="host")))
    with pytest.raises(ValueError, match="two outer optimizers have the same parameters among the same"):
        SyncPlan(transfers=tuple(changes))


@pytest.mark.parametrize(("every", "delay"), [(1, 1), (3, 2), (20, 8)])
def test_control_messages_wait_as_long_for_pairs_as_for_all_ranks(every: int, delay: int) -> None:
    """Until the next exchange, but no longer than eight steps."""
    stage = StageFacts(backward=True, changes_weights=True)
    for policy in (LocalSgd(every=every), Gossip(every=every)):
        assert policy.plan(stage).control_delay_steps == delay


def _work(file: Path, run_dir: Path, changed: bool) -> int:
    if changed:
        LocalSgd.plan = _plan  # type: ignore[method-assign,assignment]
    return run_worker(load(file), run_dir)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (False, {("delta", step, "deltas.0") for step in (2, 4, 6, 7)}),
        (
            True,
            {("parameters", step, "plain part/0.0") for step in (3, 6)} | {("parameters", 7, "plain.0")},
        ),
    ],
)
def test_a_changed_plan_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: bool, expected: set[Any]
) -> None:
    """Ranks exchange at its steps, in its groups, and `explain` counts the same bytes."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    run = tmp_path / "run"
    assert as_processes(4, _work, tmp_path / "p.yaml", run, changed, cwd=tmp_path) == [0] * 4
    records = lines(run, "buckets")
    assert {(one["kind"], one["step"], leg["group"]) for one in records for leg in one["legs"]} == expected
    if changed:
        monkeypatch.setattr(LocalSgd, "plan", _plan)
    (stage,) = explain(load(tmp_path / "p.yaml"), hosts=1, ranks_per_host=4).stages
    assert stage.sent_in_stage is not None
    assert stage.sent_in_stage.all_ranks == sum(one["wire_bytes"] for one in records)
