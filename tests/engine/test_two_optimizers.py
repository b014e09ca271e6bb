"""Muon, or another optimizer of matrices, beside one of all other parameters."""

import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ddprun.checkpoint.folder import steps_in
from ddprun.config import PipelineError, load
from ddprun.engine import build
from ddprun.engine.optimizers import TwoOptimizers, build_optimizer
from ddprun.engine.turns import build_turns, parameter_group_names
from ddprun.predict.forecast import measure_optimizer_state_bytes
from tests.checkpoint.runs import MODULE, assert_killed_run_ends_alike, final
from tests.engine.running import events, lines, run_pipeline, weights
from tests.ranks import ddprun

NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(64, 12)
        self.conv = nn.Conv1d(1, 2, 3)
        self.body = nn.Linear(20, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        hidden = self.conv(self.embedding(x.flatten(1)).unsqueeze(1)).flatten(1).tanh()
        return self.head(self.norm(self.body(hidden)))


class Own(torch.optim.AdamW):
    def state_dict(self):
        return {**super().state_dict(), "more": 1}


class Inside(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.inner = torch.optim.AdamW(self.param_groups[0]["params"])

    def step(self):
        self.inner.step()


class Modes(torch.optim.SGD):
    def train(self):
        pass

    def eval(self):
        pass


def samples():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(1, 8, 8, generator=generator), i % 10) for i in range(48)]
"""
PIPELINE = """
seed: 5
model: two_nets.Net
data: {train: two_nets.samples}
loader: {batch_size: 8, shuffle: false}
optimizer: OPTIMIZER
clip_norm: 1.0
ema: 0.9
MORE
stages:
  - train: {steps: 12, schedule: {linear_lr: {total_iters: 12}}}
  - save
"""
BOTH = "{muon: {lr: 0.05, weight_decay: 0.1}, others: {adamw: {lr: 0.01}}}"
GROUPS = """
groups:
  - {match: ["embedding.*", "head.weight"], optimizer: others, weight_decay: 0.5}
  - {match: "body.*", lr: 0.02}
