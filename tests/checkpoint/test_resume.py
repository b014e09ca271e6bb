"""A run that was killed goes on from its newest checkpoint, bit for bit."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from ddprun.checkpoint import folder as checkpoints
from ddprun.checkpoint.folder import steps_in
from ddprun.cli import main
from ddprun.config import load
from ddprun.plugins import SYNC_POLICIES
from tests.checkpoint.runs import (
    CNN,
    COMPARED,
    MLP,
    MODULE,
    PIPELINE,
    as_rank,
    asked,
    check,
    final,
    prepare,
    run,
)
from tests.engine.running import events, lines, run_to_end, summary, weights
from tests.ranks import Running, as_processes, ddprun

SYNCS = [
    "every_step",
    "{local_sgd: {every: 4, optimizer_state: average}}",
    "{hierarchical_sgd: {within: 1, across: 4, hosts: HOSTS}}",
    "{hierarchical_sgd: {within: 2, across: 4, hosts: HOSTS}}",
    "{diloco: {every: 4, fragments: 2, overlap_steps: 3}}",
    "{average: {every: 4}}",
    "{broadcast: {every: 4}}",
    "{gossip: {every: 2}}",
    "independent",
]
HOOKS = [
    "[]",
    "[fp16]",
    "[int8]",
    "[{topk: {density: 0.1}}]",
    "[{powersgd: {rank: 2}}]",
    "[{hierarchical: {hosts: HOSTS, across: [int8]}}]",
    "[{topk: {density: 0.1, chunk: 128, values: int2, decay: 0.9}}]",
    "[{auto_bits: {floor: 0.9, every: 2}}]",
]
MIXED = "{diloco: {every: 4, fragments: 2, overlap_steps: 3, alpha: 0.5, outer: adam, outer_lr: 0.01}}"
HIERARCHICAL = "[{hierarchical: {hosts: 2, across: [int8]}}]"


@pytest.mark.parametrize(
    ("sync", "hooks", "ranks", "model", "precision"),
    [
        ("every_step", "[{powersgd: {rank: 2}}, int8]", 3, MLP, "fp16"),
        ("{local_sgd: {every: 4, optimizer_state: average}}", "[{topk: {density: 0.1}}]", 2, CNN, "fp32"),
        ("{hierarchical_sgd: {within: 2, across: 4, hosts: 2}}", HIERARCHICAL, 4, MLP, "fp32"),
        (MIXED, "[int8]", 3, MLP, "bf16"),
        ("{gossip: {every: 2}}", "[]", 4, MLP, "fp32"),
        ("{diloco: {every: 3}}", HOOKS[-2], 2, MLP, "fp32"),
        ("every_step", HOOKS[-1], 2, MLP, "fp16"),
        ("{broadcast: {every: 4}}", "[]", 2, CNN, "fp32"),
        ("independent", "[]", 2, MLP, "fp32"),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(
    tmp_path: Path, sync: str, hooks: str, ranks: int, model: str, precision: str
) -> None:
    """A rank is killed at a random sample, amid a round where a policy has one; every final tensor of every
    rank is that of the unbroken run.
    """
    check(tmp_path, ranks, sync, hooks, model, precision, after=None if sync == "every_step" else 9)


def test_no_policy_is_left_out() -> None:
    """Of those that are broken off here."""
    read = [yaml.safe_load(sync.replace("HOSTS", "2")) for sync in SYNCS]
    assert {one if isinstance(one, str) else next(iter(one)) for one in read} == {
        *SYNC_POLICIES.built_in_names()
    }


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
        ("every_step", HOOKS[-1], 3),
        ("{diloco: {every: 3, overlap_steps: 2}}", "[{topk: {density: 0.1}}]", 3),
        ("{local_sgd: {every: 3}}", HIERARCHICAL, 2),
    ],
)
def test_another_number_of_ranks_goes_on(tmp_path: Path, sync: str, hooks: str, after: int) -> None:
    """Each sample of the epoch counts once, whoever has seen it."""
    prepare(tmp_path, sync, hooks)
    (tmp_path / "kill").write_text("3 42")  # in the second epoch of the second stage
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


SCALED = """

