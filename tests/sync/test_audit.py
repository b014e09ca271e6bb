"""The parameter audit: what drifts and may, what drifts and may not."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.running import events, run_pipeline, run_to_end, summary, weights
from tests.ranks import ddprun

HEAD = """
model:
  mlp: {inputs: 64, hidden: [32], outputs: 10}
data: digits
loader: {batch_size: 8}
optimizer: OPTIMIZER
audit: {every: 2}
launch: {nproc_per_node: 4}
"""
SGD = "{sgd: {lr: 0.05, momentum: 0.9}}"
FAULTY = """
import os
import torch

class Flipping(torch.optim.SGD):
    '''Flips one bit of one weight on one rank.'''

    def __init__(self, params, rank, at, **options):
        super().__init__(params, **options)
        self.rank, self.at, self.steps = rank, at, 0

    def step(self, closure=None):
        super().step(closure)
        self.steps += 1
        if self.steps == self.at and int(os.environ["RANK"]) == self.rank:
            bits = self.param_groups[0]["params"][2].data.view(-1).view(torch.int32)
            bits[5] ^= 1
"""


def audits(run: Path) -> list[dict[str, Any]]:
    return [event for event in events(run) if event["event"] == "audit"]


def run(folder: Path, stages: str, ranks: int = 4, name: str = "run") -> list[dict[str, Any]]:
    text = HEAD.replace("OPTIMIZER", SGD) + f"stages:\n{stages}"
    return audits(run_pipeline(folder, text, ranks, name))


def test_plain_ddp_keeps_ranks_equal_bit_for_bit(tmp_path: Path) -> None:
    """Every second step, with and without lossy hooks; nothing is said on the screen about it."""
    found = run(tmp_path, "  - train: {steps: 6}\n  - train: {steps: 6, hooks: [powersgd, int8]}\n")
    assert [look["step"] for look in found] == [2, 4, 6, 8, 10, 12]
    assert all(look["equal"] and look["largest_distance"] == 0 for look in found)
    assert summary(tmp_path / "run")["audit"] == {
        "equal": True,
        "largest_distance": 0.0,
        "largest_distance_ever": 0.0,
    }


def test_mutated_ranks_drift_and_meet_again_after_the_average(tmp_path: Path) -> None:
    """DDP averages gradients and does not undo it; the audit says by how much the ranks are apart."""
    noisy = "  - train: {steps: 6, mutate: {noise: {std: 0.01}}}\n  - average\n  - train: {steps: 2}\n"
    found = run(tmp_path, noisy)
    assert [(look["expected"], look["equal"]) for look in found] == [
        ("apart", False),
        ("apart", False),
        ("apart", False),
        ("common", True),
        ("common", True),
    ]
    assert 0.01 < found[0]["largest_distance"] < found[2]["largest_distance"] < 1
    assert found[0]["farthest"] in ("1.weight", "3.weight", "1.bias", "3.bias")


def test_a_flipped_bit_on_one_rank_is_caught_and_named(tmp_path: Path) -> None:
    """The lowest bit of one weight on rank 2: the run ends with the parameter and the rank, exit code 1."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    optimizer = "{faulty.Flipping: {rank: 2, at: 5, lr: 0.05}}"
    text = HEAD.replace("OPTIMIZER", optimizer) + "stages: [{train: {steps: 20}}]\n"
    (tmp_path / "p.yaml").write_text(text)
    done = ddprun("p.yaml", cwd=tmp_path)
    assert done.code == 1
    assert "after step 6 of stages[0].train the ranks hold different parameters" in done.stderr
    assert '"3.weight" differs on rank 2;' in done.stderr
    assert done.stderr.count("the ranks hold different parameters") == 1, "told once"
    assert "Traceback" not in done.stderr