"""


def prepared(folder: Path, optimizer: str = BOTH, more: str = "") -> Path:
    (folder / "two_nets.py").write_text(NETS)
    (folder / "p.yaml").write_text(PIPELINE.replace("OPTIMIZER", optimizer).replace("MORE", more))
    return folder / "p.yaml"


def built(path: Path) -> tuple[nn.Module, Any]:
    loaded = load(path)
    model = build.build_model(loaded)
    for name, param in model.named_parameters():
        param.requires_grad_(not any(fnmatch(name, pattern) for pattern in loaded.pipeline.freeze))
    return model, build_optimizer(loaded, model, build_turns(loaded, model))


def names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[set[str]]:
    """Of each parameter group."""
    known = {param: name for name, param in model.named_parameters()}
    return [{known[param] for param in group["params"]} for group in optimizer.param_groups]


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)


VECTORS = {"embedding.bias", "conv.weight", "conv.bias", "body.bias", "norm.weight", "norm.bias", "head.bias"}
MATRICES = {"embedding.weight", "body.weight", "head.weight"}


def test_matrices_go_to_the_first_one(tmp_path: Path) -> None:
    model, optimizer = built(prepared(tmp_path))
    assert names(model, optimizer) == [MATRICES, VECTORS]
    assert [type(one) for one in optimizer.both] == [torch.optim.Muon, torch.optim.AdamW]


def test_a_group_may_give_matrices_to_the_other_one(tmp_path: Path) -> None:
    """And its options go to the optimizer that has the parameters; a group of both kinds is divided."""
    model, optimizer = built(prepared(tmp_path, more=GROUPS))
    found = dict(
        zip(
            map(frozenset, names(model, optimizer)),
            [(group["others"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups],
            strict=True,
        )
    )
    assert found == {
        frozenset({"body.weight"}): (False, 0.02, 0.1),
        frozenset({"embedding.weight", "embedding.bias", "head.weight"}): (True, 0.01, 0.5),
        frozenset({"body.bias"}): (True, 0.02, 0.01),
        frozenset(VECTORS - {"embedding.bias", "body.bias"}): (True, 0.01, 0.01),
    }


def test_a_group_may_give_any_parameter_to_the_first_one(tmp_path: Path) -> None:
    """Such as each network of a GAN to its own. Where it cannot take one, it says so itself."""
    groups = "groups: [{match: ['body.*', 'conv.*'], optimizer: first}, {match: '*', optimizer: others}]"
    first = {name for name in VECTORS | MATRICES if name.startswith(("body", "conv"))}
    model, optimizer = built(prepared(tmp_path, "{sgd: {lr: 0.1}, others: {adam: {lr: 0.01}}}", groups))
    assert names(model, optimizer) == [first, (VECTORS | MATRICES) - first]
    assert [type(one) for one in optimizer.both] == [torch.optim.SGD, torch.optim.Adam]
    with pytest.raises(PipelineError, match=r"optimizer\.Muon: Muon only supports 2D parameters"):
        built(prepared(tmp_path, more=groups))


def test_its_state_has_a_size_and_its_groups_have_names(tmp_path: Path) -> None:
    """For predictions and reports."""
    path = prepared(tmp_path, more=GROUPS)
    model, optimizer = built(path)
    loaded = load(path)
    found = dict(
        zip(
            parameter_group_names(loaded, build_turns(loaded, model), optimizer, model),
            [sorted(of_group) for of_group in names(model, optimizer)],
            strict=True,
        )
    )
    assert found.pop("others") == sorted(VECTORS - {"embedding.bias", "body.bias"})
    assert found == {
        "body.*": ["body.weight"],
        "body.*, others": ["body.bias"],
        "embedding.*, head.weight, others": ["embedding.bias", "embedding.weight", "head.weight"],
    }
    numbers = {id(param): param.numel() for param in model.parameters()}
    first, second = (
        sum(numbers[id(p)] for g in one.param_groups for p in g["params"]) for one in optimizer.both
    )
    vectors = sum(len(group["params"]) for group in optimizer.both[1].param_groups)
    assert measure_optimizer_state_bytes(optimizer) == 4 * first + 8 * second + 4 * vectors


def test_a_state_of_an_older_torch_is_completed_by_each(tmp_path: Path) -> None:
    """As each optimizer does it alone."""
    model, optimizer = built(prepared(tmp_path))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group.pop("decoupled_weight_decay", None)
    optimizer.load_state_dict(state)
    optimizer.step()


def test_a_run_has_the_bits_of_a_loop_with_both(tmp_path: Path) -> None:
    """With a schedule and clipping, over all parameters; and the average of the weights."""
    folder = run_pipeline(tmp_path, prepared(tmp_path).read_text(), 1)
    scope: dict[str, Any] = {}
    exec(NETS, scope)
    torch.manual_seed(5)
    model = scope["Net"]()
    matrices = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    both = torch.optim.Muon(matrices, lr=0.05, weight_decay=0.1), torch.optim.AdamW(others, lr=0.01)
    schedules = [torch.optim.lr_scheduler.LinearLR(one, total_iters=12) for one in both]
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=ema)
    data = scope["samples"]()
    for step in range(12):
        batch = data[step * 8 % 48 :][:8]
        loss = cross_entropy(model(torch.stack([x for x, _ in batch])), torch.tensor([y for _, y in batch]))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one, schedule in zip(both, schedules, strict=True):
            one.step()
            one.zero_grad()
            schedule.step()
        average.update_parameters(model)
    for name, value in weights(folder).items():
        assert torch.equal(value, dict(average.module.named_parameters())[name]), name


RESUMED = """
model: {mlp: {inputs: 64, hidden: [16], outputs: 10}}
data: {train: samples.Samples}
loader: {batch_size: 2}
optimizer: {muon: {lr: 0.02}, others: {adamw: {lr: 0.01}}}
schedule: {OneCycleLR: {max_lr: 0.02, cycle_momentum: false}}
precision: fp16
SYNC
checkpoint: {every: 3, keep: 2}
stages:
  - train: {steps: 6, sync: every_step}
  - train: {epochs: 2, optimizer: {muon: {lr: 0.01}, others: {adamw: {lr: 0.02}}}}
  - save
"""


AVERAGE = "sync: {local_sgd: {every: 4, optimizer_state: average}}"


@pytest.mark.parametrize("sync", ["", AVERAGE])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, sync: str) -> None:
    """The momentum of one and both moments of the other, their schedules and a stage's own settings."""
    assert_killed_run_ends_alike(tmp_path, {"p.yaml": RESUMED.replace("SYNC", sync)}, "1 70")