class Scaled(torch.nn.Module):
    \"\"\"As CLIP's `logit_scale`: a parameter of one element.\"\"\"

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.logit_scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.logit_scale.exp() * self.layer(x.flatten(1))
"""
APART = """
model: samples.Scaled
data: {train: samples.Samples}
loader: {batch_size: 2}
optimizer: {sgd: {lr: 0.1}}
sync: {local_sgd: {every: 5}}
checkpoint: {every: 3, keep: 2}
stages:
  - train: {steps: 20}
  - save
"""


def test_another_number_of_ranks_begins_from_the_mean_of_every_parameter(tmp_path: Path) -> None:
    """Of one element, too. A learning rate of 0 shows what the resumed run has begun from."""
    (tmp_path / "samples.py").write_text(MODULE + SCALED)
    (tmp_path / "p.yaml").write_text(APART)
    (tmp_path / "kill").write_text(f"0 {24 + COMPARED}")
    run_dir = run(tmp_path, 3, may_die=True)
    (tmp_path / "kill").unlink()
    newest = checkpoints.open_checkpoint(run_dir / "checkpoints", steps_in(run_dir / "checkpoints")[0])
    own = [checkpoints.read_part(newest, checkpoints.rank_part_name(rank))["parameters"] for rank in range(3)]
    assert len({float(one["logit_scale"]) for one in own}) == 3, "the ranks are apart"
    (tmp_path / "p.yaml").write_text(APART.replace("lr: 0.1", "lr: 0.0"))
    run(tmp_path, 2, resuming=True)
    saved = weights(run_dir)
    for name in own[0]:
        mean = torch.stack([one[name] for one in own]).double().mean(0).float()
        assert torch.equal(saved[name], mean), name


IN_FLIGHT = """
model: {mlp: {inputs: 64, outputs: 10}}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.1}}
schedule: {MultiStepLR: {milestones: [4], gamma: 0.0}}
sync: {diloco: {every: 4, overlap_steps: 2, outer: sgd, outer_lr: 1.0, outer_momentum: 0.0}}
hooks: [{topk: {density: 0.1}}]
checkpoint: {every: 5, keep: 99}
stages: [{train: {steps: 60}}, save]
"""


@pytest.mark.parametrize("after", [1, 3])
def test_on_another_number_of_ranks_what_is_in_flight_counts_once(tmp_path: Path, after: int) -> None:
    """Of what ranks learn before the learning rate is 0, a part is in flight and the rest in residuals."""
    run_dir = run_with_checkpoint_of_step_5(tmp_path)
    expected = weights(run_dir)
    codes, said = run_to_end(tmp_path, IN_FLIGHT, after, resuming=True)
    assert codes == [0] * after, said
    assert "resuming after step 5" in said
    for name, value in weights(run_dir).items():
        assert torch.allclose(value, expected[name], rtol=0, atol=1e-6), name


def run_with_checkpoint_of_step_5(folder: Path) -> Path:
    """A run to its end, of which no later checkpoint is left."""
    codes, said = run_to_end(folder, IN_FLIGHT, 2)
    assert codes == [0, 0], said
    for step in steps_in(folder / "run" / "checkpoints"):
        if step > 5:
            shutil.rmtree(folder / "run" / "checkpoints" / checkpoints.checkpoint_name(step))
    return folder / "run"


def test_what_is_in_flight_at_a_checkpoint_is_recorded_and_counted_once(tmp_path: Path) -> None:
    """The records, and what the summary says was sent, are those of the unbroken run."""
    run_dir = run_with_checkpoint_of_step_5(tmp_path)
    before = sent(run_dir)
    assert min(step for _, step, _ in before) == 5, "the checkpoint waits for the first exchange"
    codes, said = run_to_end(tmp_path, IN_FLIGHT, 2, resuming=True)
    assert codes == [0, 0], said
    assert sent(run_dir) == before


def sent(run_dir: Path) -> list[tuple[int, int, int]]:
    """Of each record of a bucket its rank, its step and its bytes, which are those of the summary."""
    found = sorted((one["rank"], one["step"], one["wire_bytes"]) for one in lines(run_dir, "buckets"))
    assert summary(run_dir)["wire_bytes"] == sum(wire_bytes for *_, wire_bytes in found)
    return found


SUM = """
import torch


