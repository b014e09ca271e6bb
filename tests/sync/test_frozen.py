"""Frozen parameters: they are not sent while all ranks hold the same, and are made equal if they do not."""

import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from ddprun.config import load
from ddprun.explain.explain import explain
from ddprun.explain.text import render_text as explain_text
from ddprun.sync.audit import checksums
from ddprun.zoo.weight_functions import noise
from ddprun_hooks.buckets import view_as_real
from tests.checkpoint.runs import as_rank
from tests.engine.running import events, lines, run_pipeline, summary, weights
from tests.engine.test_session import first_part, second_part, unbroken
from tests.ranks import as_processes

MODULE = """
import os
from pathlib import Path
import torch
from torch import nn

RANK = int(os.environ.get("RANK", "0"))

class Lora(nn.Module):
    '''A frozen layer with a trained low-rank part beside it. In one of `every` passes the layer changes.'''

    def __init__(self, wide=512, rank=2, every=0, at=0):
        super().__init__()
        self.base = nn.Linear(64, wide)
        self.head = nn.Linear(wide, 10)
        self.quantised = nn.Parameter(torch.arange(4000), requires_grad=False)
        self.requires_grad_(False)
        with torch.no_grad():
            self.base.weight.copy_(torch.arange(64 * wide).view(wide, 64) % 7 - 3).div_(64)
        self.down, self.up = nn.Linear(64, rank, bias=False), nn.Linear(rank, wide, bias=False)
        self.every, self.at, self.passes = every, at, 0

    def forward(self, images):
        flat = images.flatten(1)
        if self.every and self.passes % self.every == self.at:
            self.base.weight.data.add_(RANK)  # unseen by torch's own count of versions
        self.passes += 1
        Path(f"saw-{RANK}").write_text(str(self.base.weight[0, 0].item()))
        return self.head((self.base(flat) + self.up(self.down(flat))).relu())
"""
PIPELINE = """
model: {lora.Lora: OPTIONS}
data: digits
loader: {batch_size: 8}
optimizer: {adamw: {lr: 0.01}}
stages:
"""
TRAINED = ["down.weight", "up.weight"]


def prepared(folder: Path, options: str, more: str) -> str:
    (folder / "lora.py").write_text(MODULE)
    return PIPELINE.replace("OPTIONS", options) + more


