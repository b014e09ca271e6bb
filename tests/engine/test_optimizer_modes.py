"""Optimizers with `train()` and `eval()`: what is read are the weights of `eval()`."""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ddprun.config import load
from ddprun.engine import build
from ddprun.engine.loop import clear_gradients
from ddprun.engine.optimizers import build_optimizer, settings_of_stages
from ddprun.engine.turns import build_turns
from ddprun.engine.worker import run_worker
from ddprun.host.code_folders import add_import_folder
from tests.checkpoint.runs import final
from tests.engine.running import SAMPLES, events, run_pipeline, run_to_end, weights
from tests.ranks import as_processes

MODULE = """

def net():
    return nn.Linear(6, 3).double()


class FreeSGD(torch.optim.Optimizer):
    '''Schedule-free SGD (Defazio et al. 2024): it steps z, averages it to x, and trains between the two.'''

    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "taken": 0, "training": False})

    @torch.no_grad()
    def _switch(self, training):
        for group in self.param_groups:
            beta, was, group["training"] = group["beta"], group["training"], training
            for param in group["params"]:
                if was != training and "z" in self.state[param]:
                    param.lerp_(self.state[param]["z"], 1 - beta if training else 1 - 1 / beta)

    def train(self):
        self._switch(True)

    def eval(self):
        self._switch(False)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            assert group["training"]
            group["taken"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                beta, z = group["beta"], self.state[param].setdefault("z", param.clone())
                x = torch.lerp(param, z, 1 - 1 / beta)
                z.sub_(param.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["taken"])
                param.copy_(torch.lerp(x, z, 1 - beta))
"""
PIPELINE = """
model: modes.net
data: {train: modes.Samples, evaluate: modes.Samples}
loader: {batch_size: 4, shuffle: false}
optimizer: {OPTIMIZER: {lr: 0.2}}
checkpoint: {every: 3, keep: 2}
stages:
  - STAGE
"""
OWN = "modes.FreeSGD"
REAL = pytest.param(
    "schedulefree.AdamWScheduleFree",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("schedulefree") is None, reason="pip install schedulefree"
    ),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "modes.py").write_text(SAMPLES + MODULE)
    return tmp_path


def text(optimizer: str, *stages: str) -> str:
    return PIPELINE.replace("OPTIMIZER", optimizer).replace("STAGE", "\n  - ".join(stages))


def by_hand(
    folder: Path, optimizer: str, steps: int, ranks: Sequence[int] = (0, 1)
) -> list[tuple[Any, Any, float]]:
    """After each step, with the samples of these of two ranks: weights in training, those of `eval()`, and
    the loss of these over all samples.
    """
    add_import_folder(folder)
    (folder / "init.yaml").write_text(text(optimizer, "train: {steps: 1}"))
    module = importlib.import_module("modes")
    package, _, name = optimizer.rpartition(".")
    torch.manual_seed(0)
    model = build.build_model(load(folder / "init.yaml"))
    made = getattr(importlib.import_module(package), name)(model.parameters(), lr=0.2)
    samples = [module.Samples()[index] for index in range(48)]
    inputs, targets = torch.stack([one for one, _ in samples]), torch.tensor([one for _, one in samples])
    found = []
    for step in range(steps):
        made.train()
        batch = [index % 48 for index in range(8 * step, 8 * step + 8) if index % 2 in ranks]
        torch.nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()  # type: ignore[no-untyped-call]
        made.step()
        made.zero_grad()
        trained = {key: value.clone() for key, value in model.state_dict().items()}
        made.eval()
        read = {key: value.clone() for key, value in model.state_dict().items()}
        with torch.no_grad():
            loss = float(torch.nn.functional.cross_entropy(model(inputs), targets))
        made.train()
        model.load_state_dict(trained)
        found.append((trained, read, loss))
    return found


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert (found[name] - value).abs().max() < 1e-12, name