class Sum(torch.nn.Module):
    \"\"\"Every gradient is 1. They are complete in the opposite order of the parameters.\"\"\"

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(8, 1 + n) for n in range(4))

    def forward(self, images, labels):
        return sum(part.sum() for part in self.parts)
"""
SHARES_OF_BUCKETS = """
model: sums.Sum
data: digits
loss: model
optimizer: {sgd: {lr: 1.0}}
hooks: [{hierarchical: {hosts: 2, across: [{topk: {density: 0.1, chunk: 64}}]}}]
ddp: {bucket_cap_mb: 0.0002, find_unused_parameters: FIND}
stages: [{train: {steps: STEPS}}]
"""


def test_other_buckets_lose_no_residual(tmp_path: Path) -> None:
    """Each rank keeps the residuals of its share of a bucket. What a step adds to them, or moves the weights
    by, is its gradient.
    """
    (tmp_path / "sums.py").write_text(SUM)
    totals = []
    for steps, find in ((2, "false"), (3, "true")):
        text = SHARES_OF_BUCKETS.replace("STEPS", str(steps)).replace("FIND", find)
        codes, said = run_to_end(tmp_path, text, 4, resuming=steps > 2)
        assert codes == [0] * 4, said
        root = tmp_path / "run" / "checkpoints"
        newest = checkpoints.open_checkpoint(root, steps)
        total = {
            name: -value.flatten()
            for name, value in checkpoints.read_part(newest, "shared")["parameters"].items()
        }
        for rank in range(4):
            own = checkpoints.read_part(newest, checkpoints.rank_part_name(rank))
            [hooks] = [one for one in own["hooks"].values() if one]
            for key, piece in hooks["hierarchical"]["across"]["topk"].items():
                if (values := piece.get("residual")) is not None:  # else another rank has claimed it
                    total[key.partition("/")[2]][piece["start"] :][: len(values)] += values
        totals.append(total)
    for name, before in totals[0].items():
        assert torch.allclose(totals[1][name], before + 1), name


def test_independent_replicas_cannot_change_their_number(tmp_path: Path) -> None:
    """There are as many as there were ranks; the fault says so and exits with 2."""
    prepare(tmp_path, "independent", "[]")
    (tmp_path / "kill").write_text("1 70")
    run(tmp_path, 2, may_die=True)
    (tmp_path / "kill").unlink()
    done = ddprun("resume", "run", "--nproc-per-node=3", cwd=tmp_path)
    assert done.code == 2, done.stderr
    assert "its ranks train independently, so another number of ranks cannot resume it" in done.stderr


def test_independent_replicas_of_different_speed_stop_at_one_step_and_go_on(tmp_path: Path) -> None:
    """The one that the control messages give, though ranks exchange nothing else."""
    module = MODULE.replace("time.sleep(0.005)", "time.sleep(0.01 * (1 + RANK))")
    (tmp_path / "samples.py").write_text(module)
    text = PIPELINE.replace("MODEL", MLP).replace("SYNC", "independent").replace("HOOKS", "[]")
    text = text.replace("PRECISION", "fp32").replace("every: 3, ", "")
    (tmp_path / "p.yaml").write_text(text.replace("epochs: 2", "steps: 120"))
    with Running("p.yaml", "--run-dir=run", "--nproc-per-node=2", cwd=tmp_path) as running:
        slower = tmp_path / "run" / "steps" / "rank-00001.jsonl"
        for _ in range(600):
            if slower.exists() and slower.read_bytes().count(b"\n") > 12:
                break
            time.sleep(0.1)
        else:
            pytest.fail("no records after a minute")
        os.killpg(running.process.pid, signal.SIGINT)
        assert running.wait(60).code == 130
    stopped = [max(steps) for steps in steps_of(tmp_path / "run")]
    assert 4 < stopped[1] == stopped[0] < 124
    done = ddprun("resume", "run", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert steps_of(tmp_path / "run") == [list(range(1, 125))] * 2


def steps_of(run_dir: Path) -> list[list[int]]:
    """The steps that each of two ranks has recorded."""
    found = lines(run_dir, "steps")
    return [[line["step"] for line in found if line["rank"] == rank] for rank in range(2)]


def test_checkpoints_change_nothing(tmp_path: Path) -> None:
    """Taken amid the rounds of local SGD: every rank's losses, and the means that ranks tell each other."""
    found = []
    for name, every in (("with", "every: 3"), ("without", "every: 0")):
        prepare(tmp_path / name, "{local_sgd: {every: 4}}", "[int8]")
        file = tmp_path / name / "p.yaml"
        file.write_text(file.read_text().replace("every: 3", every))
        run_dir = run(tmp_path / name, 2)
        told = [(one["rank"], one["step"], one["loss"], one["mean_loss"]) for one in lines(run_dir, "steps")]
        found.append(sorted(told, key=lambda one: one[:2]))
    assert found[0] == found[1]
    assert len([mean for *_, mean in found[0] if mean is not None]) > 8


