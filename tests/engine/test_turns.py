"""Turns and stages that freeze: as hand-written DDP loops, bit for bit; with hooks, policies and kills."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddprun import EXIT_BAD_INPUT
from ddprun.config import PipelineError, load
from ddprun.explain.explain import explain
from tests.checkpoint.runs import assert_killed_run_ends_alike
from tests.engine.running import events, lines, run_pipeline, run_to_end, summary, weights
from tests.ranks import as_processes

MODULE = """
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), index % 3


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, real, label=None, turn=None):
        real = real.flatten(1)[:, :6]
        fake = self.generator(torch.randn(len(real), 4))
        if turn == "discriminator":
            logits = self.discriminator(torch.cat([real, fake.detach()]))
            wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
            return {"loss": binary_cross_entropy_with_logits(logits, wanted), "logit": logits.mean()}
        logits = self.discriminator(fake)
        return {"loss": binary_cross_entropy_with_logits(logits, torch.ones_like(logits))}


class Net(nn.Sequential):
    def __init__(self, inputs=6):
        parts = nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 10)
        super().__init__(*parts)

    def forward(self, inputs):
        return super().forward(inputs.flatten(1))


class Required(torch.optim.SGD):
    def step(self, closure):
        super().step(closure)


class Wrapped(torch.optim.Optimizer):
    def __init__(self, params, lr):
        self.inner = torch.optim.SGD(params, lr=lr)

    state = property(lambda self: self.inner.state)
    param_groups = property(lambda self: self.inner.param_groups)

    def step(self):
        self.inner.step()

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


class CountsSteps(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            Path(f"steps-{group['initial_lr']}").write_text(str(group["steps"]))
        super().step(closure)


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.discriminator, self.generator = (
            nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)) for _ in range(2)
        )

    def forward(self, real, label, turn="both"):
        if turn == "discriminator" and dist.is_initialized():
            torch.save(self.state_dict(), f"mutated-{dist.get_rank()}.pt")
        parts = {"discriminator": [self.discriminator], "generator": [self.generator]}
        return {"loss": sum(part(real).square().mean() for part in parts.get(turn, [*self.children()]))}


class Deaf(Gan):
    def forward(self, real, label):
        return super().forward(real, turn="generator")


class Strict(Twins):
    def forward(self, real, label, turn):
        part = self.discriminator if turn == "discriminator" else self.generator
        return {"loss": part(real).square().mean()}
"""
PIPELINE = """
seed: 5
model: turn_nets.Gan
data: turn_nets.Samples
loader: {batch_size: 4, drop_last: true}
loss: model
optimizer: {adam: {lr: 0.01, betas: [0.5, 0.9]}}
groups: [{match: "generator.*", lr: 0.02}]
schedule: {LinearLR: {total_iters: 8}}
clip_norm: CLIP
accumulate: ACCUMULATE
hooks: HOOKS
stages:
  - train:
      steps: 10
      turns:
        - {name: discriminator, match: "discriminator.*"}
        - {name: generator, match: ["generator.*"], every: EVERY}
  - save
