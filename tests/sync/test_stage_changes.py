"""Stages that change policy, hooks, buffers and optimizer in mid-run, and lose nothing."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ddprun.cli import main
from ddprun.config import load
from ddprun.engine.hook_stacks import build_hook_stacks
from tests.engine.running import events, lines, run_pipeline, summary, weights
from tests.ranks import Running, ddprun
from tests.sync.reference import STEPS_PER_EPOCH, World, pipeline

HEAD = """
model:
  mlp: {inputs: 64, hidden: [32], outputs: 10}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.05, momentum: 0.9}}
"""


def staged(folder: Path, stages: str, *, ranks: int = 3, momentum: float = 0.0, more: str = "") -> Path:
    text = pipeline(folder, more, momentum=momentum)
    head, _, _ = text.partition("stages:")
    return run_pipeline(folder, f"{head}stages:\n{stages}  - save\n", ranks)


def assert_close(run: Path, world: World) -> None:
    ours = weights(run)
    for name, value in world.weights().items():
        assert (ours[name] - value).abs().max() <= 1e-12, name


def average_gradients(world: World, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        world.local_step(step, average=[range(3)])


def test_policies_change_from_stage_to_stage(tmp_path: Path) -> None:
    """Plain DDP, apart and broadcast, apart and averaged, local, plain again: weights, momentum and the order
    of samples go on. Momentum gathered apart is averaged before plain steps, or ranks would drift under them.
    """
    stages = (
        "  - train: {steps: 3}\n"
        "  - train: {steps: 4, sync: independent}\n"
        "  - broadcast: {source: 1}\n"
        "  - train: {steps: 4, sync: independent}\n"
        "  - average\n"
        "  - train: {steps: 5, sync: {local_sgd: {every: 2}}}\n"
        "  - train: {steps: 3}\n"
    )
    run = staged(tmp_path, stages, momentum=0.9, more="audit: {every: 1}")
    world = World(3, momentum=0.9)
    average_gradients(world, 0, 3)
    for step in range(3, 7):
        world.local_step(step)
    for rank in range(3):
        world.set(rank, world.flat(1))
    for step in range(7, 11):
        world.local_step(step)
    world.average(range(3))
    for step in range(11, 16):
        world.local_step(step)
        if step in (12, 14, 15):  # every second, and the end
            world.average(range(3))
    world.average_momentum()
    average_gradients(world, 16, 3)
    assert_close(run, world)
    assert [event["how"] for event in events(run) if event["event"] == "reconciled"] == []
    once = [line for line in lines(run, "buckets") if line["kind"] == "parameters" and line["rank"] == 0]
    assert {(line["stage"], line["step"]) for line in once} == {(2, 7), (4, 11)}


def test_ranks_stay_apart_where_the_next_stage_says_independent(tmp_path: Path) -> None:
    """Two independent stages are one long one; the second ends in the mean."""
    stages = (
        "  - train: {steps: 4, sync: {local_sgd: {every: 3}}}\n  - train: {steps: 4, sync: independent}\n"
    )
    run = staged(tmp_path, stages)
    world = World(3)
    for step in range(8):
        world.local_step(step)
        if step == 2:
            world.average(range(3))
    world.average(range(3))
    assert_close(run, world)
    assert [event["stage"] for event in events(run) if event["event"] == "reconciled"] == [1]


def test_local_steps_never_enter_ddp(tmp_path: Path) -> None:
    """With static_graph, under which `no_sync` breaks DDP: local, then plain steps, are those by hand."""
    stages = (
        "  - train: {steps: 4, sync: {local_sgd: {every: 2}}}\n"
        "  - train: {steps: 4}\n"
        "  - train: {steps: 2, sync: {local_sgd: {every: 2}}}\n"
    )
    run = staged(tmp_path, stages, more="audit: {every: 1}", momentum=0.9)
    world = World(3, momentum=0.9)
    for step in range(4):
        world.local_step(step)
        if step % 2:
            world.average(range(3))
    world.average_momentum()
    average_gradients(world, 4, 4)
    for step in range(8, 10):
        world.local_step(step)
    world.average(range(3))
    assert_close(run, world)
    static = (
        (tmp_path / "run.yaml")
        .read_text()
        .replace("bucket_cap_mb: 1", "bucket_cap_mb: 1, static_graph: true")
    )
    again = run_pipeline(tmp_path, static, 3, "static")
    for name, value in weights(run).items():
        assert torch.equal(weights(again)[name], value), name


def test_a_stage_may_change_the_optimizers_settings_and_keeps_its_state(tmp_path: Path) -> None:
    """Another learning rate and momentum; the momentum buffer goes on."""
    stages = (
        "  - train: {steps: 5}\n"
        "  - train: {steps: 5, optimizer: {sgd: {lr: 0.01, momentum: 0.5}}}\n"
        "  - train: {steps: 5}\n"
    )
    run = staged(tmp_path, stages, momentum=0.9)
    world = World(3, momentum=0.9)
    for first, lr, momentum in ((0, 0.1, 0.9), (5, 0.01, 0.5), (10, 0.1, 0.9)):
        for optimizer in world.optimizers:
            optimizer.param_groups[0].update(lr=lr, momentum=momentum)
        average_gradients(world, first, 5)
    assert_close(run, world)


def test_outer_momentum_and_residuals_go_from_stage_to_stage(tmp_path: Path) -> None:
    """DiLoCo in two stages of whole periods is DiLoCo in one, bit for bit, a lossy hook's residual included;
    with another density in the second stage the residual is taken over, too.
    """
    more = "hooks: [{topk: {density: 0.1}}]\nsync: {diloco: {every: 3}}"
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = weights(staged(tmp_path / "one", "  - train: {steps: 12}\n", more=more))
    two = weights(staged(tmp_path / "two", "  - train: {steps: 6}\n  - train: {steps: 6}\n", more=more))
    for name, value in one.items():
        assert torch.equal(two[name], value), name


@pytest.mark.parametrize("last", ["adam", "nesterov"])
def test_momentum_of_another_outer_optimizer_is_left(tmp_path: Path, last: str) -> None:
    """Also where a bucket has some of each kind: of a stage that froze a part, and of the one before."""
    more, outer = "", "{diloco: {every: 2, outer: OUTER, outer_lr: 0.01}}"
    text = pipeline(tmp_path, more).split("stages:")[0] + "stages:\n"
    for kind, freeze in (("nesterov", "[]"), ("adam", "['1.*', '3.*']"), (last, "[]")):
        text += f"  - train: {{steps: 4, sync: {outer.replace('OUTER', kind)}, freeze: {freeze}}}\n"
    done = run_pipeline(tmp_path, text + "  - save\n", 2)
    assert summary(done)["status"] == "done"
    assert all(bool(value.isfinite().all()) for value in weights(done).values())


def test_hooks_of_one_name_hand_over_what_they_kept(tmp_path: Path) -> None:
    """top-k of a tenth, no hooks, top-k of everything: the third stage sends what the first kept."""
    stages = (
        "  - train: {steps: 4, hooks: [{topk: {density: 0.1}}]}\n"
        "  - train: {steps: 1, hooks: []}\n"
        "  - train: {steps: 2, hooks: [{topk: {density: 1.0}}]}\n"
    )
    run = run_pipeline(tmp_path, f"{HEAD}timings: {{fidelity_every: 1}}\nstages:\n{stages}", 2)
    looked = {
        line["step"]: line["fidelity"]
        for line in lines(run, "buckets")
        if line["rank"] == 0 and "fidelity" in line
    }
    assert looked[4]["residual_norm"] > 0
    assert looked[5]["relative_l2"] < 1e-6
    assert looked[6]["relative_l2"] > 0.1, "it brings the residual of the first stage"
    assert looked[7]["relative_l2"] < 1e-6, "and brings it once"


def test_what_ranks_of_a_host_kept_stays_among_them_under_other_options(tmp_path: Path) -> None:
    """Among all ranks it would count once for each host."""
    named = {"old": "int8", "new": "{int8: {block: 512}}"}
    for name, hook in named.items():
        text = f"{HEAD}hooks: [{hook}]\nstages: [train: {{steps: 2}}]\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    among_all, inside = build_hook_stacks(load(tmp_path / "old.yaml")).by_description
    stacks, kept = build_hook_stacks(load(tmp_path / "new.yaml")), {"int8": {"delta/w": {"start": 0}}}
    stacks.load_state_dict({among_all: {}, inside: kept})
    assert stacks.all_ranks[0].state_dict() == {}
    assert stacks.within_hosts[0].state_dict() == kept


@pytest.mark.parametrize("hooks", ["[]", "[int8]"])
def test_uneven_data_counts_every_sample_once(tmp_path: Path, hooks: str) -> None:
    """331 samples on 3 ranks, the last step with 19 of 24, two micro-batches to a step; by every policy."""
    policies = [
        "every_step",
        "{local_sgd: {every: 4}}",
        "{hierarchical_sgd: {within: 1, across: 4, hosts: 1}}",
        "{diloco: {every: 4, fragments: 2, overlap_steps: 2}}",
        "{broadcast: {every: 4}}",
        "independent",
    ]
    stages = "".join(f"  - train: {{epochs: 2, sync: {sync}}}\n" for sync in policies)
    run = staged(tmp_path, stages, more=f"hooks: {hooks}\naccumulate: 2")
    assert summary(run)["samples"] == len(policies) * 662
    trained = [entry["steps"] for entry in summary(run)["stages"] if entry["kind"] == "train"]
    assert trained == [2 * -(-STEPS_PER_EPOCH // 2)] * len(policies)
    for stage in range(len(policies)):
        assert sum(line["samples"] for line in lines(run, "steps") if line["stage"] == stage) == 662


@pytest.mark.parametrize(
    "sync",
    [
        pytest.param("{local_sgd: {every: 50}}", marks=pytest.mark.slow),
        "independent",
        "{diloco: {every: 20, overlap_steps: 9}}",
    ],
)
def test_an_interrupt_ends_every_policy(tmp_path: Path, sync: str) -> None:
    """SIGINT while ranks train apart: exit code 130, a summary that says so, nobody waits for ever."""
    with endless(tmp_path, sync) as running:
        os.killpg(running.process.pid, signal.SIGINT)
        done = running.wait(60)
    assert done.code == 130, done.stderr
    assert summary(tmp_path / "run")["status"] == "interrupted"


def test_an_interrupt_of_one_rank_ends_ranks_that_train_apart(tmp_path: Path) -> None:
    """The others hear of it by messages, and all end after the same step, with a checkpoint."""
    with endless(tmp_path, "independent") as running:
        os.kill(running.ranks()[1], signal.SIGINT)
        done = running.wait(60)
    assert summary(tmp_path / "run")["status"] == "interrupted", done.stderr
    steps = list(lines(tmp_path / "run", "steps"))
    last = [max(line["step"] for line in steps if line["rank"] == rank) for rank in range(3)]
    assert last == [summary(tmp_path / "run")["steps"]] * 3
    assert (tmp_path / "run" / "checkpoints" / f"step-{last[0]:08}").is_dir()


@contextmanager
def endless(folder: Path, sync: str) -> Iterator[Running]:
    """A run that does not end by itself, all ranks of which have recorded steps."""
    (folder / "p.yaml").write_text(f"{HEAD}sync: {sync}\nstages: [{{train: {{steps: 100000000}}}}]\n")
    with Running("p.yaml", "--run-dir", "run", "--nproc-per-node", "3", cwd=folder) as running:
        for _ in range(600):
            steps = list((folder / "run" / "steps").glob("rank-*.jsonl"))
            if len(steps) == 3 and min(file.stat().st_size for file in steps) > 20_000:
                break
            time.sleep(0.1)
        yield running


def test_settings_that_only_a_run_can_see_are_faults_of_the_file(tmp_path: Path) -> None:
    """A source that is no rank and more fragments than parameters, both at once, with their places."""
    train = "{steps: 9, sync: {diloco: {every: 8, fragments: 5}}}"
    text = f"{HEAD}stages:\n  - train: {train}\n  - broadcast: {{source: 3}}\n"
    (tmp_path / "p.yaml").write_text(text)
    done = ddprun("p.yaml", "--nproc-per-node", "2", cwd=tmp_path)
    assert done.code == 2
    assert "stages[0].train.sync.diloco.fragments: 5 fragments of 4 trained parameters" in done.stderr
    assert "stages[1].broadcast.source: there is no rank 3: the run has 2 ranks" in done.stderr
    assert "Traceback" not in done.stderr


def test_torchs_detailed_debugging_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends in a segmentation fault in every run with DDP."""
    (tmp_path / "p.yaml").write_text(f"{HEAD}stages: [{{train: {{steps: 1}}}}]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "detail")
    assert main(["p.yaml"]) == 2
    assert capsys.readouterr().err.startswith("ddprun: TORCH_DISTRIBUTED_DEBUG=DETAIL makes every run")


def test_fp16_loss_scaling_works_where_ranks_train_apart(tmp_path: Path) -> None:
    """Each rank has a scale of its own; gradients are unscaled before they are used."""
    text = (
        f"{HEAD}precision: fp16\nsync: {{local_sgd: {{every: 4}}}}\n"
        "stages:\n  - train: {epochs: 6}\n  - evaluate: {metrics: [accuracy]}\n"
    )
    run = run_pipeline(tmp_path, text, 2)
    assert summary(run)["metrics"]["accuracy"] > 0.9


def test_forward_passes_alone_settle_batchnorm(tmp_path: Path) -> None:
    """A forward stage without an update changes no weight, and moves the running statistics."""
    text = (
        "model: {cnn: {channels: [4]}}\ndata: digits\nloader: {batch_size: 8}\n"
        "optimizer: {sgd: {lr: 0.05}}\nstages:\n  - train: {steps: 3}\n  - save: {to: before.safetensors}\n"
        "  - forward: {steps: 20}\n  - save\n"
    )
    run = run_pipeline(tmp_path, text, 2)
    before, after = load_file(run / "before.safetensors"), weights(run)
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert not torch.equal(before["1.running_mean"], after["1.running_mean"])
    assert after["1.num_batches_tracked"] == 23
    assert summary(run)["steps"] == 23
