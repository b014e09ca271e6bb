"""A run that was killed goes on from its newest checkpoint, bit for bit."""

from pathlib import Path

import pytest

from ddprun.checkpoint.folder import steps_in
from tests.checkpoint.runs import CNN, MLP, check, prepare, run
from tests.engine.running import lines, summary
from tests.ranks import ddprun

SYNCS = [
    "every_step",
    "{local_sgd: {every: 4, optimizer_state: average}}",
    "{hierarchical_sgd: {within: 1, across: 4, hosts: HOSTS}}",
    "{hierarchical_sgd: {within: 2, across: 4, hosts: HOSTS}}",
    "{diloco: {every: 4, fragments: 2, overlap_steps: 3}}",
    "{average: {every: 4}}",
    "{broadcast: {every: 4}}",
    "independent",
]
HOOKS = [
    "[]",
    "[fp16]",
    "[int8]",
    "[{topk: {density: 0.1}}]",
    "[{powersgd: {rank: 2}}]",
    "[{hierarchical: {hosts: HOSTS, across: [int8]}}]",
]
HIERARCHICAL = "[{hierarchical: {hosts: 2, across: [int8]}}]"


@pytest.mark.parametrize(
    ("sync", "hooks", "ranks", "model", "precision"),
    [
        ("every_step", "[{powersgd: {rank: 2}}, int8]", 3, MLP, "fp16"),
        ("{local_sgd: {every: 4, optimizer_state: average}}", "[{topk: {density: 0.1}}]", 2, CNN, "fp32"),
        ("{hierarchical_sgd: {within: 2, across: 4, hosts: 2}}", HIERARCHICAL, 4, MLP, "fp32"),
        ("{diloco: {every: 4, fragments: 2, overlap_steps: 3}}", "[int8]", 3, MLP, "bf16"),
        ("{broadcast: {every: 4}}", "[]", 2, CNN, "fp32"),
        ("independent", "[]", 2, MLP, "fp32"),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(
    tmp_path: Path, sync: str, hooks: str, ranks: int, model: str, precision: str
) -> None:
    """A rank is killed at a random sample; every final tensor of every rank is that of the unbroken run."""
    check(tmp_path, ranks, sync, hooks, model, precision)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("sync", SYNCS)
def test_every_policy_with_every_hook_goes_on_bit_for_bit(
    tmp_path: Path, sync: str, hooks: str, ranks: int
) -> None:
    """All of them, on 2, 3 and 4 ranks."""
    hosts = str(ranks if ranks % 2 else 2)
    check(tmp_path, ranks, sync.replace("HOSTS", hosts), hooks.replace("HOSTS", hosts))


@pytest.mark.parametrize(
    ("sync", "hooks", "after"),
    [
        ("every_step", "[int8]", 2),
        ("{diloco: {every: 3, overlap_steps: 2}}", "[{topk: {density: 0.1}}]", 3),
        ("{local_sgd: {every: 3}}", HIERARCHICAL, 2),
    ],
)
def test_another_number_of_ranks_goes_on(tmp_path: Path, sync: str, hooks: str, after: int) -> None:
    """Each sample of the epoch counts once, whoever has seen it."""
    prepare(tmp_path, sync, hooks)
    (tmp_path / "kill").write_text("3 43")  # in the second epoch of the second stage
    run_dir = run(tmp_path, 4, may_die=True)
    (tmp_path / "kill").unlink()
    checkpoint = steps_in(run_dir / "checkpoints")[0]
    assert checkpoint in (6, 9)
    run(tmp_path, after, resuming=True)
    done = summary(run_dir)
    assert done["status"] == "done"
    assert done["world_size"] == after
    assert done["samples"] == 3 * 61, "one epoch in the first stage, two in the second"
    before = sum(line["samples"] for line in lines(run_dir, "steps") if line["step"] <= checkpoint)
    assert (
        sum(line["samples"] for line in lines(run_dir, "steps") if line["step"] > checkpoint) == 183 - before
    )
    assert done["loss"] < 2.3


def test_independent_replicas_cannot_change_their_number(tmp_path: Path) -> None:
    """There are as many as there were ranks; the fault says so and exits with 2."""
    prepare(tmp_path, "independent", "[]")
    (tmp_path / "kill").write_text("1 70")
    run(tmp_path, 2, may_die=True)
    (tmp_path / "kill").unlink()
    done = ddprun("resume", "run", "--nproc-per-node=3", cwd=tmp_path)
    assert done.code == 2, done.stderr
    assert "its ranks train independently, so another number of ranks cannot go on with it" in done.stderr
