"""Hooks where they belong: under DDP, switched between stages, compared with the exact mean."""

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ddprun.config import load
from ddprun.engine.worker import run_worker
from tests.engine.running import events, lines, run_pipeline, summary, weights
from tests.ranks import as_processes, ddprun

HEAD = """
model:
  mlp: {inputs: 64, hidden: [600, 600], outputs: 10}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.02, momentum: 0.9}}
ddp: {bucket_cap_mb: 1}
"""
STACKS = {
    "[]": 1.0,
    "[shared_memory]": 1.0,
    "[{hierarchical: {hosts: 2}}]": 1.0,
    "[fp16]": 0.9999,
    "[bf16, {hierarchical: {hosts: 2, within: [shared_memory]}}]": 0.999,
    "[int8]": 0.999,
    "[{hierarchical: {hosts: 2, across: [int8]}}]": 0.999,
    "[fp8]": 0.998,
    "[{hierarchical: {hosts: 2, within: [bf16], across: [int4]}}]": 0.95,
    "[{bf16: {accumulate: fp32}}]": 0.9999,
    "[int2]": 0.5,
    "[{auto_bits: {floor: 0.9, every: 2}}]": 0.9,
    "[{topk: {density: 0.2}}]": 0.5,
    "[{topk: {density: 0.2, values: int2}}]": 0.5,
    "[powersgd]": 0.5,
    "[powersgd, fp16, {hierarchical: {hosts: 2, across: [int8]}}]": 0.5,
    "[{hierarchical: {hosts: 2, within: [shared_memory], across: [powersgd]}}]": 0.5,
    "[noop]": 0.2,
}
EXACT = 3


def test_one_run_goes_through_every_stack(tmp_path: Path) -> None:
    """Stages switch them on four ranks; in every second step each bucket is held against the exact mean."""
    stages = "".join(f"  - train: {{steps: 4, hooks: {stack}}}\n" for stack in STACKS)
    text = f"{HEAD}timings: {{fidelity_every: 2}}\nstages:\n{stages}"
    folder = run_pipeline(tmp_path, text, 4)
    records = [line for line in lines(folder, "buckets") if line["kind"] == "gradient"]
    assert {line["step"] for line in records if "fidelity" in line} == set(range(2, 4 * len(STACKS) + 1, 2))
    plain = sum(line["wire_bytes"] for line in records if line["stage"] == 0)
    for stage, (stack, cosine) in enumerate(STACKS.items()):
        mine = [line for line in records if line["stage"] == stage]
        assert len({line["bucket"] for line in mine}) > 1
        looked = [line["fidelity"] for line in mine if "fidelity" in line]
        assert len(looked) == len(mine) / 2
        assert min(look["cosine"] for look in looked) > cosine - 1e-6, stack
        lossless = stage < EXACT
        assert (max(look["relative_l2"] for look in looked) < 1e-5) == lossless, stack
        keeps = any(word in stack for word in ("int", "fp8", "accumulate", "bits", "topk", "powersgd"))
        assert (max(look["residual_norm"] for look in looked) > 0) == keeps, stack
        assert all(look["wire_bytes"] > 0 for look in looked)
        sent = sum(line["wire_bytes"] for line in mine)
        assert sent <= plain if lossless else sent < plain, stack


def test_a_run_says_which_codes_it_chooses(tmp_path: Path) -> None:
    """When it uses one first, and when it uses another: after two measurements, in every second step."""
    text = f"{HEAD}hooks: [{{auto_bits: {{floor: 0.9, every: 2}}}}]\nstages: [{{train: {{steps: 8}}}}]\n"
    folder = run_pipeline(tmp_path, text, 2)
    buckets = {str(line["bucket"]) for line in lines(folder, "buckets") if line["kind"] == "gradient"}
    chosen = [event for event in events(folder) if event["event"] == "choices"]
    assert [(event["step"], event["choices"]) for event in chosen] == [
        (step, {"gradient": dict.fromkeys(sorted(buckets), code)})
        for step, code in ((1, "int8"), (5, "int4"))
    ]


EXPERTS = """
import random
import torch
from torch import nn

class Samples(torch.utils.data.Dataset):
    '''Which experts take part, and gradients; in the end all experts, with zeros.'''

    def __len__(self):
        return 2 * 26

    def __getitem__(self, place):
        chance = random.Random(place)
        if place >= 2 * 12:
            return {"used": torch.ones(3), "gradients": torch.zeros(4, 36, dtype=torch.float64)}
        used = torch.tensor([float(chance.random() < 0.35) for _ in range(3)])
        generator = torch.Generator().manual_seed(place)
        return {"used": used, "gradients": torch.randn(4, 36, dtype=torch.float64, generator=generator)}

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 6, dtype=torch.float64) for _ in range(4))

    def forward(self, used, gradients):
        total = 0.0
        for index in (0, *(1 + used[0].nonzero().flatten()).tolist()):
            params = torch.cat([param.flatten() for param in self.layers[index].parameters()])
            total = total + (params * gradients[0, index]).sum()
        return total
"""
UNUSED = """
model: experts.Experts
data: experts.Samples
loss: model
loader: {batch_size: 1, shuffle: false}
optimizer: {sgd: {lr: 1.0}}
ddp: {find_unused_parameters: true, gradient_as_bucket_view: VIEW}
accumulate: ACCUMULATE
hooks: HOOKS
stages: [{train: {epochs: 1}}, save]
"""


