"""What a file says about parameters: those to start with, frozen ones, groups, clipping, what is saved."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import default_collate

from ddprun.checkpoint.codec import write_tensors
from ddprun.config import PipelineError, load
from ddprun.engine import build
from ddprun.engine.optimizers import build_optimizer
from ddprun.engine.turns import build_turns
from ddprun.engine.weights import load_initial_weights
from ddprun.engine.worker import run_worker
from ddprun.host.code_folders import add_import_folder
from tests.engine.running import events, run_pipeline, summary, weights
from tests.ranks import as_processes, ddprun_here

MODULE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, compiled=False):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 10)
        self.tied = self.head  # two names for each of its weights
        if compiled:
            self.body = torch.compile(self.body, backend="eager")

    def forward(self, images):
        return self.head(self.norm(self.body(images.flatten(1))))
"""
PIPELINE = """
model: {names.Net: {compiled: COMPILED}}
data: digits
loader: {batch_size: 16, shuffle: false}
optimizer: {sgd: {lr: 0.5, momentum: 0.9}}
stages:
  - train: {steps: STEPS}
  - save
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("names")
    (found / "names.py").write_text(MODULE)
    add_import_folder(found)
    return found


def pipeline(more: str = "", *, compiled: bool = False, steps: str = "3") -> str:
    return PIPELINE.replace("COMPILED", str(compiled).lower()).replace("STEPS", steps) + more


def model_of(folder: Path, more: str, *, compiled: bool = False) -> nn.Module:
    (folder / "p.yaml").write_text(pipeline(more, compiled=compiled))
    loaded = load(folder / "p.yaml")
    torch.manual_seed(0)
    model = build.build_model(loaded)
    load_initial_weights(loaded, model)
    return build.join_loss_and_freeze(loaded, model, None, torch.device("cpu"), None)


def fault(folder: Path, more: str) -> Any:
    with pytest.raises(PipelineError) as refused:
        model_of(folder, more)
    (found,) = refused.value.faults
    return found


def test_a_run_starts_with_the_weights_of_another(folder: Path) -> None:
    """Also of a compiled model, by its plain names; each rank has them, and nothing else has changed."""
    first = weights(run_pipeline(folder, pipeline(compiled=True), 2, "compiled"))
    assert set(first) == {
        *("body.weight", "body.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"),
        *("norm.num_batches_tracked", "head.weight", "head.bias"),
    }
    save_file({f"module.{name}": value for name, value in first.items()}, folder / "wrapped.safetensors")
    for number, file in enumerate(("compiled/model.safetensors", "{here}/wrapped.safetensors")):
        for compiled in (False, True):
            text = pipeline(f"init: '{file}'\n", compiled=compiled, steps="1, optimizer: {sgd: {lr: 0}}")
            again = weights(run_pipeline(folder, text, 2, f"again-{number}-{compiled}"))
            for name in ("body.weight", "head.weight", "norm.bias"):
                assert torch.equal(again[name], first[name]), name


def test_weights_that_do_not_fit_are_one_fault(folder: Path) -> None:
    """It lists what is missing, unexpected and of another shape; patterns allow some."""
    torch.manual_seed(1)
    other = {"body.weight": torch.zeros(6, 64), "body.bias": torch.zeros(6), "old.x": torch.zeros(1)}
    save_file({**other, "head.weight": torch.zeros(3, 6)}, folder / "other.safetensors")
    found = fault(folder, "init: other.safetensors\n")
    assert (found.place.line, found.path) == (9, "init")
    for part in (
        "missing: norm.weight, norm.bias, norm.running_mean",
        "unexpected: old.x",
        "head.weight is [3, 6] in the file and [10, 6] in the model",
    ):
        assert part in found.problem
    some = "init: {file: other.safetensors, missing: ['norm.*', 'head.*', 'tied.*'], unexpected: ['old.*']}\n"
    model = model_of(folder, some)
    assert not model.get_parameter("body.weight").any()
    assert model.get_parameter("head.weight").any()
    assert "other shapes: head.weight" in fault(folder, some.replace("'head.*', ", "'head.bias', ")).problem


def test_only_safetensors_are_read(folder: Path) -> None:
    """Never a pickle, whatever it is called; and a file that is not there is named."""
    torch.save({"body.weight": torch.zeros(1)}, folder / "pickle.safetensors")
    assert "is not a safetensors file" in fault(folder, "init: pickle.safetensors\n").problem
    assert "no-such.safetensors" in fault(folder, "init: no-such.safetensors\n").problem
    (folder / "p.yaml").write_text(pipeline("init: weights.pt\n"))
    found = ddprun_here("check", "p.yaml", cwd=folder)
    assert "p.yaml:9:7: init.file: cannot be" in found.stdout


def test_what_is_frozen_stays_and_is_not_saved_with_the_rest(folder: Path) -> None:
    """Under DDP, which then sends gradients of the others alone."""
    text = pipeline("freeze: ['body.*', norm.weight]\n").replace("- save", "- save: {only: trainable}")
    run = run_pipeline(folder, text, 2, "frozen")
    assert set(weights(run)) == {"norm.bias", "head.weight", "head.bias"}
    sent = summary(run)["stages"][0]
    assert sent["steps"] == 3
    whole = weights(run_pipeline(folder, pipeline("freeze: ['body.*', norm.weight]\n"), 2, "frozen-2"))
    before = model_of(folder, "")
    assert torch.equal(whole["body.weight"], before.get_parameter("body.weight"))
    assert not torch.equal(whole["head.weight"], before.get_parameter("head.weight"))


@pytest.mark.parametrize(
    ("more", "path", "problem"),
    [
        ("freeze: ['body.*', encoder.*]\n", "freeze[1]", 'no parameter is called "encoder.*"'),
        ("freeze: ['*']\n", "freeze", "no parameter is left to train"),
    ],
)
def test_a_pattern_without_a_parameter_is_a_fault(folder: Path, more: str, path: str, problem: str) -> None:
    """So is one that leaves nothing to train."""
    found = fault(folder, more)
    assert (found.path, found.place.line) == (path, 9)
    assert problem in found.problem


GROUPS = """
groups:
  - {match: "tied.*", lr: 0.125}
  - {match: ["*.bias", "norm.*"], momentum: 0, lr: 0.25}
