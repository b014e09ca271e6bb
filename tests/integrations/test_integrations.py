"""`ddprun.integrations`: scripts of three frameworks under torchrun, with `observe` and without it."""

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import Running, as_processes, ddprun, free_port

FRAMEWORKS = ["accelerate", "lightning", "transformers"]
STEPS = 9  # in 3 epochs of 8 batches of 4 samples, with 3 batches a step


@pytest.fixture(scope="module", params=FRAMEWORKS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what a framework's script has left: runs, and each rank's weights after them."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: pip install 'ddprun[{request.param}]'")
    folder = tmp_path_factory.mktemp(request.param)
    script = Path(__file__).with_name(f"{request.param}_script.py")
    flags = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    with Running(script, folder, cwd=folder, module=["-m", "torch.distributed.run", *flags]) as running:
        done = running.wait(170)
    assert f"{STEPS} steps observed: ddprun report {folder}/fp16" in done.stderr, done.stderr
    assert done.code == 1  # its last run fails
    return folder


def records(run_dir: Path, kind: str, rank: int) -> list[dict[str, Any]]:
    lines = (run_dir / kind / f"rank-{rank:05}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def summary(run_dir: Path) -> Any:
    return json.loads((run_dir / "summary.json").read_text())


def weights(folder: Path, name: str, rank: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / f"{name}-{rank}.pt")
    return found


def test_the_weights_keep_their_bits(runs: Path) -> None:
    for rank in range(2):
        plain, observed = (weights(runs, name, rank) for name in ("plain", "observed"))
        assert all(torch.equal(plain[name], observed[name]) for name in plain)


def test_a_step_is_what_the_framework_calls_one(runs: Path) -> None:
    """With the batches that were accumulated, of which an epoch's last step has fewer, and with a loss."""
    for rank in range(2):
        steps = records(runs / "observed", "steps", rank)
        assert [step["samples"] for step in steps] == [12, 12, 8] * 3
        assert len({step["loss"] for step in steps}) == STEPS
        for step in steps:
            assert all(step[f"{part}_us"] > 0 for part in ("forward", "backward", "optimizer"))


@pytest.mark.parametrize("runs", ["transformers"], indirect=True)
def test_the_loss_is_the_one_that_the_trainer_shows(runs: Path) -> None:
    """Of transformers, whose models return the sum over a batch divided by the tokens of all batches."""
    shown = json.loads((runs / "observed-losses.json").read_text())
    recorded = [step["mean_loss"] for step in records(runs / "observed", "steps", 0)]
    assert recorded == pytest.approx(shown, rel=1e-5)


def test_hooks_send_what_they_should(runs: Path) -> None:
    """2 bytes for each gradient, from the third step on."""
    params = weights(runs, "fp16", 0).values()
    numel = sum({param.data_ptr(): param.numel() for param in params}.values())  # some share their weights
    for rank in range(2):
        for name, size, first in (("observed", 4, 1), ("fp16", 2, 3)):
            buckets = records(runs / name, "buckets", rank)
            for step in range(first, STEPS + 1):
                assert sum(one["wire_bytes"] for one in buckets if one["step"] == step) == size * numel


@pytest.mark.parametrize("runs", ["lightning"], indirect=True)
def test_a_step_that_the_scaler_skips_is_a_step(runs: Path) -> None:
    """Accelerate and transformers have a scaler on a GPU only."""
    taken = [step["optimizer_us"] > 0 for step in records(runs / "fp16", "steps", 0)]
    assert taken == [False] + [True] * (STEPS - 1)


def test_an_exception_is_in_the_summary(runs: Path) -> None:
    """Of the rank that failed, after two steps."""
    found = summary(runs / "failed")
    assert (found["status"], found["steps"]) == ("failed", 2)
    assert found["error"] == {"rank": 1, "message": "ValueError: a broken sample"}


def test_the_runs_can_be_reported(runs: Path) -> None:
    done = ddprun("report", "observed", "fp16", cwd=runs)
    assert done.code == 0, done.stderr
    assert summary(runs / "observed")["status"] == "done"


def train_one_after_another(folder: Path) -> list[list[int]]:
    """Four Trainers of one model, as they call their callbacks; each trains three times, and the second time
    fails. Gives the samples of the steps of each `train`.
    """
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from ddprun.integrations.transformers import ObserveCallback

    os.chdir(folder)
    dist.init_process_group("gloo")
    net, folders = nn.Linear(3, 2), list[Path]()
    given = TrainingArguments(str(folder / "out"), use_cpu=True), TrainerState(), TrainerControl()
    callbacks = [ObserveCallback(name=str(number)) for number in range(4)]
    for callback in callbacks:
        model = DistributedDataParallel(net)
        for fails in (False, True, False):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            callback.on_train_begin(*given, model=net, optimizer=optimizer)
            for _ in range(2):
                model(torch.ones(4, 3)).sum().backward()
                optimizer.step()
            if not fails:
                callback.on_train_end(*given)
            folders.append(callback.run.folder)
    return [[step["samples"] for step in records(folder, "steps", 0)] for folder in folders]


def test_each_train_is_observed(tmp_path: Path) -> None:
    """With the DistributedDataParallel that it trains, though earlier ones have the same model."""
    pytest.importorskip("transformers")
    assert as_processes(1, train_one_after_another, tmp_path)[0] == [[4, 4]] * 12


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_package_that_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"ddprun.integrations.{name}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'ddprun\[{name}\]'"):
        importlib.import_module(f"ddprun.integrations.{name}")