@pytest.mark.parametrize(("view", "accumulate"), [("true", 1), ("false", 1), ("true", 2)])
def test_nothing_is_lost_of_experts_that_no_rank_uses(tmp_path: Path, view: str, accumulate: int) -> None:
    """DDP throws away what is sent for them. After steps of zeros, weights are those of plain DDP."""
    (tmp_path / "experts.py").write_text(EXPERTS)
    text = UNUSED.replace("VIEW", view).replace("ACCUMULATE", str(accumulate))
    plain = weights(run_pipeline(tmp_path, text.replace("HOOKS", "[]"), 2, "plain"))
    for name, stack in (("topk", "[{topk: {density: 0.2}}]"), ("powersgd", "[{powersgd: {rank: 1}}]")):
        hooked = weights(run_pipeline(tmp_path, text.replace("HOOKS", stack), 2, name))
        for key, value in plain.items():
            assert (hooked[key] - value).abs().max() < 1e-12, (name, key)


def run_in_turns(folder: Path, run_dir: Path, resuming: bool) -> int:
    """A rank of a run whose ranks were placed on two hosts in turns."""
    name = "ab"[int(os.environ["RANK"]) % 2]
    with mock.patch("socket.gethostname", return_value=name):
        return run_worker(load(folder / "p.yaml"), run_dir, resuming="yes" if resuming else "no")


def test_hosts_whose_ranks_lie_in_turns(tmp_path: Path) -> None:
    """Gradients and weights are averaged inside a host, which the audit sees at every step; between hosts
    goes what the across leg sends, and nothing else. The run goes on where it was, bit for bit.
    """
    text = (
        f"{HEAD}hooks: [{{hierarchical: {{within: [shared_memory], across: [int8]}}}}]\n"
        "audit: {every: 1}\ncheckpoint: {every: 2, keep: 9}\n"
        "stages:\n  - train: {steps: 3}\n"
        "  - train: {steps: 4, sync: {hierarchical_sgd: {within: 1, across: 4}}}\n  - save\n"
    )
    (tmp_path / "p.yaml").write_text(text)
    run_dir = tmp_path / "run"
    assert as_processes(4, run_in_turns, tmp_path, run_dir, False, cwd=tmp_path) == [0] * 4
    expected = weights(run_dir)
    records = [line for line in lines(run_dir, "buckets") if line["kind"] == "gradient"]
    assert {line["stage"] for line in records} == {0, 1}
    for line in records:
        across = sum(leg["wire_bytes"] for leg in line["legs"] if leg["group"].startswith("across"))
        assert line["between_hosts_bytes"] == across
        assert (across > 0) == (line["stage"] == 0)
    for checkpoint in (run_dir / "checkpoints").glob("step-*[4-9]"):
        shutil.rmtree(checkpoint)
    assert as_processes(4, run_in_turns, tmp_path, run_dir, True, cwd=tmp_path) == [0] * 4
    assert [event["step"] for event in events(run_dir) if event["event"] == "resumed"] == [2]
    assert all(torch.equal(value, expected[name]) for name, value in weights(run_dir).items())


def run_on_this_host(folder: Path, run_dir: Path) -> int:
    return run_worker(load(folder / "p.yaml"), run_dir, resuming="yes")


def test_ranks_of_two_hosts_go_on_as_those_of_one(tmp_path: Path) -> None:
    """In the middle of a period the hosts have other weights and momentum: ranks begin from their mean."""
    text = f"{HEAD}checkpoint: {{every: 2, keep: 9}}\naudit: {{every: 1}}\nhooks: [int8]\nstages:\n"
    text += "  - train: {steps: 6, sync: {hierarchical_sgd: {within: 1, across: 4}}}\n"
    (tmp_path / "p.yaml").write_text(text)
    run_dir = tmp_path / "run"
    assert as_processes(4, run_in_turns, tmp_path, run_dir, False, cwd=tmp_path) == [0] * 4
    for checkpoint in (run_dir / "checkpoints").glob("step-*[4-9]"):
        shutil.rmtree(checkpoint)
    assert as_processes(4, run_on_this_host, tmp_path, run_dir, cwd=tmp_path) == [0] * 4
    assert [event["step"] for event in events(run_dir) if event["event"] == "resumed"] == [2]


LOSSES = """
import torch

calls = 0

def huge(output, target):
    return torch.nn.functional.cross_entropy(output, target) * 1e8

def sometimes_infinite(output, target):
    global calls
    calls += 1
    loss = torch.nn.functional.cross_entropy(output, target)
    return loss * float("inf") if calls == 6 else loss
"""