"""
DATA = "{train: turn_nets.Samples, evaluate: turn_nets.Samples}"
USUAL = {"ACCUMULATE": "1", "HOOKS": "[]", "EVERY": "1", "CLIP": "null"}


def written(folder: Path, **changes: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "turn_nets.py").write_text(MODULE)
    text = PIPELINE
    for name, value in {**USUAL, **changes}.items():
        text = text.replace(name, value)
    return text


def batches_of(data: Any, accumulate: int) -> Iterator[list[Any]]:
    """The micro-batches of each step, as ddprun takes them."""
    sampler: Any = DistributedSampler(data, seed=5, drop_last=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True, generator=torch.Generator())
    for epoch in range(100):
        sampler.set_epoch(epoch)
        batches = list(loader)
        for start in range(0, len(batches), accumulate):
            yield batches[start : start + accumulate]


def gan_by_hand(accumulate: int, every: int, clip_norm: float | None, sgd: bool = False) -> dict[str, Any]:
    """Two modules, each under DDP with an optimizer and a schedule of its own: rank 0's weights. The
    discriminator has Adam, or `sgd`.
    """
    dist.init_process_group("gloo")
    scope: dict[str, Any] = {}
    exec(compile(MODULE, "turn_nets", "exec"), scope)
    torch.manual_seed(5)
    gan = scope["Gan"]()
    bce, parts = nn.functional.binary_cross_entropy_with_logits, (gan.discriminator, gan.generator)
    ddps = [DistributedDataParallel(part, broadcast_buffers=False) for part in parts]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(part.parameters(), lr=lr, betas=(0.5, 0.9))
        for part, lr in zip(parts, (0.01, 0.02), strict=True)
    ]
    if sgd:
        optimizers[0] = torch.optim.SGD(parts[0].parameters(), lr=0.1, momentum=0.9)
    schedules = [torch.optim.lr_scheduler.LinearLR(one, total_iters=8) for one in optimizers]

    def d_loss(real: Tensor) -> Tensor:
        fake = gan.generator(torch.randn(len(real), 4)).detach()
        wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        return bce(ddps[0](torch.cat([real, fake])), wanted)

    def g_loss(real: Tensor) -> Tensor:
        logits = gan.discriminator(ddps[1](torch.randn(len(real), 4)))
        return bce(logits, torch.ones_like(logits))

    state = {name: value.clone() for name, value in gan.state_dict().items()}
    for loss in (d_loss, g_loss):  # leave DDP's first bucket layout behind
        for _ in range(2):
            gan.zero_grad()
            loss(torch.ones(4, 6)).backward()  # type: ignore[no-untyped-call]
    gan.load_state_dict(state)
    gan.zero_grad()
    torch.manual_seed(5 + dist.get_rank())
    for step, batches in enumerate(batches_of(scope["Samples"](), accumulate), start=1):
        for turn, loss in enumerate((d_loss, g_loss)):
            if turn == 1 and step % every:
                continue
            gan.discriminator.requires_grad_(turn == 0)
            for index, (real, _) in enumerate(batches, start=1):
                ddps[turn].require_backward_grad_sync = index == len(batches)
                (loss(real) / len(batches)).backward()  # type: ignore[no-untyped-call]
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(parts[turn].parameters(), clip_norm)
            optimizers[turn].step()
            optimizers[turn].zero_grad()
        for schedule in schedules:
            schedule.step()
        if step == 10:
            break
    return {name: value.detach().numpy() for name, value in gan.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "accumulate", "every", "clip"), [(2, 1, 1, None), (2, 2, 1, 0.01), (3, 1, 3, 0.02)]
)
def test_a_gan_is_bitwise_a_plain_ddp_loop(
    tmp_path: Path, ranks: int, accumulate: int, every: int, clip: float | None
) -> None:
    """Of the learning rates, too: the schedule goes on with each step, whichever turns it takes."""
    changes = {
        "ACCUMULATE": str(accumulate),
        "EVERY": str(every),
        "CLIP": "null" if clip is None else str(clip),
    }
    run = run_pipeline(tmp_path, written(tmp_path, **changes), ranks)
    for name, value in as_processes(ranks, gan_by_hand, accumulate, every, clip)[0].items():
        assert torch.equal(weights(run)[name], torch.from_numpy(value)), name


def test_networks_with_optimizers_of_two_kinds_are_bitwise_a_plain_ddp_loop(tmp_path: Path) -> None:
    """The first one takes its network's biases, too."""
    text = written(tmp_path, CLIP="0.05").replace(
        "{adam: {lr: 0.01, betas: [0.5, 0.9]}}",
        "{sgd: {lr: 0.1, momentum: 0.9}, others: {adam: {lr: 0.02, betas: [0.5, 0.9]}}}",
    )
    both = '{match: "discriminator.*", optimizer: first}, {match: "generator.*", optimizer: others}'
    run = run_pipeline(tmp_path, text.replace('{match: "generator.*", lr: 0.02}', both), 2)
    for name, value in as_processes(2, gan_by_hand, 1, 1, 0.05, True)[0].items():
        assert torch.equal(weights(run)[name], torch.from_numpy(value)), name