def test_ranks_that_skipped_other_steps_keep_the_same_learning_rates(tmp_path: Path) -> None:
    """As with fp16 under a local policy: also in a checkpoint right after ranks have averaged their state."""
    (tmp_path / "samples.py").write_text(MODULE)
    (tmp_path / "p.yaml").write_text(RESUMED.replace("SYNC", AVERAGE).replace("keep: 2", "keep: 20"))
    done = ddprun("p.yaml", "--run-dir=run", "--nproc-per-node=2", cwd=tmp_path)
    assert done.code == 0, done.stderr
    rates = [line["lr"] for line in lines(tmp_path / "run", "steps") if line["step"] == 30]
    assert rates[0] == rates[1]
    assert any(event["event"] == "step_skipped" for event in events(tmp_path / "run"))
    whole = final(tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in steps_in(checkpoints):
        if step > 30:
            shutil.rmtree(checkpoints / f"step-{step:08}")
    done = ddprun("resume", "run", cwd=tmp_path)
    assert "resuming after step" in done.stderr
    assert final(tmp_path / "run") == whole


def test_a_loaded_state_is_used_by_both(tmp_path: Path) -> None:
    """Also where only the groups of one are stepped, as in a turn."""
    model, optimizer = built(prepared(tmp_path))
    assert isinstance(optimizer, TwoOptimizers)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = optimizer.state_dict()
    assert {len(one) for one in state["state"].values()} == {1, 3}
    optimizer.load_state_dict(state)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    everything = optimizer.param_groups
    optimizer.param_groups = everything[:1]
    optimizer.step()
    moved = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
    assert moved == MATRICES
    optimizer.param_groups = everything
    optimizer.step()
    assert {int(one["step"]) for one in optimizer.state.values() if "step" in one} == {2}


FAULTS = [
    ("muon", "", "optimizer.Muon: it takes matrices only, and not embedding.bias"),
    ("{adamw: {}, others: muon}", "", "optimizer.others.Muon: Muon only supports 2D parameters"),
    ("{muon: {}, others: lbfgs}", "", 'optimizer.others: "LBFGS", which takes a closure'),
    ("{muon: {}, others: {sgd: {nesterov: true}}}", "", "optimizer.others.SGD: Nesterov momentum"),
    ("{muon: {}, others: {two_nets.Own: {}}}", "", "an optimizer that has a state_dict or load_state_dict"),
    ("{muon: {}, others: {two_nets.Inside: {}}}", "", 'would leave out the state of "inner"'),
    ("{muon: {}, others: {two_nets.Modes: {}}}", "", "an optimizer that has the modes train() and eval()"),
    (BOTH, "groups: [{match: '*.bias', betas: [0.8, 0.9]}]", "a group with optimizer: others takes those of"),
    ("{muon: {}, others: {adamv: {}}}", "", 'optimizer.others.adamv: unknown optimizer "adamv"'),
    ("{muon: {}, others: {adamw: {lrr: 1}}}", "", 'optimizer.others.adamw.lrr: adamw has no option "lrr"'),
    ("{muon: {}, others: adamw, closure: true}", "", "optimizer.closure: two optimizers take no closure"),
    ("adamw", "groups: [{match: '*.bias', optimizer: others}]", 'groups[0].optimizer: "optimizer: others"'),
    ("adamw", "groups: [{match: '*.bias', optimizer: first}]", 'groups[0].optimizer: "optimizer: first"'),
    ("adamw", "groups: [{match: '*.bias', optimizer: adam}]", 'groups[0].optimizer: unknown value "adam"'),
    (BOTH, "groups: [{match: '*', optimizer: others}]", '"Muon"; a group can have optimizer: first'),
    (BOTH, "freeze: ['*bias', 'conv*', 'norm*']", '"AdamW"; a group can have optimizer: others'),
    (BOTH, "groups: [{match: 'body.*', ns_steps: 3}]", 'groups[0]: it has parameters for "AdamW", which'),
]  # fmt: skip


@pytest.mark.parametrize(("optimizer", "more", "told"), FAULTS)
def test_what_does_not_go_is_said(tmp_path: Path, optimizer: str, more: str, told: str) -> None:
    with pytest.raises(PipelineError) as caught:
        built(prepared(tmp_path, optimizer, more))
    assert told in str(caught.value)


def test_a_stage_changes_settings_and_not_optimizers(tmp_path: Path) -> None:
    text = RESUMED.replace("SYNC", "").replace("others: {adamw: {lr: 0.02}}", "others: {sgd: {lr: 0.02}}")
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(
        PipelineError, match=r'"optimizer: Muon and others: SGD" of stages\[1\].train clashes'
    ):
        load(tmp_path / "p.yaml")