def test_a_policy_sends_what_is_trained_and_less_than_plain_ddp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every policy, both stages that make ranks equal, and the end of independent ranks: the records name
    trained parameters only, and `explain` counts the same bytes.
    """
    policies = {
        "every_step": "every_step",
        "diloco": "{diloco: {every: 4}}",
        "overlapped": "{diloco: {every: 4, fragments: 2, overlap_steps: 2}}",
        "local_sgd": "{local_sgd: {every: 4, optimizer_state: average}}",
        "hierarchical": "{hierarchical_sgd: {within: 2, across: 4, hosts: 2}}",
        "broadcast": "{broadcast: {every: 4, source: 1}}",
        "independent": "independent",
    }
    stages = [f"  - train: {{steps: 8, sync: {sync}}}\n" for sync in policies.values()]
    stages += ["  - average\n", "  - broadcast: {source: 2}\n", "  - save\n"]
    text = prepared(tmp_path, "{}", "".join(stages))
    run = run_pipeline(tmp_path, text, 4)
    sent: dict[int, int] = defaultdict(int)
    for bucket in lines(run, "buckets"):
        sent[bucket["stage"]] += bucket["wire_bytes"]
        names = [name for name in bucket["params"] if bucket["kind"] != "optimizer"]
        assert set(names) <= set(TRAINED), bucket
    by_name = dict(zip([*policies, "average", "broadcast stage"], sent.values(), strict=False))
    assert 0 < 3 * by_name["diloco"] < by_name["every_step"], by_name
    monkeypatch.chdir(tmp_path)
    explained = explain(load(tmp_path / "run.yaml"), hosts=1, ranks_per_host=4)
    assert "5 of them" in explain_text(explained)
    for stage in explained.stages[:-1]:
        assert stage.sent_in_stage is not None
        assert stage.sent_in_stage.all_ranks == sent[stage.index], stage.stage
    fresh = torch.arange(64 * 512).view(512, 64) % 7 - 3
    assert torch.equal(weights(run)["base.weight"], fresh / 64)
    assert not [one for one in events(run) if one["event"] == "frozen_differ"]


def test_a_frozen_parameter_that_changes_is_made_equal_where_ranks_synchronise(tmp_path: Path) -> None:
    """In each stage every rank adds its own number once, behind torch's back: the next synchronisation makes
    that the mean, or the source's; it is reported once, and the audit finds ranks equal.
    """
    policies = [
        "{local_sgd: {every: 4}}",
        "{diloco: {every: 6, fragments: 2, overlap_steps: 2}}",
        "{hierarchical_sgd: {within: 2, across: 4, hosts: 2}}",
        "{average: {every: 12}}",
        "{broadcast: {every: 4, source: 3}}",
        "independent",
    ]
    stages = "".join(f"  - train: {{steps: 12, sync: {sync}}}\n" for sync in policies) + "  - save\n"
    text = prepared(tmp_path, "{every: 12, at: 6}", f"{stages}audit: {{every: 12}}\n")
    run = run_pipeline(tmp_path, text, 4)
    assert summary(run)["audit"]["equal"]
    base = weights(run)["base.weight"]
    assert base[0, 0].item() == -3 / 64 + 1.5 * 5 + 3  # the mean of 0 to 3, and once rank 3's
    assert weights(run)["quantised"].tolist() == list(range(4000))
    sent = [one for one in lines(run, "buckets") if "base.weight" in one["params"] and one["rank"] == 0]
    assert [one["step"] for one in sent] == [8, 20, 32, 48, 56, 72]
    (found,) = [one for one in events(run) if one["event"] == "frozen_differ"]
    assert found["params"] == ["base.weight"]


def test_plain_ddp_makes_them_equal_at_the_stages_end_and_says_so(tmp_path: Path) -> None:
    """Plain DDP sends no parameters: what has changed differently is noticed when the stage ends."""
    text = prepared(tmp_path, "{every: 100, at: 4}", "  - train: {steps: 6}\n  - forward: {steps: 1}\n")
    run = run_pipeline(tmp_path, text, 3)
    saw = {(tmp_path / f"saw-{rank}").read_text() for rank in range(3)}
    assert saw == {str(-3 / 64 + 1)}
    (found,) = [one for one in events(run) if one["event"] == "frozen_differ"]
    assert found["where"] == "stages[0].train, step 6"


def test_an_evaluation_inside_a_stage_measures_their_mean(tmp_path: Path) -> None:
    """As an evaluate stage after as many steps does; then each rank trains on with its own."""
    stages = {
        "inside": "  - train: {steps: 8, evaluate: {every: 6}}\n",
        "without": "  - train: {steps: 8}\n",
        "after": "  - train: {steps: 6}\n  - evaluate\n",
    }
    runs = {}
    for name, stage in stages.items():
        text = prepared(tmp_path, "{every: 100, at: 4}", f"{stage}  - save\n")
        runs[name] = run_pipeline(tmp_path, text, 3, name)
    inside, after = (
        next(one["loss"] for one in events(runs[name]) if one["event"] == "evaluated")
        for name in ("inside", "after")
    )
    assert inside == after
    kept, expected = weights(runs["inside"]), weights(runs["without"])
    assert all(torch.equal(kept[name], value) for name, value in expected.items())
    (found,) = [one for one in events(runs["inside"]) if one["event"] == "frozen_differ"]
    assert found["params"] == ["base.weight"]


def test_a_difference_under_way_and_a_resume_keep_the_bits(tmp_path: Path) -> None:
    """After six steps ranks differ while an exchange is in flight; they become equal at the seventh."""
    stages = "  - train: {steps: 100, sync: {diloco: {every: 4, overlap_steps: 3}}}\n"
    (tmp_path / "p.yaml").write_text(prepared(tmp_path, "{every: 100, at: 2}", stages))
    whole = as_processes(3, unbroken, tmp_path, cwd=tmp_path)
    assert (tmp_path / "saw-0").read_text() == (tmp_path / "saw-2").read_text() == str(-3 / 64 + 1)
    as_processes(3, first_part, tmp_path, cwd=tmp_path)
    assert (tmp_path / "saw-0").read_text() != (tmp_path / "saw-2").read_text()
    # The model counts its passes outside of its state: in the resumed run none is the one that changes it.
    (tmp_path / "p.yaml").write_text(prepared(tmp_path, "{}", stages))
    assert as_processes(3, second_part, tmp_path, cwd=tmp_path) == whole


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 ranks that has ended in the middle of a round, with a checkpoint there."""
    folder = tmp_path_factory.mktemp("stopped")
    more = "  - train: {steps: 6, sync: {diloco: {every: 4}}}\n  - save\ncheckpoint: {every: 3, keep: 3}\n"
    (folder / "p.yaml").write_text(prepared(folder, "{every: 100, at: 50}", more))
    assert as_processes(3, as_rank, folder, folder / "run", False, cwd=folder) == [0] * 3
    return folder


