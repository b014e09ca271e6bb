"""`ddprun.observe` in a usual script: same weights, and the records of a run."""

import json
import pickle
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import ddprun
from ddprun.config import PipelineError
from ddprun.engine.run_folder import RunFolderError
from ddprun.report.digest import digest_run
from ddprun.telemetry.reader import RecordedRun
from ddprun.telemetry.records import PARTS
from ddprun_hooks import HookSetupError, register
from tests.observer.script import (
    ACCUMULATE,
    BATCH,
    NUMEL,
    PIPELINE,
    UPDATES,
    events,
    explained,
    observed,
    records,
    start,
    train,
)
from tests.ranks import as_processes


def plain_and_observed(folder: Path) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    plain, _ = train()
    return plain, observed(folder / "plain", evaluate_s=0.3), observed(folder / "fp16", ["fp16"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folders of two runs, and the weights of each rank: without `observe`, with it, and with fp16."""
    folder = tmp_path_factory.mktemp("observed")
    return folder, as_processes(2, plain_and_observed, folder)


Runs = tuple[Path, list[tuple[list[Tensor], list[Tensor], list[Tensor]]]]


def test_the_weights_keep_their_bits(runs: Runs) -> None:
    """And hooks that are named really run."""
    for plain, same, fp16 in runs[1]:
        assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(plain, fp16, strict=True))


def test_a_step_is_what_one_optimizer_step_has_taken(runs: Runs) -> None:
    """Two micro-batches each; its parts add up, and each has been seen."""
    for rank in range(2):
        steps = records(runs[0] / "plain", "steps", rank)
        assert [step["step"] for step in steps] == list(range(1, UPDATES + 1))
        for step in steps:
            assert step["samples"] == ACCUMULATE * BATCH
            assert sum(step[part] for part in PARTS) == step["step_us"]
            assert all(step[f"{part}_us"] > 0 for part in ("data", "forward", "backward", "optimizer"))
        rates = [step["lr"] for step in steps]
        assert rates == [[0.01]] * 4 + [[0.005]] * 4 + [[0.0025]] * 4


def test_the_loss_is_the_mean_over_ranks(runs: Runs) -> None:
    one, other = (records(runs[0] / "plain", "steps", rank) for rank in range(2))
    for a, b in zip(one, other, strict=True):
        assert a["mean_loss"] == b["mean_loss"] == pytest.approx((a["loss"] + b["loss"]) / 2)
    assert len({step["loss"] for step in one}) == UPDATES


def test_an_evaluation_is_no_steps_time(runs: Runs) -> None:
    steps = records(runs[0] / "plain", "steps")
    assert all(step["step_us"] < 300_000 for step in steps)
    gaps = [b["start_us"] - a["start_us"] - a["step_us"] for a, b in pairwise(steps)]
    assert [index for index, gap in enumerate(gaps, start=1) if gap > 300_000] == [4, 8]


@pytest.mark.parametrize(("name", "bytes_each", "from_step"), [("plain", 4, 1), ("fp16", 2, 3)])
def test_every_bucket_is_timed(runs: Runs, name: str, bytes_each: int, from_step: int) -> None:
    """Once in a step, with its bytes, as a ring of two ranks sends them; hooks begin in the third."""
    for rank in range(2):
        buckets = records(runs[0] / name, "buckets", rank)
        assert [bucket["step"] for bucket in buckets] == list(range(1, UPDATES + 1))
        for bucket in buckets[from_step - 1 :]:
            assert bucket["wire_bytes"] == bytes_each * NUMEL
            assert bucket["ready_us"] <= bucket["done_us"]
            assert set(bucket["params"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        # When all ranks were ready is known from the step on in which DDP's buckets are as they stay.
        assert [bucket["all_ready_us"] is not None for bucket in buckets] == [False] * 2 + [True] * 10


def test_summary_records_and_report_agree(runs: Runs) -> None:
    for name in ("plain", "fp16"):
        found = json.loads((runs[0] / name / "summary.json").read_text())
        steps = [records(runs[0] / name, "steps", rank) for rank in range(2)]
        assert (found["status"], found["steps"], found["world_size"]) == ("done", UPDATES, 2)
        assert found["samples"] == sum(step["samples"] for rank in steps for step in rank)
        means = [sum(step["step_us"] for step in rank) / 1e6 for rank in steps]
        assert found["seconds_in_steps"] == pytest.approx(sum(means) / 2)
        sent = sum(one["wire_bytes"] for rank in range(2) for one in records(runs[0] / name, "buckets", rank))
        assert found["wire_bytes"] == sent
        assert found["loss"] == pytest.approx(steps[0][-1]["mean_loss"])
        digest = digest_run(RecordedRun(runs[0] / name))
        assert digest.times.mean_parts_us["step_us"] == pytest.approx(
            1e6 * sum(means) / 2 / UPDATES, rel=1e-4
        )
        assert digest.steps_per_s == pytest.approx(found["steps_per_s"], rel=1e-4)
        assert digest.stages[0].hooks == tuple([] if name == "plain" else ["fp16"])
        assert events(runs[0] / name, "started")[0]["buckets"][0]["numel"] == NUMEL


def test_explain_predicts_from_an_observed_run(runs: Runs, tmp_path: Path) -> None:
    """The steps that the script took, with its hooks and accumulation, and others of the same model."""
    done = explained(tmp_path, runs[0] / "fp16", "--set=hooks=[fp16]", "--set=accumulate=2")
    assert done.code == 0, done.stderr
    own, local = (stage["predicted"] for stage in json.loads(done.stdout)["stages"])
    assert own["hooks_measured"]
    assert local["hooks_measured"]
    steps = [step for rank in range(2) for step in records(runs[0] / "fp16", "steps", rank)[3:]]
    for part in ("forward_us", "backward_us", "optimizer_us"):
        assert own["parts_us"][part] <= 1.1 * max(step[part] for step in steps)
    assert "the names of hooks and accumulate: 2; p.yaml gives the rest" in done.stderr


def test_explain_refuses_a_run_of_another_model(runs: Runs, tmp_path: Path) -> None:
    other = PIPELINE.replace("tests.observer.script.make_net", "{mlp: {inputs: 12, outputs: 3}}")
    done = explained(tmp_path, runs[0] / "plain", text=other)
    assert done.code == 2
    assert "bucket 0 is 643 float32 values of ['2.bias', '2.weight', '0.bias', '0.weight']" in done.stderr


def test_a_run_without_steps_tells_explain_no_costs(runs: Runs, tmp_path: Path) -> None:
    """It was killed, or failed, before the first one was recorded."""
    run = Path(shutil.copytree(runs[0] / "plain", tmp_path / "run"))
    for file in (run / "steps").iterdir():
        file.write_text("")
    done = explained(tmp_path, run)
    assert done.code == 2
    assert f"{run} has no stage with records of more than 3 steps" in done.stderr


def with_refused_input(folder: Path) -> list[str]:
    model, optimizer = start()
    refused = []
    (folder / "taken").mkdir(parents=True, exist_ok=True)
    (folder / "taken" / "file").touch()
    dist.barrier()
    new, taken = folder / "new", folder / "taken"
    for changed in (
        {"hooks": "fp17"},
        {"run_dir": taken},
        {"track": ["tensorbord"]},
        {"every": 0},
        {"timeout_s": 0},
        {"optimizer": "sgd"},
        {"optimizer": 3},
    ):
        given: dict[str, Any] = {"optimizer": optimizer, "run_dir": new, **changed}
        try:
            ddprun.observe(model, **given)
        except (HookSetupError, RunFolderError, PipelineError, ValueError) as error:
            refused.append(str(error))
    return refused


def test_bad_input_is_refused_before_anything_is_hooked(tmp_path: Path) -> None:
    for refused in as_processes(2, with_refused_input, tmp_path):
        hook, folder, tracker, *arguments = refused
        assert 'unknown hook "fp17"' in hook
        assert folder.endswith("is not empty: name another with run_dir")
        assert 'track[0]: unknown tracker "tensorbord"; allowed: mlflow, ' in tracker
        assert arguments == [
            "every must be a whole number from 1 on, got 0",
            "timeout_s must be above 0, got 0",
            "optimizer must be an Optimizer of torch.optim, or a list of them: 'sgd'",
            "optimizer must be an Optimizer of torch.optim, or a list of them: 3",
        ]
    assert not (tmp_path / "new").exists()


def slow(folder: Path) -> None:
    observed(folder, epochs=12, slow_s=0.004)


def test_a_rank_with_slow_data_is_named(tmp_path: Path) -> None:
    """On the screen of rank 0, in an event, and in the summary, with its cause."""
    as_processes(2, slow, tmp_path / "run")
    (straggler, *_) = events(tmp_path / "run", "straggler")
    assert (straggler["straggler"], straggler["cause"]) == (1, "data")
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["stragglers"]
    assert [(one["rank"], one["cause"]) for one in found] == [(1, "data")]


class Many(nn.Module):
    """Several buckets; one layer rests every other time, if it may."""

    def __init__(self, rests: bool, is_complex: bool, skips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(5))
        self.phases = nn.Parameter(torch.randn(7, dtype=torch.complex64 if is_complex else torch.float32))
        self.never = nn.Linear(300, 900) if skips else None  # a bucket of its own
        self.rests, self.calls = rests, 0

    def forward(self, inputs: Any) -> Any:
        if callable(inputs) and not isinstance(inputs, Tensor):
            for _ in range(2):
                inputs(self.forward)
            return None
        self.calls += 1
        for layer in self.layers[self.rests and self.calls % 2 :]:
            inputs = layer(inputs).relu()
        return inputs.square().mean() + self.phases.abs().square().sum()


DDPS: dict[str, dict[str, Any]] = {
    "usual": {},
    "views": {"gradient_as_bucket_view": True},
    "kept": {"gradient_as_bucket_view": True},
    "complex": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "skipping": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
}


def train_with(name: str, run_dir: Path | None) -> list[Tensor]:
    """Four steps. `kept`: a backward pass adds to gradients that an exchange has left."""
    net = Many(name == "unused", name == "complex", name == "skipping")
    model = DistributedDataParallel(net, bucket_cap_mb=1, **DDPS[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = ddprun.observe(model, optimizer, run_dir=run_dir) if run_dir is not None else None
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        model(torch.randn(4, 300)).backward()
        if name == "kept":
            model(torch.randn(4, 300)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if run is not None:
        if name != "skipping":  # which has a communication hook
            copied = pickle.loads(pickle.dumps(model))
            assert all(map(torch.equal, copied.parameters(), model.parameters()))
        run.close()
    return [param.detach().clone() for param in model.parameters()]


def train_with_each(folder: Path) -> list[str]:
    dist.init_process_group("gloo")
    different = []
    for name in DDPS:
        alone, observed = train_with(name, None), train_with(name, folder / name)
        if not all(torch.equal(a, b) for a, b in zip(alone, observed, strict=True)):
            different.append(name)
    return different


def test_each_kind_of_ddp_keeps_its_bits_on_three_ranks(tmp_path: Path) -> None:
    """And all its buckets are recorded, with their parameters and with what a ring sends for them."""
    assert as_processes(3, train_with_each, tmp_path) == [[], [], []]
    for name in DDPS.keys() - {"skipping"}:  # of which some buckets are sent, and others not
        numels = {key: param.numel() for key, param in Many(False, False).named_parameters()}
        if name == "complex":
            numels["phases"] *= 2
        by_step = dict[int, list[dict[str, Any]]]()
        for bucket in records(tmp_path / name, "buckets", 1):
            by_step.setdefault(bucket["step"], []).append(bucket)
            sent = 4 * sum(numels[param] for param in bucket["params"])
            assert bucket["wire_bytes"] == pytest.approx(sent * 4 / 3, abs=1)
            assert bucket["done_us"] >= bucket["ready_us"]
        passes = 2 if name == "kept" else 1
        for step in range(1, 5):
            params = [param for bucket in by_step[step] for param in bucket["params"]]
            assert sorted(params) == sorted(passes * list(numels))


def take_steps(name: str, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """A step, or as Lightning takes them: two in a forward pass; before the second, DDP may rebuild its
    buckets.
    """

    def take_step(call: Callable[[Tensor], Tensor]) -> None:
        loss = call(torch.randn(4, 300))
        if name == "steps in forward":
            model.reducer._rebuild_buckets()
            model.reducer.prepare_for_backward([])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    if name == "steps in forward":
        model.require_backward_grad_sync = False
        model(take_step)
    else:
        take_step(model.forward if name == "forward" else model)


def train_oddly(folder: Path) -> list[str]:
    """With buckets that nobody notes; `closed`: DDP rebuilds them in its second forward pass, after `close`.
    Gives what left other weights than DDP alone.
    """
    dist.init_process_group("gloo")
    different = []
    for name in ("closed", "forward", "steps in forward"):
        weights = list[list[Tensor]]()
        for run_dir in (None, folder / name):
            model = DistributedDataParallel(Many(False, False), bucket_cap_mb=1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run = ddprun.observe(model, optimizer, run_dir=run_dir) if run_dir is not None else None
            torch.manual_seed(dist.get_rank())
            for step in range(4):
                if run is not None and name == "closed" and step == 1:
                    run.close()
                take_steps(name, model, optimizer)
            if run is not None:
                run.close()
            weights.append([param.detach().clone() for param in model.parameters()])
        if not all(map(torch.equal, *weights)):
            different.append(name)
    return different


def test_a_forward_pass_that_nobody_notes_is_ddps_alone(tmp_path: Path) -> None:
    assert as_processes(2, train_oddly, tmp_path) == [[], []]


def train_a_copy(folder: Path) -> list[float]:
    """The mean that a copy's BatchNorm has kept, as its last forward pass has seen it."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 2), nn.BatchNorm1d(2)))
    with ddprun.observe(model, run_dir=folder / "run"):
        copied = pickle.loads(pickle.dumps(model))
        for _ in range(2):
            copied(torch.randn(4, 12) * (1 + dist.get_rank())).sum().backward()
        copied.eval()(torch.ones(4, 12))
    return copied.module[1].running_mean.tolist()  # type: ignore[no-any-return]


def test_a_copy_of_the_model_sends_its_buffers(tmp_path: Path) -> None:
    one, other = as_processes(2, train_a_copy, tmp_path)
    assert one == other


def observe_twice(folder: Path) -> list[str]:
    """What is said of a model that is observed already; once the first run is closed, it may be again."""
    model, optimizer = start()
    said = []
    with ddprun.observe(model, optimizer, run_dir=folder / "first"):
        for call in (lambda: ddprun.observe(model, optimizer), lambda: register(model, ["fp16"])):
            with pytest.raises(HookSetupError) as caught:
                call()
            said.append(str(caught.value))
    for name in ("second", "third"):
        with ddprun.observe(model, optimizer, run_dir=folder / name):
            model(torch.ones(2, 12)).sum().backward()
            optimizer.step()
    return said


def test_a_model_is_observed_once_at_a_time(tmp_path: Path) -> None:
    assert as_processes(1, observe_twice, tmp_path)[0] == ["the model is observed already"] * 2
    assert [len(records(tmp_path / name, "buckets")) for name in ("second", "third")] == [1, 1]


def observe_with_hooks() -> list[str]:
    """What a script with a communication hook of its own is told: one in Python, or in C++, or one that it
    registers after `observe`.
    """
    said = []
    for kind in ("python", "c++", "later", "much later"):
        model, optimizer = start()
        run = None if "later" not in kind else ddprun.observe(model, optimizer)
        for _ in range(3 if kind == "much later" else 0):
            model(torch.ones(2, 12)).sum().backward()
        try:
            if kind == "c++":
                model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)  # type: ignore[no-untyped-call]
            else:
                model.register_comm_hook(None, allreduce_hook)
            if run is None:
                ddprun.observe(model, optimizer)
            model(torch.ones(2, 12)).sum().backward()
        except (HookSetupError, RuntimeError) as error:
            said.append(str(error))
    assert run is not None
    run.close()
    return said


def test_another_communication_hook_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = as_processes(1, observe_with_hooks)[0]
    assert ["the model has a communication hook already" in one for one in said] == [True] * 4
