"""On an NVIDIA GPU: NCCL on one rank, Gloo on two ranks of one GPU, every precision, times from events."""

from pathlib import Path

import pytest
import torch

from ddprun.telemetry.records import PARTS
from tests.engine.running import lines, summary
from tests.gpu.conftest import on_gpu as ddprun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

QUICKSTART = Path(__file__).parents[2] / "pipelines" / "quickstart.yaml"
PLACES = {"nccl-1": ("1", "nccl"), "gloo-2": ("2", "gloo")}


def run(folder: Path, place: str, *settings: str) -> Path:
    ranks, backend = PLACES[place]
    changes = [
        f"--set={setting}" for setting in (f"launch.backend={backend}", "launch.device=cuda", *settings)
    ]
    done = ddprun(QUICKSTART, "--nproc-per-node", ranks, *changes, cwd=folder)
    assert done.code == 0, done.stderr
    assert summary(folder / done.run_dir)["backend"] == backend
    assert summary(folder / done.run_dir)["device"] == "cuda"
    return folder / done.run_dir


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "pure_bf16", "pure_fp16"])
def test_quickstart_learns_on_a_gpu_in_every_precision(tmp_path: Path, place: str, precision: str) -> None:
    """NCCL with one rank; Gloo with two ranks that share the GPU."""
    folder = run(tmp_path, place, f"precision={precision}")
    assert summary(folder)["metrics"]["accuracy"] > 0.95


@pytest.mark.parametrize("place", PLACES)
def test_times_from_events_are_in_order_and_add_up(tmp_path: Path, place: str) -> None:
    """As on the CPU: ready <= launch <= done, and the parts of a step are the step."""
    folder = run(
        tmp_path,
        place,
        "stages=[{train: {steps: 30}}]",
        "model.mlp.hidden=[1500, 1500]",
        "ddp.bucket_cap_mb=1",
    )
    for line in lines(folder, "buckets"):
        assert line["ready_us"] <= line["launch_us"] <= line["done_us"]
    steps = lines(folder, "steps")
    assert len(steps) == 30 * int(PLACES[place][0])
    for line in steps:
        assert sum(line[part] for part in PARTS) == line["step_us"]
        assert min(line[part] for part in PARTS) >= 0


def test_the_same_seed_gives_bitwise_the_same_run_on_a_gpu(tmp_path: Path) -> None:
    """With the convolutions and BatchNorm of the cnn."""
    from safetensors.torch import load_file

    saved = [
        load_file(
            run(tmp_path, "gloo-2", "model=cnn", "stages=[{train: {steps: 40}}, save]") / "model.safetensors"
        )
        for _ in range(2)
    ]
    assert all(torch.equal(value, saved[1][name]) for name, value in saved[0].items())


def test_more_ranks_than_gpus_with_nccl_is_bad_input(tmp_path: Path) -> None:
    """Told before a rank starts, with the place in the file."""
    ranks = torch.cuda.device_count() + 1
    done = ddprun(QUICKSTART, "--nproc-per-node", str(ranks), "--set=launch.backend=nccl", cwd=tmp_path)
    assert done.code == 2
    assert "launch.backend: nccl needs a GPU for each rank" in done.stderr