def kept(run_dir: Path) -> dict[str, torch.Tensor]:
    """The parameters in the last checkpoint."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    named = load_file(newest / "shared.safetensors").items()
    return {name[len("parameters/") :]: value for name, value in named if name.startswith("parameters/")}


@pytest.mark.parametrize("optimizer", [OWN, REAL])
def test_what_is_read_are_the_weights_of_eval(folder: Path, optimizer: str) -> None:
    """By evaluations, `save` and `keep_best`, on 2 ranks as in one process; checkpoints hold the training
    side, to which no evaluation does anything.
    """
    expected = by_hand(folder, optimizer, 8)
    watched = "train: {steps: 8, evaluate: {every: 2}, keep_best: {metric: loss}}"
    run = run_pipeline(folder, text(optimizer, watched, "evaluate", "save"), 2, "watched")
    measured = [(event["step"], event["loss"]) for event in events(run) if event["event"] == "evaluated"]
    assert [step for step, _ in measured] == [2, 4, 6, 8, 8]
    for step, loss in measured:
        assert loss == pytest.approx(expected[step - 1][2], rel=1e-12)
    trained, read, _ = expected[-1]
    assert_close(weights(run), read)
    assert_close(kept(run), trained)
    best = min(measured, key=lambda one: one[1])[0]
    assert_close(load_file(run / "best.safetensors"), expected[best - 1][1])
    plain = run_pipeline(folder, text(optimizer, "train: {steps: 8}", "evaluate", "save"), 2, "plain")
    assert final(plain) == final(run)


@pytest.mark.parametrize("optimizer", [OWN, REAL])
def test_its_own_numbers_live_through_stages_and_resumes(folder: Path, optimizer: str) -> None:
    """What it counts in its groups is no setting that a stage begins with; an option of a stage is one."""
    trained, read, _ = by_hand(folder, optimizer, 8)[-1]
    run = run_pipeline(folder, text(optimizer, "train: {steps: 4}", "train: {steps: 4}", "save"), 2, "stages")
    assert_close(weights(run), read)
    broken = run_pipeline(folder, text(optimizer, "train: {steps: 5}"), 2, "broken")
    (folder / "broken.yaml").write_text(text(optimizer, "train: {steps: 8}"))
    assert as_processes(2, go_on, folder / "broken.yaml", broken, cwd=folder) == [0, 0]
    assert_close(kept(broken), trained)
    (folder / "p.yaml").write_text(
        text(optimizer, "train: {steps: 4}", f"train: {{steps: 4, optimizer: {{{optimizer}: {{lr: 0.5}}}}}}")
    )
    loaded = load(folder / "p.yaml")
    model = build.build_model(loaded)
    turns = build_turns(loaded, model)
    settings = settings_of_stages(loaded, model, turns, build_optimizer(loaded, model, turns))
    assert [settings[index][0]["lr"] for index in (0, 1)] == [0.2, 0.5]


def go_on(file: Path, run_dir: Path) -> int:
    return run_worker(load(file), run_dir, resuming="yes")


@pytest.mark.parametrize("optimizer", [OWN, REAL])
@pytest.mark.parametrize("stage", ["average", "broadcast: {source: 1}"])
def test_ranks_apart(folder: Path, optimizer: str, stage: str) -> None:
    """Those of `eval()` become the ranks' mean, or those of the rank that is copied."""
    first, second = (by_hand(folder, optimizer, 4, [rank])[-1][1] for rank in (0, 1))
    if stage == "average":
        second = {name: (first[name] + value) / 2 for name, value in second.items()}
    run = run_pipeline(folder, text(optimizer, "train: {steps: 4, sync: independent}", stage, "save"), 2)
    assert_close(weights(run), second)


def test_an_average_of_its_training_side_is_refused(folder: Path) -> None:
    """Before step 1, by one error."""
    codes, told = run_to_end(folder, text(OWN, "train: {steps: 4}") + "ema: 0.9\n", 1)
    assert codes == [2]
    assert 'ema: "ema" clashes with "optimizer: modes.FreeSGD", which averages the weights itself' in told


def test_a_zero_grad_of_its_own_is_called() -> None:
    """Also one of the object alone."""
    param = torch.nn.Parameter(torch.ones(2))
    plain, own = torch.optim.SGD([param]), torch.optim.SGD([param])
    called: list[bool] = []
    own.zero_grad = lambda set_to_none=True: called.append(set_to_none)  # type: ignore[method-assign]
    for optimizer, left in ((own, True), (plain, False)):
        param.grad = torch.ones(2)
        clear_gradients(optimizer)
        assert (param.grad is not None) == left
    assert called == [True]
