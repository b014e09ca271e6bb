"""Which device and backend ranks take, by what each of them has."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ddprun.config import LoadedPipeline, PipelineError
from ddprun.config.load import load
from ddprun.host import device
from ddprun.host.device import choose_backend, gpu_identifier, rank_device

PIPELINE = """
model: {mlp: {inputs: 64, outputs: 10}}
data: digits
optimizer: sgd
launch: {device: DEVICE, backend: BACKEND}
"""


def loaded(folder: Path, wanted: str = "auto", backend: str = "auto") -> LoadedPipeline:
    file = folder / "p.yaml"
    file.write_text(PIPELINE.replace("DEVICE", wanted).replace("BACKEND", backend))
    return load(file)


def on_hosts(*gpus: str | None) -> list[tuple[str, str | None]]:
    """Each rank's host and GPU, two ranks on a host."""
    return [(f"host{rank // 2}", gpu) for rank, gpu in enumerate(gpus)]


@pytest.mark.parametrize(
    ("gpus", "backend", "chosen"),
    [
        (("a", "b", "c"), "auto", "nccl"),
        (("a", "b", "b"), "auto", "gloo"),
        (("a", "b"), "gloo", "gloo"),
        (("a", "b"), "nccl", "nccl"),
        ((None, None), "auto", "gloo"),
    ],
)
def test_nccl_is_taken_where_each_rank_has_a_gpu_of_its_own(
    tmp_path: Path, gpus: tuple[str | None, ...], backend: str, chosen: str
) -> None:
    """Whatever number of GPUs each process sees: with srun --gpus-per-task=1 that is one."""
    assert choose_backend(loaded(tmp_path, backend=backend), on_hosts(*gpus)) == chosen


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            on_hosts("a", "b", "a"),
            r"nccl needs a GPU for each rank; rank 0 \(host0\) and rank 2 \(host1\) have the same one",
        ),
        (
            on_hosts("a", "b", None),
            r"device: rank 0 \(host0\) sees a GPU, and rank 2 \(host1\) sees none",
        ),
    ],
)
def test_ranks_that_do_not_fit_are_named(
    tmp_path: Path, given: list[tuple[str, str | None]], message: str
) -> None:
    """They would wait for each other while they join."""
    with pytest.raises(PipelineError, match=message):
        choose_backend(loaded(tmp_path, backend="nccl"), given)


def test_a_rank_offers_the_gpu_that_it_sees_by_its_identifier(tmp_path: Path) -> None:
    """Two ranks that see one GPU each, both of them as the first, have two."""
    pipeline = loaded(tmp_path, backend="nccl")
    found: list[tuple[str, str | None]] = []
    for uuid in ("GPU-1", "GPU-2"):
        properties = SimpleNamespace(uuid=uuid)
        with (
            mock.patch.object(device, "gpu_count", return_value=1),
            mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        ):
            place = rank_device(pipeline, len(found))
            assert place == torch.device("cuda", 0)
            found.append(("here", gpu_identifier(place)))
    assert choose_backend(pipeline, found) == "nccl"
