"""`channels_last` and `sync_batchnorm`: how images lie in memory, and what BatchNorm normalises over."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from ddprun.config import PipelineError, load
from ddprun.engine import build
from ddprun.engine.worker import run_worker
from tests.engine.running import events, run_pipeline, run_to_end, weights
from tests.ranks import as_processes

MODULE = """
import torch
from torch import nn


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, 8, 8, generator=generator, dtype=torch.float64), index % 3


class Net(nn.Module):
    def __init__(self, channels_last=False):
        super().__init__()
        self.channels_last = channels_last
        self.first, self.second = nn.Conv2d(6, 12, 3), nn.Conv2d(12, 12, 3)
        self.norm, self.head = nn.BatchNorm2d(12), nn.Linear(12, 3)
        self.double()

    def forward(self, images):
        for one in (images, self.first.weight):
            assert one.is_contiguous(memory_format=torch.channels_last) == self.channels_last
        return self.head(self.norm(self.second(self.first(images).relu())).mean((2, 3)))
"""
PIPELINE = """
model: {made.Net: {channels_last: CHANNELS_LAST}}
data: {train: made.Images, evaluate: made.Images}
channels_last: CHANNELS_LAST
optimizer: {sgd: {lr: 0.1, momentum: 0.9}}
loader: {batch_size: 4}
hooks: [{powersgd: {rank: 2}}]
ema: 0.9
checkpoint: {every: 4, keep: 9}
stages:
  - train: {steps: 6, hooks: []}
  - train: {steps: 6, sync: {diloco: {every: 3}}, hooks: []}
  - train: {steps: 6}
  - evaluate
  - save
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "made.py").write_text(MODULE)
    return tmp_path


def go_on(file: Path, run_dir: Path) -> int:
    return run_worker(load(file), run_dir, resuming="yes")


def test_channels_last_trains_alike_and_resumes_to_the_same_bits(folder: Path) -> None:
    """What is sent, averaged, kept and saved does not depend on how images lie in memory."""
    text = PIPELINE.replace("{steps: 6}", "{steps: 6, hooks: []}")
    plain = weights(run_pipeline(folder, text.replace("CHANNELS_LAST", "false"), 2, "plain"))
    found = weights(run_pipeline(folder, text.replace("CHANNELS_LAST", "true"), 2, "found"))
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-8)
    whole = run_pipeline(folder, PIPELINE.replace("CHANNELS_LAST", "true"), 2, "whole")
    broken = shutil.copytree(whole, folder / "broken")
    first, *later = sorted((broken / "checkpoints").glob("step-*"))  # a slow disk may have missed some
    for folder_of_step in later:
        shutil.rmtree(folder_of_step)
    (broken / "model.safetensors").unlink()
    assert as_processes(2, go_on, folder / "whole.yaml", broken, cwd=folder) == [0, 0]
    resumed = next(one for one in events(broken) if one["event"] == "resumed")
    assert resumed["step"] == int(first.name.removeprefix("step-")) < 18
    for name, value in weights(whole).items():
        assert torch.equal(weights(broken)[name], value)


def test_channels_last_is_for_what_has_four_dimensions(folder: Path) -> None:
    """A 3D convolution keeps its layout; lazy parameters have none yet."""
    (folder / "p.yaml").write_text(PIPELINE.replace("CHANNELS_LAST", "true"))
    loaded, cpu = load(folder / "p.yaml"), torch.device("cpu")
    model = build.move_and_convert_model(
        loaded, nn.Sequential(nn.Conv3d(2, 4, 3), nn.Conv2d(2, 4, 3)), cpu, None
    )
    volumes, images = (param for param in model.parameters() if param.dim() > 1)
    assert volumes.is_contiguous()
    assert images.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(PipelineError, match="channels_last: torch cannot convert modules with lazy"):
        build.move_and_convert_model(loaded, nn.Sequential(nn.LazyConv2d(4, 3)), cpu, None)


def test_sync_batchnorm_on_cpus_is_one_clear_error(folder: Path) -> None:
    """Before anything is built."""
    codes, told = run_to_end(folder, "sync_batchnorm: true\n" + PIPELINE.replace("CHANNELS_LAST", "false"))
    assert codes == [2, 2]
    assert (
        "p.yaml:1:17: sync_batchnorm: torch's SyncBatchNorm works on GPUs only, and the ranks run on " in told
    )
    assert "Traceback" not in told


def test_sync_batchnorm_replaces_batchnorm_elsewhere(folder: Path) -> None:
    """Torch's own conversion, with the same names."""
    (folder / "p.yaml").write_text("sync_batchnorm: true\n" + PIPELINE.replace("CHANNELS_LAST", "false"))
    model = nn.Sequential(nn.Conv2d(6, 12, 3), nn.BatchNorm2d(12))
    made = build.move_and_convert_model(load(folder / "p.yaml"), model, torch.device("meta"), None)
    assert isinstance(list(made.children())[1], nn.SyncBatchNorm)
    assert {name for name, _ in made.named_buffers()} >= {"1.running_mean", "1.running_var"}