@pytest.mark.parametrize(
    ("sync", "hooks", "precision"),
    [("every_step", "[{topk: {density: 0.1}}]", "fp16"), ("{diloco: {every: 3}}", "[int8]", "fp32")],
)
def test_a_finished_run_that_gets_more_stages_is_as_if_it_had_had_them(
    tmp_path: Path, sync: str, hooks: str, precision: str
) -> None:
    """The last checkpoint has what a stage leaves to the next: momentum, residuals, place in the data."""
    whole, later = tmp_path / "whole", tmp_path / "later"
    loss = "loss: samples.loud\n" if precision == "fp16" else ""
    more = "  - train: {steps: 7, sync: every_step}\n  - save: {to: again.safetensors}\n"
    prepare(whole, sync, hooks, precision=precision)
    with (whole / "p.yaml").open("a") as file:
        file.write(more + loss)
    expected = final(run(whole, 2))
    skipped = [event["step"] for event in events(whole / "run") if event["event"] == "step_skipped"]
    assert bool(skipped) == (precision == "fp16"), "the loss scale has changed"
    prepare(later, sync, hooks, precision=precision)
    text = (later / "p.yaml").read_text()
    (later / "p.yaml").write_text(text + loss)
    first = final(run(later, 2))
    (later / "p.yaml").write_text(text + more + loss)
    assert final(run(later, 2, resuming=True)) == expected != first


OPTIONS = """
model: {mlp: {inputs: 64, outputs: 10}}
data: digits
loader: {batch_size: 16}
optimizer: OPTIMIZER
stages: [STAGES]
"""