def test_records_and_explain_know_both_turns(tmp_path: Path) -> None:
    """Losses, rates and norms of both groups, and the bytes of each turn's own buckets. No number mixes steps
    with and without the generator's turn; the summary, which ends without it, has the last ones known.
    """
    text = written(tmp_path, EVERY="2", CLIP="1.0").replace("steps: 10", "steps: 9")
    run = run_pipeline(tmp_path, text, 2)
    steps = [line for line in lines(run, "steps") if line["rank"] == 0]
    for line in steps:
        values, even = line["mean_values"], line["step"] % 2 == 0
        assert list(values) == ["logit", "discriminator", "generator"]
        assert (values["generator"] is not None) == even
        for means, loss in ((values, line["mean_loss"]), (line["values"], line["loss"])):
            assert loss == (means["discriminator"] + means["generator"] if even else None)
        rates = line["lr"]
        assert rates[0] == pytest.approx(2 * rates[1])
        norms = line["group_grad_norms"]
        assert (norms[0] is not None) == even
        total = sum(norm**2 for norm in norms if norm is not None)
        assert line["grad_norm"] == pytest.approx(total**0.5, rel=1e-5)
    found, (before, last) = summary(run), [line["mean_values"] for line in steps[-2:]]
    assert found["values"] == {**last, "generator": before["generator"]}
    assert found["loss"] == steps[-2]["mean_loss"]
    buckets = [line for line in lines(run, "buckets") if line["rank"] == 0 and line["kind"] == "gradient"]
    of_each = Counter((line["bucket"], line["params"][0].partition(".")[0]) for line in buckets)
    assert of_each == {(0, "discriminator"): 9, (1, "generator"): 4}
    (stage, _) = explain(load(tmp_path / "run.yaml"), hosts=1, ranks_per_host=2).stages
    assert stage.sent_in_stage is not None
    assert stage.sent_in_stage.mean_step_bytes()["per_rank"] == sum(line["wire_bytes"] for line in buckets)


def test_each_turn_steps_its_own_groups_alone(tmp_path: Path) -> None:
    """As an optimizer of its own would; some count their steps in each group."""
    text = written(tmp_path, EVERY="2").replace(
        "{adam: {lr: 0.01, betas: [0.5, 0.9]}}", "{turn_nets.CountsSteps: {lr: 0.01}}"
    )
    run_pipeline(tmp_path, text, 1)
    assert [(tmp_path / f"steps-{lr}").read_text() for lr in (0.01, 0.02)] == ["10", "5"]


def test_what_turns_share_goes_by_the_whole_step(tmp_path: Path) -> None:
    """Networks of one shape; `mutate` changes both; a round of local SGD has the means of the steps that had
    a turn; an evaluation measures what forward gives without one; an earlier stage without turns sends its
    gradients in buckets of its own.
    """
    text = written(tmp_path, EVERY="2").replace("Gan\n", "Twins\n").replace("turn_nets.Samples", DATA, 1)
    more = "mutate: {noise: {std: 0.1}}, evaluate: {every: 4}, sync: {local_sgd: {every: 4}}, steps: 8"
    text = text.replace("steps: 10", more.replace(", ", "\n      "))
    text = text.replace("stages:", "stages:\n  - train: {steps: 2}").replace("hooks: []", "hooks: [int8]")
    run = run_pipeline(tmp_path, text, 2)
    for line in lines(run, "steps"):
        if line["step"] in (6, 10):
            means = line["mean_values"]
            assert line["mean_loss"] == means["discriminator"] + means["generator"]
    evaluated = [one for one in events(run) if one["event"] == "evaluated"]
    assert len(evaluated) == 2
    assert not any({"discriminator", "generator"} & one.keys() for one in evaluated)
    started = next(one for one in events(run) if one["event"] == "started")
    assert [len(one["params"]) for one in started["buckets"]] == [8]
    assert started["groups"] == ["turn generator, generator.*", "turn discriminator"]
    stages = [one["turns"] for one in events(run) if one["event"] == "stage_started"]
    assert stages == [[], ["discriminator", "generator"]]
    mutated = [torch.load(tmp_path / f"mutated-{rank}.pt") for rank in (0, 1)]
    for name, value in mutated[0].items():
        assert not torch.equal(value, mutated[1][name]), name


FREEZING = """
seed: 5
model: turn_nets.Net
data: turn_nets.Samples
loader: {batch_size: 4, drop_last: true}
optimizer: {sgd: {lr: 0.1, momentum: 0.9, weight_decay: 0.01}}
ddp: {bucket_cap_mb: BUCKET}
freeze: ["0.*", "2.*"]
hooks: HOOKS
stages:
  - train: {steps: 6}
  - train: {steps: 6, freeze: ["0.*"]}
  - train: {steps: 6, freeze: []}
  - save
"""