EXPECTED = {
    "{local_sgd: {every: 4}}": ["apart", "common", "apart", "common"],
    "{hierarchical_sgd: {within: 1, across: 4, hosts: 2}}": ["host", "common", "host", "common"],
    "{hierarchical_sgd: {within: 2, across: 4, hosts: 2}}": ["host", "common", "host", "common"],
    "{broadcast: {every: 4, source: 1}}": ["apart", "common", "apart", "common"],
    "{diloco: {every: 4}}": ["apart", "common", "apart", "common"],
    "{diloco: {every: 4, fragments: 2, overlap_steps: 1}}": ["apart"] * 4 + ["common"],
}


def test_ranks_are_equal_exactly_where_the_policy_says_so(tmp_path: Path) -> None:
    """Bit for bit after an average, through lossy hooks too; apart in between; equal inside hosts."""
    stages = [(sync, hooks) for hooks in ("[]", "[int8]") for sync in EXPECTED]
    stages.remove(("{broadcast: {every: 4, source: 1}}", "[int8]"))  # it goes without hooks
    text = "".join(f"  - train: {{steps: 8, sync: {sync}, hooks: {hooks}}}\n" for sync, hooks in stages)
    found = run(tmp_path, text)
    for index, (sync, hooks) in enumerate(stages):
        looks = [look for look in found if 8 * index < look["step"] <= 8 * (index + 1)]
        assert [look["expected"] for look in looks] == EXPECTED[sync], (sync, hooks)
        for look in looks:
            assert look["equal"] == (look["expected"] == "common")
            assert look["differing"] == 0 or look["expected"] == "apart"


def test_noop_leaves_ranks_apart_until_the_stage_ends(tmp_path: Path) -> None:
    """Sending nothing is no policy that keeps ranks equal."""
    found = run(tmp_path, "  - train: {steps: 4, hooks: [noop]}\n  - save\n")
    assert [(look["expected"], look["equal"]) for look in found] == [
        ("apart", False),
        ("apart", False),
        ("common", True),
    ]


MUTATIONS = """
import os
import torch

def shift(model, by):
    with torch.no_grad():
        for param in model.parameters():
            param.add_(by * int(os.environ["RANK"]))
"""


def test_a_mutation_of_ones_own_is_applied_after_each_synchronisation_but_the_last(tmp_path: Path) -> None:
    """Rank r adds r at the start and after steps 2 and 4 of 6: with a learning rate of nothing the mean of
    0, 1, 2, 3 is added three times.
    """
    (tmp_path / "mutations.py").write_text(MUTATIONS)
    head = HEAD.replace("OPTIMIZER", "{sgd: {lr: 1.0e-30}}")
    stages = (
        "stages:\n  - train: {steps: 6, sync: {average: {every: 2}}, mutate: {mutations.shift: {by: 0.5}}}\n"
    )
    mutated = weights(run_pipeline(tmp_path, head + stages + "  - save\n", 4))
    plain = weights(run_pipeline(tmp_path, head + "stages:\n  - train: {steps: 1}\n  - save\n", 4, "plain"))
    for name, value in plain.items():
        assert (mutated[name] - value - 3 * 0.5 * 1.5).abs().max() < 1e-5, name


ACTNORM = """
import os
import torch
from torch import nn

class ActNorm(nn.Module):
    '''Sets a scale from the first data that it trains on.'''

    def __init__(self, frozen=False):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.scale, self.is_set = nn.Parameter(torch.ones(64), requires_grad=not frozen), False

    def forward(self, images):
        flat = images.flatten(1)
        if self.training and not self.is_set:
            self.scale.data.copy_(1 / (flat.std(0) + 0.1))
            self.is_set = True
        return self.layer(flat * self.scale)
"""
UNAUDITED = """
model: {nets.ActNorm: {frozen: FROZEN}}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.05}}
checkpoint: {every: 3}
stages: [{STAGES}, save]
"""


def ended(folder: Path, text: str, ranks: int) -> tuple[int, str]:
    """How a run ends: whether any rank failed, and what all of them printed."""
    (folder / "nets.py").write_text(ACTNORM)
    (folder / "faulty.py").write_text(FAULTY)
    codes, printed = run_to_end(folder, text, ranks)
    return max(codes), printed