@pytest.mark.parametrize(
    ("optimizer", "option"),
    [("adamw", "amsgrad: true"), ("rmsprop", "momentum: 0.9"), ("rmsprop", "centered: true")],
)
def test_an_option_of_the_optimizer_that_needs_more_state_may_come_later(
    tmp_path: Path, optimizer: str, option: str
) -> None:
    """With a stage, or with a resume between two stages or in the middle of one: the same bits."""
    plain, changed = f"{{{optimizer}: {{lr: 0.01}}}}", f"{{{optimizer}: {{lr: 0.01, {option}}}}}"
    first = "train: {steps: 4}"
    both = f"{first}, train: {{steps: 5, optimizer: {changed}}}, save"
    found = {}
    for name, runs in {
        "as it was": [(plain, "train: {steps: 9}, save")],
        "a stage": [(plain, both)],
        "resumed": [(plain, first), (plain, both)],
        "resumed in it": [(plain, first), (changed, "train: {steps: 9}, save")],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        for number, (chosen, wanted) in enumerate(runs):
            text = OPTIONS.replace("OPTIMIZER", chosen).replace("STAGES", wanted)
            codes, said = run_to_end(folder, text, 1, resuming=number > 0)
            assert codes == [0], said
        saved = weights(folder / "run")
        found[name] = [value.numpy().tobytes() for value in saved.values()]
    assert found["as it was"] != found["a stage"] == found["resumed"] == found["resumed in it"]


def test_a_stage_that_is_done_cannot_become_another(tmp_path: Path) -> None:
    """Even though it is the last one that took steps, and could be made longer."""
    prepare(tmp_path, "every_step", "[]")
    run_dir = run(tmp_path, 1)
    pipeline = run_dir / "pipeline.yaml"
    text = pipeline.read_text()
    was = "- train:  # line 16\n      epochs: 2"
    assert was in text
    pipeline.write_text(text.replace(was, "- forward:\n      epochs: 3"))
    done = ddprun("resume", "run", cwd=tmp_path)
    assert done.code == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "these stages are done, or have begun" in done.stderr


def test_a_schedule_that_cannot_be_followed_to_here_damages_no_checkpoint(tmp_path: Path) -> None:
    """Another schedule, in the middle of a stage, which is over before the step of the kill. A
    stage that is shorter now is over.
    """
    prepare(tmp_path, "every_step", "[]")
    (tmp_path / "kill").write_text("1 70")
    run(tmp_path, 2, may_die=True)
    (tmp_path / "kill").unlink()
    file = tmp_path / "p.yaml"
    file.write_text(file.read_text().replace("{max_lr: 0.02}", "{max_lr: 0.02, total_steps: 2}"))
    done = ddprun("p.yaml", "--run-dir=run", "--or-resume", "--nproc-per-node=2", cwd=tmp_path)
    assert done.code == 2
    assert "it ends after step 2 of" in done.stderr
    assert "damaged" not in done.stderr
    file.write_text(file.read_text().replace(", total_steps: 2", "").replace("epochs: 2", "steps: 4"))
    done = ddprun("p.yaml", "--run-dir=run", "--or-resume", "--nproc-per-node=2", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert [stage.get("steps") for stage in summary(tmp_path / "run")["stages"]][:2] == [4, 11]


SHORT = """
import torch


class Short(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        if self.last_epoch > 1:
            raise ValueError("it is over")
        return self.base_lrs
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has come to its end."""
    folder = tmp_path_factory.mktemp("finished")
    prepare(folder, "every_step", "[]")
    (folder / "short.py").write_text(SHORT)
    run(folder, 2)
    return folder


def contents(run_dir: Path) -> dict[str, bytes]:
    """What a run came to; events are history, whatever becomes of an attempt."""
    found = [*run_dir.glob("*.json"), *run_dir.glob("*.yaml"), *run_dir.glob("[sb]*s/*.jsonl")]
    return {str(file.relative_to(run_dir)): file.read_bytes() for file in found}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("seed=9", 2),
        ("schedule={OneCycleLR: {max_lr: 0.02, total_steps: 2}}", 2),
        ("schedule=short.Short", 1),
    ],
)
def test_a_refused_resume_changes_nothing(tmp_path: Path, finished: Path, change: str, code: int) -> None:
    """Neither the pipeline, the summary nor the records, though steps would have been repeated: before the
    checkpoint's state is read, when the stage begins in whose middle it was taken, and when its schedule is
    followed to there.
    """
    run_dir = Path(shutil.copytree(finished, tmp_path / "again")) / "run"
    shutil.rmtree(run_dir / "checkpoints" / checkpoints.checkpoint_name(steps_in(run_dir / "checkpoints")[0]))
    before = contents(run_dir)
    assert {"summary.json", "steps/rank-00001.jsonl", "buckets/rank-00000.jsonl"} <= before.keys()
    done = ddprun("resume", "run", f"--set={change}", cwd=run_dir.parent)
    assert done.code == code, done.stderr
    assert contents(run_dir) == before
    run(run_dir.parent, 2, resuming=True)
    assert contents(run_dir).keys() == before.keys()


def test_what_a_resume_has_changed_stays_so(tmp_path: Path, finished: Path) -> None:
    """For the next one, which gets no option."""
    run_dir = Path(shutil.copytree(finished, tmp_path / "again")) / "run"
    longer = "--set=stages[1].train.epochs=3", "--set=optimizer.adamw.lr=0.005"
    for options in (longer, ()):
        done = ddprun("resume", "run", *options, cwd=run_dir.parent)
        assert done.code == 0, done.stderr
        assert done.stderr.count("in the checkpoint") == len(options)
        ran = load(run_dir / "pipeline.yaml", (), run_dir.parent).as_dict()
        assert ran["stages"][1]["train"]["epochs"] == 3
        assert ran["optimizer"] == {"AdamW": {"lr": 0.005}}
    assert "nothing is left to do" in done.stderr