def test_fp16_says_in_which_bucket_it_overflowed(tmp_path: Path) -> None:
    """An event with the parameters, each step; it comes from a finite gradient, which a later step shows."""
    (tmp_path / "losses.py").write_text(LOSSES)
    text = HEAD.replace("lr: 0.02", "lr: 1.0e-12") + "loss: losses.huge\nhooks: [fp16]\non_nan: continue\n"
    folder = run_pipeline(tmp_path, text + "stages: [{train: {steps: 4}}]\n", 2)
    told = [event for event in events(folder) if event["event"] == "overflow"]
    assert told
    assert told[0]["step"] == 1
    assert told[0]["hook"] == "fp16"
    buckets = {line["bucket"]: line["params"] for line in lines(folder, "buckets")}
    assert told[0]["params"] == buckets[told[0]["bucket"]]


def test_a_gradient_that_is_infinite_itself_is_no_overflow(tmp_path: Path) -> None:
    """The step is skipped on all ranks, and what topk keeps is not poisoned by it."""
    (tmp_path / "losses.py").write_text(LOSSES)
    text = HEAD + "loss: losses.sometimes_infinite\nprecision: fp16\nhooks: [fp16, {topk: {density: 0.3}}]\n"
    folder = run_pipeline(tmp_path, text + "stages: [{train: {steps: 12}}]\n", 2)
    happened = [event["event"] for event in events(folder)]
    assert happened.count("step_skipped") == 1
    assert "overflow" not in happened
    assert summary(folder)["loss"] < 3
    after = [line["mean_loss"] for line in lines(folder, "steps")][-3:]
    assert all(loss is not None and loss < 3 for loss in after)


SLOW = """
import time
import torch

class Nap(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(0.15)
        return gradient

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 3000), torch.nn.Linear(3000, 100)])
        self.head = torch.nn.Linear(100, 3000)
        self.last = torch.nn.Linear(3000, 10)

    def forward(self, x):
        x = self.layers[1](torch.relu(self.layers[0](x.flatten(1))))
        return self.last(torch.relu(self.head(Nap.apply(x))))
"""


@pytest.mark.alone
@pytest.mark.parametrize(
    "stack", ["[{hierarchical: {hosts: 2, across: [powersgd]}}]", "[powersgd, fp16]", "[shared_memory]"]
)
def test_backward_goes_on_while_hooks_communicate(tmp_path: Path, stack: str) -> None:
    """All collectives of the first bucket are over before backward, which naps, has filled the last one."""
    (tmp_path / "napping.py").write_text(SLOW)
    text = HEAD[HEAD.index("data:") :] + f"model: napping.Net\nhooks: {stack}\n"
    folder = run_pipeline(tmp_path, text + "stages: [{train: {steps: 4}}]\n", 4)
    steps: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in lines(folder, "buckets"):
        steps.setdefault((line["rank"], line["step"]), []).append(line)
    assert len(steps) == 16
    in_time = [mine[0]["done_us"] < mine[-1]["ready_us"] for mine in steps.values() if len(mine) > 1]
    assert len(in_time) == 16
    assert sum(in_time) >= 14  # a rank that the machine holds up for 150 ms is nobody's fault


def test_the_legs_of_hierarchical_overlap_across_buckets(tmp_path: Path) -> None:
    """While one bucket is between hosts, another is inside one."""
    text = HEAD.replace("[600, 600]", "[600, 600, 600, 600]") + "hooks: [{hierarchical: {hosts: 2}}]\n"
    folder = run_pipeline(tmp_path, text + "stages: [{train: {steps: 10}}]\n", 4)
    steps: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in lines(folder, "buckets"):
        steps.setdefault((line["rank"], line["step"]), []).append(line)
    overlaps = 0
    for buckets in steps.values():
        legs = [(line["bucket"], leg) for line in buckets for leg in line["legs"]]
        inside = [(bucket, leg) for bucket, leg in legs if leg["group"].startswith("within")]
        between = [(bucket, leg) for bucket, leg in legs if leg["group"].startswith("across")]
        overlaps += any(
            one != other and a["start_us"] < b["done_us"] and b["start_us"] < a["done_us"]
            for one, a in inside
            for other, b in between
        )
    assert overlaps > len(steps) / 4


def test_hosts_that_flags_make_uneven_are_bad_input(tmp_path: Path) -> None:
    """Told once, at the key, with exit code 2."""
    (tmp_path / "p.yaml").write_text(
        HEAD + "hooks: [{hierarchical: {hosts: 2}}]\nstages: [{train: {steps: 1}}]\n"
    )
    done = ddprun("p.yaml", "--nproc-per-node", "3", cwd=tmp_path)
    assert done.code == 2
    assert done.stderr.count("2 does not divide 3 ranks") == 1
    assert "p.yaml:8:8: hooks: " in done.stderr
    assert "Traceback" not in done.stderr