@pytest.mark.parametrize(
    ("stages", "frozen", "ranks", "told"),
    [
        ("train: {steps: 6}", "false", 2, 'after step 1 of stages[0].train TEXT"scale" differs on rank 1;'),
        ("train: {steps: 6}", "true", 2, 'after step 1 of stages[0].train TEXT"scale" differs on rank 1;'),
        ("forward: {steps: 2}", "false", 2, 'at the end of stages[0].forward TEXT"scale" differs on rank 1;'),
        (
            "train: {steps: 6, sync: {hierarchical_sgd: {across: 4, hosts: 2}}}",
            *("false", 4, 'after step 1 of stages[0].train TEXT"scale" differs on ranks 1, 3;'),
        ),
    ],
)
def test_parameters_that_forward_sets_from_data_end_the_run(
    tmp_path: Path, stages: str, frozen: str, ranks: int, told: str
) -> None:
    """Without any `audit`: as soon as the policy says that ranks hold the same, with parameter and ranks."""
    code, printed = ended(tmp_path, UNAUDITED.replace("STAGES", stages).replace("FROZEN", frozen), ranks)
    text = "the ranks hold different parameters, which the sync policy does not allow: "
    assert code == 1
    assert told.replace("TEXT", text) in printed
    assert "a forward pass that sets them from its data" in printed


@pytest.mark.parametrize(
    "stages",
    [
        "forward: {steps: 1}, broadcast, train: {steps: 4}",
        "train: {steps: 1, sync: independent}, broadcast, train: {steps: 4}",
        "train: {steps: 5, sync: {local_sgd: {every: 2}}}",
        "train: {steps: 5, sync: independent}",
        "train: {steps: 5, hooks: [noop]}",
    ],
)
def test_they_may_where_ranks_are_made_equal_afterwards(tmp_path: Path, stages: str) -> None:
    """As the error says, or by the policy."""
    stages = "[{" + stages.replace(", broadcast, ", "}, broadcast, {") + "}, save]"
    text = UNAUDITED.replace("[{STAGES}, save]", stages).replace("FROZEN", "false")
    code, printed = ended(tmp_path, text, 2)
    assert code == 0, printed


@pytest.mark.parametrize(
    ("sync", "checkpoint", "told"),
    [
        ("every_step", 2, "before the checkpoint of step 6"),
        ("{hierarchical_sgd: {across: 9, hosts: 1}}", 2, "before the checkpoint of step 6"),
        ("every_step", 100, "at the end of stages[0].train"),
    ],
)
def test_ranks_that_drift_later_are_found_before_anything_is_kept(
    tmp_path: Path, sync: str, checkpoint: int, told: str
) -> None:
    """One flipped bit of one weight, without any `audit`; ranks of one host, too."""
    optimizer = "{faulty.Flipping: {rank: 1, at: 5, lr: 0.05}}"
    text = HEAD.replace("OPTIMIZER", optimizer).replace("audit: {every: 2}\n", "")
    text += f"stages: [{{train: {{steps: 9}}}}, save]\ncheckpoint: {{every: {checkpoint}}}\nsync: {sync}\n"
    code, printed = ended(tmp_path, text, 2)
    assert code == 1
    assert f"{told} the ranks hold different parameters" in printed
    assert '"3.weight" differs on rank 1;' in printed
    assert not (tmp_path / "run/model.safetensors").exists()


def test_a_run_may_go_on_with_drift(tmp_path: Path) -> None:
    """It is told once, and each time an event says so."""
    text = UNAUDITED.replace("STAGES", "train: {steps: 6}").replace("FROZEN", "false")
    code, printed = ended(tmp_path, text + "audit: {on_drift: continue}\n", 2)
    assert code == 0
    assert printed.count("the ranks hold different parameters") == 1
    found = audits(tmp_path / "run")
    assert [look["step"] for look in found] == [1, 3, 6, 6, 6, 6]
    assert not any(look["equal"] for look in found)
    assert not summary(tmp_path / "run")["audit"]["equal"]
