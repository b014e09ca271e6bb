"""Optimizers that take a closure: as a hand-written DDP loop calls them, and with hooks that keep state."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddprun import EXIT_BAD_INPUT
from ddprun.config import load
from ddprun.explain.explain import explain
from tests.checkpoint.runs import assert_killed_run_ends_alike
from tests.engine.running import lines, run_pipeline, run_to_end, summary, weights
from tests.ranks import as_processes

MODULE = """
import numpy as np
import torch
from torch import nn


class Samples(torch.utils.data.Dataset):
    def __init__(self, noise=0.0):
        self.noise = noise

    def __len__(self):
        return 64

    def __getitem__(self, index):
        features = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return features + self.noise * torch.randn(6) if self.noise else features, index % 3


def noisy(batch):
    inputs, labels = batch
    return inputs.mul_(1 + np.random.rand()), labels


class Net(nn.Sequential):
    def __init__(self, dropout=0.0):
        super().__init__(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, 3))


class SAM(torch.optim.Optimizer):
    \"\"\"Foret et al. 2021: the gradient at the worst point nearby, after a first pass.\"\"\"

    def __init__(self, params, lr, rho):
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "SAM needs a closure"
        params = [param for group in self.param_groups for param in group["params"]]
        rho, lr = self.param_groups[0]["rho"], self.param_groups[0]["lr"]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        before = [param.clone() for param in params]
        for param in params:
            param.data.add_(param.grad * (rho / norm))  # which leaves no version behind
        closure()
        for param, old in zip(params, before):
            param.data.copy_(old)
            param.sub_(lr * param.grad)
            self.state[param]["steps"] = self.state[param].get("steps", 0) + 1


class Twice(torch.optim.SGD):
    def step(self, closure):
        params = self.param_groups[0]["params"]
        first = [param.grad.clone() for param in params]
        self.zero_grad()
        closure()
        assert all(torch.equal(param.grad, one) for param, one in zip(params, first)), "other gradients"
        super().step()


class Required(SAM):
    def step(self, closure):
        return super().step(closure)
"""
PIPELINE = """
seed: 5
model: {closure_nets.Net: {dropout: DROPOUT}}
data: closure_nets.Samples
loader: {batch_size: 4, drop_last: true}
loss: cross_entropy
optimizer: OPTIMIZER
accumulate: ACCUMULATE
hooks: HOOKS
stages: [{train: {steps: 10}}, save]
"""
SAM = "{closure_nets.SAM: {lr: 0.1, rho: 0.05}, closure: true}"
LBFGS = "{lbfgs: {lr: 0.5, max_iter: 4, history_size: 3, line_search_fn: strong_wolfe}}"
USUAL = {"DROPOUT": "0", "OPTIMIZER": SAM, "ACCUMULATE": "1", "HOOKS": "[]"}


def written(folder: Path, **changes: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "closure_nets.py").write_text(MODULE)
    text = PIPELINE
    for name, value in {**USUAL, **changes}.items():
        text = text.replace(name, value)
    return text


def by_hand(kind: str, accumulate: int, clip_norm: float | None) -> dict[str, Any]:
    """What a user would write with torch alone: rank 0's weights."""
    dist.init_process_group("gloo")
    scope: dict[str, Any] = {}
    exec(compile(MODULE, "closure_nets", "exec"), scope)
    torch.manual_seed(5)
    model, data = scope["Net"](), scope["Samples"]()
    sampler: Any = DistributedSampler(data, seed=5, drop_last=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    ddp = DistributedDataParallel(model)
    optimizer: Any = torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe"
    )
    if kind == "sam":
        optimizer = scope["SAM"](model.parameters(), lr=0.1, rho=0.05)
    for _ in range(2):  # leave DDP's first bucket layout behind
        nn.functional.cross_entropy(ddp(torch.zeros(4, 6)), torch.zeros(4, dtype=torch.long)).backward()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
    done = 0
    for epoch in range(10):
        sampler.set_epoch(epoch)
        batches = list(loader)
        for start in range(0, len(batches), accumulate):
            group = batches[start : start + accumulate]

            def closure(group: Any = group) -> Tensor:
                optimizer.zero_grad()
                total = torch.zeros((), dtype=torch.float64)
                with torch.enable_grad():
                    for index, (inputs, labels) in enumerate(group, start=1):
                        ddp.require_backward_grad_sync = index == len(group)
                        loss = nn.functional.cross_entropy(ddp(inputs), labels) / len(group)
                        loss.backward()  # type: ignore[no-untyped-call]
                        total += loss.detach().double()
                if clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
                dist.all_reduce(total)
                return total / dist.get_world_size()

            if kind == "sam":
                closure()
            optimizer.step(closure)
            done += 1
            if done == 10:
                return {name: value.numpy() for name, value in model.state_dict().items()}
    raise AssertionError("ten steps end before ten epochs do")