def tensors(file: Path) -> set[str]:
    with safe_open(file, "pt") as found:
        return set(found.keys())


def test_a_checkpoint_holds_them_once(stopped: Path) -> None:
    """Between two synchronisations each rank writes its own trained parameters, and one writes the rest."""
    checkpoint = stopped / "run/checkpoints/step-0000000003"
    checkpoint = checkpoint if checkpoint.exists() else next((stopped / "run/checkpoints").glob("step-*3"))
    frozen = {f"frozen/{name}.{kind}" for name in ("base", "head") for kind in ("weight", "bias")}
    assert {*frozen, "frozen/quantised"} <= tensors(checkpoint / "shared.safetensors")
    for rank in range(3):
        own = tensors(next(checkpoint.glob(f"rank-*{rank}.safetensors")))
        assert {name for name in own if "base." in name or "head." in name} == set()
        assert {f"parameters/{name}" for name in TRAINED} <= own


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_resume_gets_them_back(stopped: Path, ranks: int) -> None:
    """On as many ranks and on fewer, from the checkpoint in the middle of a round."""
    folder = stopped / f"{ranks}"
    folder.mkdir()
    for name in ("p.yaml", "lora.py"):
        (folder / name).write_text((stopped / name).read_text())
    shutil.copytree(stopped / "run", folder / "run")
    for checkpoint in (folder / "run/checkpoints").glob("step-*6"):
        shutil.rmtree(checkpoint)
    assert as_processes(ranks, as_rank, folder, folder / "run", True, cwd=folder) == [0] * ranks
    before, now = weights(stopped / "run"), weights(folder / "run")
    for name in before:
        if name not in TRAINED or ranks == 3:
            assert torch.equal(before[name], now[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.bool])
@pytest.mark.parametrize("numel", [0, 1, 7, 70_001])
def test_a_checksum_goes_by_the_bits(dtype: torch.dtype, numel: int) -> None:
    """A change anywhere changes it: one value, two equal values, two values that change places."""
    whole = (torch.arange(numel) % 251).to(dtype)
    changed = [whole.clone() for _ in range(3)]
    if numel > 1:
        view_as_real(changed[0]).view(torch.uint8).view(-1)[-1] ^= 1
        changed[1][0], changed[1][-1] = whole[-2], whole[-2]
        changed[2][0], changed[2][-2] = whole[-2], whole[0]
    distinct = [whole, *(one for one in changed if not torch.equal(one, whole))]
    found = checksums(distinct)
    assert len(set(found)) == len(distinct)
    assert checksums([whole.clone()]) == found[:1]
    if numel > 1 and dtype.is_floating_point:
        negated = whole.clone()
        negated[:2].neg_()
        assert checksums([negated]) != found[:1], "signs of two neighbours"


def test_noise_leaves_frozen_parameters_alone() -> None:
    layer = nn.Linear(3, 3)
    layer.bias.requires_grad_(False)
    before = {name: param.detach().clone() for name, param in layer.named_parameters()}
    noise(layer, std=1.0)
    assert torch.equal(layer.bias, before["bias"])
    assert not torch.equal(layer.weight, before["weight"])