def test_a_project_that_has_moved_goes_on_at_its_new_place(tmp_path: Path, finished: Path) -> None:
    """The message says how, and afterwards the run knows the place."""
    new = Path(shutil.copytree(finished, tmp_path / "new"))
    about = json.loads((new / "run" / "run.json").read_text())
    about["pipeline_folder"] = str(tmp_path / "old")
    (new / "run" / "run.json").write_text(json.dumps(about))
    done = ddprun("resume", "run", cwd=new)
    assert done.code == 2, done.stderr
    again = "if it has moved, resume with ddprun PIPELINE --run-dir run --or-resume"
    assert f"then in {tmp_path / 'old'}, which is gone: {again}" in done.stderr
    run(new, 2, resuming=True)
    done = ddprun("resume", "run", cwd=new)
    assert done.code == 0, done.stderr


def blind_in_rank_0(folder: Path, run_dir: Path) -> int:
    """As where rank 0 is now on a host that does not have the disk with the checkpoints."""
    os.dup2(os.open(folder / f"told-{os.environ['RANK']}", os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
    if os.environ["RANK"] == "0":
        open_checkpoint = checkpoints.open_checkpoint
        checkpoints.steps_in = lambda root: []
        checkpoints.open_checkpoint = lambda root, step: open_checkpoint(root / "elsewhere", step)
    return as_rank(folder, run_dir, True)


def test_rank_0_has_to_see_the_checkpoints_that_others_see(tmp_path: Path, finished: Path) -> None:
    """Starting anew would lose them."""
    folder = Path(shutil.copytree(finished, tmp_path / "again"))
    before = steps_in(folder / "run" / "checkpoints")
    as_processes(2, blind_in_rank_0, folder, folder / "run", cwd=folder, may_die=True)
    told = "".join(file.read_text() for file in folder.glob("told-*"))
    assert told.count(f"can be used by all ranks; that of step {before[0]}: ") == 1, told
    assert "manifest.json cannot be read: No such file or directory" in told
    assert "Traceback" not in told
    assert steps_in(folder / "run" / "checkpoints") == before


def test_a_checkpoint_that_is_asked_for_in_a_stages_last_step_is_taken(tmp_path: Path) -> None:
    """All ranks agree on it, and no step of the stage is left in which they could hear of it."""
    prepare(tmp_path, "every_step", "[]")
    text = (tmp_path / "p.yaml").read_text().replace("every: 3, keep: 2", "every: 0, keep: 9")
    (tmp_path / "p.yaml").write_text(text)
    (tmp_path / "kill").write_text(f"1 18 {signal.SIGUSR1.value}")
    run_dir = run(tmp_path, 2)
    looked = len(asked(tmp_path, 1)) - 2 * 31 - 16
    assert 3 * 4 < 18 - looked <= 4 * 4, "the signal comes in another step"
    assert 4 in steps_in(run_dir / "checkpoints")


def test_seconds_count_the_whole_run_after_a_resume(tmp_path: Path, finished: Path) -> None:
    """As those in steps do: where nothing is left to do, what was spent before is more than its steps."""
    again = Path(shutil.copytree(finished, tmp_path / "again"))
    before = summary(again / "run")
    run(again, 2, resuming=True)
    after = summary(again / "run")
    assert after["seconds_in_steps"] == before["seconds_in_steps"]
    assert after["seconds"] > after["seconds_in_steps"]


def test_one_command_starts_a_run_and_goes_on_with_it(tmp_path: Path) -> None:
    """As a container's that is started again: the second time it ends as an unbroken run does."""
    prepare(tmp_path, "every_step", "[]")
    command = ("run", "p.yaml", "--run-dir=run", "--or-resume", "--nproc-per-node=2")
    (tmp_path / "kill").write_text("1 70")
    assert ddprun(*command, cwd=tmp_path).code == 1
    (tmp_path / "kill").unlink()
    done = ddprun(*command, cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert "resuming after step" in done.stderr
    whole = ddprun("p.yaml", "--run-dir=whole", "--nproc-per-node=2", cwd=tmp_path)
    assert whole.code == 0, whole.stderr
    assert final(tmp_path / "run") == final(tmp_path / "whole")


def test_a_run_that_may_be_there_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Or each start would make a new one."""
    assert main(["run", "p.yaml", "--or-resume"]) == 2
    assert "--or-resume needs --run-dir" in capsys.readouterr().err