@pytest.mark.parametrize(("accumulate", "clip_norm"), [(1, None), (2, None), (1, 0.2)])
@pytest.mark.parametrize(("kind", "optimizer"), [("sam", SAM), ("lbfgs", LBFGS)])
def test_it_is_bitwise_a_plain_ddp_loop(
    tmp_path: Path, kind: str, optimizer: str, accumulate: int, clip_norm: float | None
) -> None:
    """Each call clips the gradients that it gives."""
    text = written(tmp_path, OPTIMIZER=optimizer, ACCUMULATE=str(accumulate))
    if clip_norm is not None:
        text += f"clip_norm: {clip_norm}\n"
    run = run_pipeline(tmp_path, text, 2)
    for name, value in as_processes(2, by_hand, kind, accumulate, clip_norm)[0].items():
        assert torch.equal(weights(run)[name], torch.from_numpy(value)), name


def test_a_required_closure_is_found_without_being_asked_for(tmp_path: Path) -> None:
    asked = run_pipeline(tmp_path / "asked", written(tmp_path / "asked"), 2)
    required = written(tmp_path / "required", OPTIMIZER="{closure_nets.Required: {lr: 0.1, rho: 0.05}}")
    found = run_pipeline(tmp_path / "required", required, 2)
    for name, value in weights(asked).items():
        assert torch.equal(weights(found)[name], value), name


def test_what_is_sent_is_recorded(tmp_path: Path) -> None:
    """The buckets of both calls of a step; with dropout both draw the same numbers, and ranks agree."""
    run = run_pipeline(tmp_path, written(tmp_path, DROPOUT="0.5"), 2)
    sent = [line for line in lines(run, "buckets") if line["kind"] == "gradient" and line["rank"] == 0]
    assert len(sent) == 2 * 10
    assert summary(run)["wire_bytes"] == 2 * sum(line["wire_bytes"] for line in sent)
    (stage, _) = explain(load(tmp_path / "run.yaml"), hosts=1, ranks_per_host=2).stages
    assert stage.takes_closure
    at_once = run_pipeline(tmp_path, written(tmp_path, OPTIMIZER="{sgd: {lr: 0.1}}"), 2, "plain")
    assert summary(run)["wire_bytes"] == 2 * summary(at_once)["wire_bytes"]


@pytest.mark.parametrize("hooks", ["[int8]", "[{topk: {density: 0.1}}]", "[{powersgd: {rank: 1}}]"])
def test_each_call_starts_from_the_hooks_state_before_the_step(tmp_path: Path, hooks: str) -> None:
    """So two calls for the same weights give the same gradients; with dropout, data that draws random
    numbers, and a transform that draws NumPy's and works in place, too.
    """
    changes = {"OPTIMIZER": "{closure_nets.Twice: {lr: 0.1}}", "HOOKS": hooks, "DROPOUT": "0.5"}
    text = written(tmp_path, ACCUMULATE="2", **changes)
    text = text.replace("data: closure_nets.Samples", "data: {closure_nets.Samples: {noise: 0.1}}")
    run_pipeline(tmp_path, text + "batch: {transform: closure_nets.noisy}\n", 2)


KEPT = """
model: {mlp: {inputs: 64, hidden: [16], outputs: 10}}
data: {train: samples.Samples}
loader: {batch_size: 2}
optimizer: OPTIMIZER
hooks: [int8]
checkpoint: {every: 3, keep: 2}
stages: [{train: {steps: 12}}, save]
"""


@pytest.mark.parametrize("optimizer", ["{samples.SAM: {lr: 0.1, rho: 0.05}, closure: true}", LBFGS])
def test_hooks_keep_what_the_last_call_has_left(tmp_path: Path, optimizer: str) -> None:
    """A run that was killed ends with the same bits."""
    sam = MODULE[MODULE.index("class SAM") : MODULE.index("class Required")]
    files = {"samples.py": "\n\n" + sam, "p.yaml": KEPT.replace("OPTIMIZER", optimizer)}
    assert_killed_run_ends_alike(tmp_path, files, f"1 {2 * 8 + 3}")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("seed: 5", "precision: pure_fp16", "precision: it clashes with"),
        ("hooks: []", "sync: {local_sgd: {every: 2}}", "sync: it clashes with"),
        ("hooks: []", "sync: {hierarchical_sgd: {within: 1, across: 2, hosts: 2}}", "sync: it clashes with"),
        (
            "train: {steps: 10}",
            "forward: {steps: 4, update: evolution_strategies}",
            "forward.update: it clashes with",
        ),
    ],
)
def test_what_it_does_not_go_with_is_told_before_step_1(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    codes, said = run_to_end(tmp_path, written(tmp_path).replace(old, new))
    assert codes == [EXIT_BAD_INPUT] * 2
    assert told in said
    assert '"optimizer: closure_nets.SAM", which takes a closure' in said