warmup_steps: 2
schedule: {LinearLR: {start_factor: 0.5, total_iters: 4}}
clip_value: 0.01
clip_norm: 0.05
"""


def by_hand(folder: Path, steps: int) -> nn.Module:
    """The same in a loop of torch alone."""
    from ddprun.zoo.data import digits

    model = model_of(folder, "")
    data = digits(held_out=0.2, split_seed=0, folder=Path()).train
    groups: list[dict[str, Any]] = [
        {"params": [*model.get_submodule("head").parameters()], "lr": 0.125},
        {"params": [model.get_parameter(name) for name in ("body.bias", "norm.weight", "norm.bias")]}
        | {"lr": 0.25, "momentum": 0.0},
        {"params": [model.get_parameter("body.weight")]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
    for step in range(steps):
        samples = [data[place] for place in range(step * 16, step * 16 + 16)]
        images, labels = default_collate(samples)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= min(1, (step + 1) / 2)
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule.step()
    return model


def test_groups_have_options_of_their_own(folder: Path) -> None:
    """The first that matches counts, by any name of a tied weight; schedule and warm-up scale all alike, and
    values are clipped before the norm. Bit for bit a loop of torch's.
    """
    run = run_pipeline(folder, pipeline(GROUPS, steps="5"), 1, "groups")
    (started,) = (event for event in events(run) if event["event"] == "started")
    assert "tied.*" in started["groups"]
    assert len(set(started["groups"])) == len(started["groups"])
    ours = weights(run)
    theirs = by_hand(folder, 5).state_dict()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_a_resumed_run_has_its_groups(folder: Path) -> None:
    """It ends with the bits of an unbroken one; a stage's own settings keep the groups' own."""
    stages = "4}\n  - train: {steps: 3, optimizer: {sgd: {lr: 0.1}}"
    whole = weights(run_pipeline(folder, pipeline(GROUPS, steps=stages), 2, "whole"))
    text = pipeline(GROUPS + "checkpoint: {every: 2}\n", steps=stages)
    (folder / "broken.yaml").write_text(text)
    as_processes(2, broken_off, folder, cwd=folder, may_die=True)
    assert as_processes(2, resumed, folder, cwd=folder) == [0, 0]
    again = weights(folder / "broken")
    for name, value in whole.items():
        assert torch.equal(value, again[name]), name


def broken_off(folder: Path) -> None:
    import os

    from ddprun.engine import loop
    from ddprun.engine.checkpoint_state import close_checkpoint_writers

    step = loop.act_on_messages

    def until_six(run: Any, agreed_steps: Any, exchanged: bool) -> Any:
        found = step(run, agreed_steps, exchanged)
        if run.session.state.step == 6:
            close_checkpoint_writers(run.session)
            os._exit(0)
        return found

    loop.act_on_messages = until_six
    run_worker(load(folder / "broken.yaml"), folder / "broken")


def resumed(folder: Path) -> int:
    return run_worker(load(folder / "broken.yaml"), folder / "broken", resuming="yes")


def test_a_group_without_a_parameter_is_a_fault(folder: Path) -> None:
    """All of them at once: a name that there is not, and parameters that earlier groups have."""
    more = "groups: [{match: '*', lr: 1}, {match: 'x.*', lr: 1}, {match: ['head.*', y], lr: 1}, "
    more += "{match: 'body.*', lr: 2}]\n"
    (folder / "p.yaml").write_text(pipeline(more))
    loaded = load(folder / "p.yaml")
    with pytest.raises(PipelineError) as refused:
        build_optimizer(loaded, model := build.build_model(loaded), build_turns(loaded, model))
    assert [(found.path, found.problem.partition(" ")[0]) for found in refused.value.faults] == [
        ("groups[1].match[0]", "no"),
        ("groups[2].match[1]", "no"),
        ("groups[3].match", "each"),
    ]


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("{match: x, lrr: 1}", 'SGD has no option "lrr"; allowed: lr, momentum'),
        ("{match: x, lr: fast}", 'groups[0].lr: expected a number, got "fast" (a string)'),
        ("{match: x}", "a group needs options of its own"),
        ("{lr: 1}", "groups[0].match: is required"),
        ("{match: [], lr: 1}", "must hold at least 1 item"),
    ],
)
def test_what_a_group_says_is_checked(tmp_path: Path, group: str, expected: str) -> None:
    """Without torch, as options of the optimizer."""
    (tmp_path / "p.yaml").write_text(pipeline(f"groups: [{group}]\n"))
    found = ddprun_here("check", "p.yaml", cwd=tmp_path)
    assert found.code == 2
    assert expected in found.stdout


def test_the_resolved_pipeline_loads_again(tmp_path: Path) -> None:
    """With all keys about batches and parameters in it."""
    more = GROUPS + "init: {file: a.safetensors, missing: [b]}\nfreeze: ['c.*']\nbatch: {inputs: [0, x]}\n"
    more += "weight_by: {targets: {of: y}}\nloss: model\n"
    text = pipeline(more).replace("shuffle: false", "sampler: {a.b: {c: {d.e: {f: '{here}'}}}}, collate: g.h")
    (tmp_path / "p.yaml").write_text(text)
    loaded = load(tmp_path / "p.yaml")
    (tmp_path / "q.yaml").write_text(loaded.resolved_yaml())
    assert load(tmp_path / "q.yaml").as_dict() == loaded.as_dict()


def test_a_file_gets_the_mode_of_the_umask_while_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The umask is the process's: other threads make files meanwhile."""
    umask = os.umask(0o027)
    try:
        with monkeypatch.context() as patched:
            patched.delattr(os, "umask")
            write_tensors(tmp_path / "weights", {"new": torch.ones(1)})
    finally:
        os.umask(umask)
    (file,) = tmp_path.iterdir()
    assert (file.name, stat.S_IMODE(file.stat().st_mode)) == ("weights", 0o640)