def freezing(folder: Path, *, bucket: str = "25", hooks: str = "[]") -> str:
    written(folder)
    return FREEZING.replace("BUCKET", bucket).replace("HOOKS", hooks)


def unfreezing_by_hand() -> dict[str, Any]:
    """DDP wrapped anew for each stage, around one optimizer: rank 0's weights."""
    dist.init_process_group("gloo")
    scope: dict[str, Any] = {}
    exec(compile(MODULE, "turn_nets", "exec"), scope)
    torch.manual_seed(5)
    net, steps = scope["Net"](), batches_of(scope["Samples"](), 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for first_trained in (4, 2, 0):
        for index, part in enumerate(net):
            part.requires_grad_(index >= first_trained)
        ddp = DistributedDataParallel(net)
        for _ in range(2):  # leave DDP's first bucket layout behind
            ddp(torch.ones(4, 6)).sum().backward()
            optimizer.zero_grad()
        for _ in range(6):
            ((inputs, labels),) = next(steps)
            nn.functional.cross_entropy(ddp(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach().numpy() for name, value in net.named_parameters()}


@pytest.mark.parametrize("bucket", ["25", "0.0001"])
def test_gradual_unfreezing_is_bitwise_a_plain_ddp_loop(tmp_path: Path, bucket: str) -> None:
    run = run_pipeline(tmp_path, freezing(tmp_path, bucket=bucket), 2)
    for name, value in as_processes(2, unfreezing_by_hand)[0].items():
        assert torch.equal(weights(run)[name], torch.from_numpy(value)), name


def test_an_optimizer_whose_groups_are_another_s_trains_without_turns(tmp_path: Path) -> None:
    """Its `param_groups` cannot be set."""
    found = []
    for name, optimizer in (("plain", "sgd"), ("wrapped", "turn_nets.Wrapped")):
        (tmp_path / name).mkdir()
        text = (
            freezing(tmp_path / name)
            .replace("sgd", optimizer)
            .replace(", momentum: 0.9, weight_decay: 0.01", "")
        )
        found.append(weights(run_pipeline(tmp_path / name, text, 2)))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


@pytest.mark.parametrize(
    "sync",
    [
        "every_step",
        "{local_sgd: {every: 3}}",
        "{diloco: {every: 3}}",
        "{local_sgd: {every: 3, optimizer_state: average}}",
    ],
)
def test_a_stage_sends_what_it_trains(tmp_path: Path, sync: str) -> None:
    """As `explain` says, and no bucket number stands for two buckets; the file saved has all."""
    run = run_pipeline(tmp_path, freezing(tmp_path) + f"sync: {sync}\n", 2)
    buckets = [line for line in lines(run, "buckets") if line["rank"] == 0]
    kind = "gradient" if sync == "every_step" else "delta"
    sent = {line["stage"]: set[str]() for line in buckets}
    numbered = dict[int, list[str]]()
    for line in buckets:
        if line["kind"] == kind:
            sent[line["stage"]] |= set(line["params"])
            if kind == "gradient":
                assert numbered.setdefault(line["bucket"], line["params"]) == line["params"]
    expected = [
        {f"{layer}.{what}" for layer in layers for what in ("weight", "bias")}
        for layers in ("4", "24", "024")
    ]
    assert [sent[stage] for stage in range(3)] == expected
    stages = explain(load(tmp_path / "run.yaml"), hosts=1, ranks_per_host=2).stages
    for stage in stages[:3]:
        assert stage.sent_in_stage is not None
        found = sum(line["wire_bytes"] for line in buckets if line["stage"] == stage.index)
        assert stage.sent_in_stage.mean_step_bytes()["per_rank"] == found
    assert set(weights(run)) == expected[2]


def test_evaluating_an_average_leaves_what_the_stage_freezes(tmp_path: Path) -> None:
    """The first stage has trained it, so its average is another one."""
    text = (
        FREEZING.replace("BUCKET", "25").replace("HOOKS", "[]").replace('freeze: ["0.*", "2.*"]', "ema: 0.9")
    )
    found = []
    for name, evaluate in (("with", "{every: 2}"), ("without", "null")):
        written(tmp_path / name)
        stage = f"train: {{steps: 6, evaluate: {evaluate}, freeze: "
        changed = text.replace("train: {steps: 6, freeze: ", stage)
        changed = changed.replace(
            "data: turn_nets.Samples", "data: {train: turn_nets.Samples, evaluate: turn_nets.Samples}"
        )
        found.append(weights(run_pipeline(tmp_path / name, changed, 2)))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


@pytest.mark.parametrize("hooks", ["[int8]", "[{powersgd: {rank: 1}}]"])
@pytest.mark.parametrize("asked", [5, 9, 14])
def test_a_run_that_was_killed_ends_with_the_same_bits(tmp_path: Path, hooks: str, asked: int) -> None:
    """In each stage: with the stage's own parameters, buckets and residuals."""
    text = (
        freezing(tmp_path, hooks=hooks)
        .replace("turn_nets.Samples", "samples.Samples")
        .replace("model: turn_nets.Net", "model: {turn_nets.Net: {inputs: 64}}")
    )
    resumed_as_whole(tmp_path, text + "checkpoint: {every: 4, keep: 2}\n", asked)


@pytest.mark.parametrize(
    "options", ["hooks: [int8]", "sync: {local_sgd: {every: 4}}", "hooks: [{topk: {density: 0.1}}]"]
)
def test_a_gan_that_was_killed_ends_with_the_same_bits(tmp_path: Path, options: str) -> None:
    text = written(tmp_path, EVERY="2").replace("turn_nets.Samples", "samples.Samples")
    text = text.replace("hooks: []", f"{options}\ncheckpoint: {{every: 3, keep: 2}}")
    resumed_as_whole(tmp_path, text, 7)


def resumed_as_whole(tmp_path: Path, text: str, killed_in_step: int) -> None:
    files = {"turn_nets.py": MODULE, "p.yaml": text}
    assert_killed_run_ends_alike(tmp_path, files, f"1 {4 * killed_in_step + 3}")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("turn_nets.Gan", "turn_nets.Deaf", "turns: the forward of Deaf takes no argument called turn"),
        ('["generator.*"]', "generator.0.*", "turns: no turn updates generator.1.weight"),
        ('["generator.*"]', '["*"]', "turns: more than one turn updates discriminator.0.weight"),
        ('["generator.*"]', "encoder.*", 'turns[1].match[0]: no parameter is called "encoder.*"'),
        ("seed: 5", 'freeze: ["generator.*"]', "turns[1].match: each parameter that it matches is frozen"),
        ("seed: 5", 'freeze: ["*"]', "freeze: no parameter is left to train"),
        (
            "{adam: {lr: 0.01, betas: [0.5, 0.9]}}",
            "{turn_nets.Wrapped: {lr: 0.01}}",
            "optimizer: it does not let turns step their own parameter groups",
        ),
        (
            "stages:",
            'stages:\n  - train: {steps: 1, freeze: ["g*"], sync: {diloco: {every: 5, fragments: 5}}}',
            "sync.diloco.fragments: 5 fragments of 4 trained parameters",
        ),
        (
            "{adam: {lr: 0.01, betas: [0.5, 0.9]}}",
            "{turn_nets.Required: {lr: 0.01}}",
            "turns: it clashes with",
        ),
    ],
)
def test_turns_that_do_not_fit_the_model_are_told_before_step_1(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    text = written(tmp_path)
    assert old in text
    codes, said = run_to_end(tmp_path, text.replace(old, new))
    assert codes == [EXIT_BAD_INPUT] * 2
    assert told in said


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "name: discriminator",
            "name: d",
            'stages: the loss of turn "d" depends on no parameter that it trains; check that forward',
        ),
        (
            "  - save",
            "  - evaluate: {data: turn_nets.Samples}",
            "turns: the forward of Strict needs the argument turn, which evaluations and",
        ),
    ],
)
def test_a_forward_that_does_not_fit_the_turns_is_told(tmp_path: Path, old: str, new: str, told: str) -> None:
    """Before step 1 of a run, and by `explain`."""
    codes, said = run_to_end(tmp_path, written(tmp_path).replace("Gan", "Strict").replace(old, new))
    assert codes == [EXIT_BAD_INPUT] * 2
    assert told in said
    with pytest.raises(PipelineError, match=re.escape(told)):
        explain(load(tmp_path / "p.yaml"), hosts=1, ranks_per_host=2)
