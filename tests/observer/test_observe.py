"""`ddprun.observe` beside scripts of somebody else's: same weights, and the records of a run."""

import io
import itertools
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ddprun
from ddprun.config import PipelineError
from ddprun.engine.run_folder import RunFolderError
from ddprun.observer import run as observing
from ddprun.report.digest import digest_run
from ddprun.telemetry.reader import Run
from ddprun.telemetry.records import PARTS
from ddprun_hooks import HookSetupError
from ddprun_hooks.registry import AnyHook
from tests.ranks import Finished, as_processes, ddprun_here

EPOCHS, BATCHES, ACCUMULATE, BATCH = 3, 8, 2, 4
UPDATES = EPOCHS * BATCHES // ACCUMULATE
NUMEL = (12 * 40 + 40) + (40 * 3 + 3)


class Samples(Dataset[tuple[Tensor, int]]):
    """A data set of a script's own; `slow_s` is for each sample of rank 1."""

    def __init__(self, slow_s: float = 0.0) -> None:
        self.slow_s = slow_s if dist.get_rank() == 1 else 0.0

    def __len__(self) -> int:
        return 2 * BATCHES * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.slow_s)
        return torch.randn(12, generator=torch.Generator().manual_seed(index)), index % 3


def make_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3))


def start() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = DistributedDataParallel(make_net())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(
    observe: Callable[[DistributedDataParallel, torch.optim.Optimizer], Any] | None = None,
    *,
    epochs: int = EPOCHS,
    slow_s: float = 0.0,
    evaluate_s: float = 0.0,
) -> tuple[list[Tensor], Any]:
    """A usual script: accumulation under `no_sync`, clipping, a schedule, an evaluation after each epoch."""
    model, optimizer = start()
    run = None if observe is None else observe(model, optimizer)
    data = Samples(slow_s)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, shuffle=False))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(epochs):
        model.train()  # type: ignore[no-untyped-call]
        for index, (inputs, targets) in enumerate(loader if run is None else run.steps(loader)):
            last = (index + 1) % ACCUMULATE == 0
            with nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(inputs), targets)
                if run is not None:
                    run.note_loss(loss)
                (loss / ACCUMULATE).backward()  # type: ignore[no-untyped-call]
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        model.eval()
        with torch.no_grad():
            model(torch.zeros(5, 12))
            time.sleep(evaluate_s)
    return [param.detach().clone() for param in model.parameters()], run


def observed(run_dir: Path, hooks: AnyHook | Sequence[AnyHook] = (), **options: Any) -> list[Tensor]:
    weights, run = train(partial(ddprun.observe, hooks=hooks, run_dir=run_dir), **options)
    run.close()
    return weights


def records(run_dir: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    lines = (run_dir / kind / f"rank-{rank:05}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [one for one in found if one["event"] == kind]


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
    for plain, observed, fp16 in runs[1]:
        assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
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
        digest = digest_run(Run(runs[0] / name))
        assert digest.times.mean_parts_us["step_us"] == pytest.approx(
            1e6 * sum(means) / 2 / UPDATES, rel=1e-4
        )
        assert digest.steps_per_s == pytest.approx(found["steps_per_s"], rel=1e-4)
        assert digest.stages[0].synced_steps == UPDATES
        assert digest.stages[0].hooks == tuple([] if name == "plain" else ["fp16"])
        assert events(runs[0] / name, "started")[0]["buckets"][0]["numel"] == NUMEL


PIPELINE = """
model: tests.observer.test_observe.make_net
data: {synthetic: {shape: [12], classes: 3}}
loader: {batch_size: 4}
optimizer: {adamw: {lr: 0.01}}
stages: [{train: {steps: 20}}, {train: {steps: 20, hooks: [fp16], sync: {local_sgd: {every: 4}}}}]
"""


def explained(folder: Path, run: Path, *words: str, text: str = PIPELINE) -> Finished:
    (folder / "p.yaml").write_text(text)
    return ddprun_here("explain", "p.yaml", "--from", str(run), "--format=json", *words, cwd=folder)


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


def test_explain_refuses_a_run_that_sent_something_else(runs: Runs, scripts: Path, tmp_path: Path) -> None:
    """Of another model, or in several passes of a step."""
    other = PIPELINE.replace("tests.observer.test_observe.make_net", "{mlp: {inputs: 12, outputs: 3}}")
    done = explained(tmp_path, runs[0] / "plain", text=other)
    assert done.code == 2
    assert "bucket 0 is 643 float32 values of ['2.bias', '2.weight', '0.bias', '0.weight']" in done.stderr
    done = explained(tmp_path, scripts / "with_several_passes")
    assert done.code == 2
    assert "a rank sent 5.14 kB in a step, but in p.yaml it sends 2.57 kB; hooks must have " in done.stderr


def test_a_run_without_steps_tells_explain_no_costs(runs: Runs, tmp_path: Path) -> None:
    """It was killed, or failed, before the first one was recorded."""
    run = Path(shutil.copytree(runs[0] / "plain", tmp_path / "run"))
    for file in (run / "steps").iterdir():
        file.write_text("")
    done = explained(tmp_path, run)
    assert done.code == 2
    assert f"{run} has no stage with records of more than 3 steps" in done.stderr


# What scripts do besides.


def call_each(folder: Path, bodies: Sequence[Callable[[Path], Any]]) -> dict[str, Any]:
    return {body.__name__: body(folder / body.__name__) for body in bodies}


def with_scaler(folder: Path) -> None:
    """In update 3 a gradient is infinite, and the scaler skips the optimizer's step."""
    model, optimizer = start()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run = ddprun.observe(model, optimizer, hooks=["int8"], scaler=scaler, run_dir=folder)
    for step in range(1, 7):
        loss = model(torch.ones(2, 12)).square().mean() * (float("inf") if step == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    run.close()


def with_two_optimizers(folder: Path) -> None:
    """One for each layer; the second steps in every other iteration."""
    model, _ = start()
    first = torch.optim.SGD(model.module[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model.module[2].parameters(), lr=0.2)
    unrelated = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.3)
    run = ddprun.observe(model, run_dir=folder)
    for step in range(6):
        model(torch.ones(2, 12)).square().mean().backward()
        unrelated.step()
        first.step()
        if step % 2:
            second.step()
        first.zero_grad()
        second.zero_grad()
    run.close()


def with_several_passes(folder: Path) -> None:
    """Two forward passes before one backward pass, and two backward passes before one optimizer step."""
    model, optimizer = start()
    run = ddprun.observe(model, optimizer, run_dir=folder)
    for _ in range(5):
        for _ in range(2):
            (model(torch.ones(2, 12)) - model(torch.zeros(3, 12)).mean()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()


def with_early_exit(folder: Path) -> None:
    """A loop over batches is left before its end, with a step half done, and another one begins."""
    model, optimizer = start()
    run = ddprun.observe(model, optimizer, run_dir=folder)
    for _ in range(2):
        for index, batch in enumerate(run.steps([torch.ones(2, 12)] * 9)):
            model(batch).square().mean().backward()
            if index == 4:
                break
            optimizer.step()
            optimizer.zero_grad()
    run.close()


def with_exception(folder: Path) -> None:
    """In the middle of step 4, on all ranks."""
    model, optimizer = start()
    with suppress(ZeroDivisionError), ddprun.observe(model, optimizer, run_dir=folder) as run:
        for index, batch in enumerate(run.steps([torch.ones(2, 12)] * 9)):
            loss = model(batch).square().mean()
            scale = 1 // (3 - index) if index == 3 else 1
            (scale * loss).backward()
            optimizer.step()
            optimizer.zero_grad()


def with_refused_input(folder: Path) -> list[str]:
    model, optimizer = start()
    refused = []
    (folder / "taken").mkdir(parents=True, exist_ok=True)
    (folder / "taken" / "file").touch()
    dist.barrier()
    new, taken = folder / "new", folder / "taken"
    for hooks, run_dir, track in (("fp17", new, []), ("fp16", taken, []), ("fp16", new, ["tensorbord"])):
        try:
            ddprun.observe(model, optimizer, hooks=hooks, run_dir=run_dir, track=track)
        except (HookSetupError, RunFolderError, PipelineError) as error:
            refused.append(str(error))
    return refused


BODIES = [with_scaler, with_two_optimizers, with_several_passes, with_early_exit, with_exception]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with that of each of these scripts."""
    folder = tmp_path_factory.mktemp("scripts")
    as_processes(2, call_each, folder, BODIES)
    return folder


def test_a_step_that_the_scaler_skips_is_a_step(scripts: Path) -> None:
    """It ends like any other; only the optimizer has not run in it."""
    steps = records(scripts / "with_scaler", "steps")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step["optimizer_us"] > 0 for step in steps] == [True, True, False, True, True, True]
    assert [step["lr"] for step in steps] == [[0.01], [0.01], None, [0.01], [0.01], [0.01]]


def test_optimizers_side_by_side_take_one_step_together(scripts: Path) -> None:
    """The one that holds no parameter of the model ends none."""
    steps = records(scripts / "with_two_optimizers", "steps")
    assert [step["lr"] for step in steps] == [[0.1], [0.1, 0.2]] * 3


def test_passes_of_one_step_are_counted_together(scripts: Path) -> None:
    folder = scripts / "with_several_passes"
    steps, buckets = records(folder, "steps"), records(folder, "buckets")
    assert [step["samples"] for step in steps] == [10] * 5
    assert [bucket["step"] for bucket in buckets] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_a_loop_that_is_left_early_keeps_its_half_step(scripts: Path) -> None:
    """It ends with the next optimizer step: nothing is counted twice."""
    steps = records(scripts / "with_early_exit", "steps")
    assert [step["samples"] for step in steps] == [2, 2, 2, 2, 4, 2, 2, 2]


def test_an_exception_in_a_step_ends_the_run_as_failed(scripts: Path) -> None:
    folder = scripts / "with_exception"
    found = json.loads((folder / "summary.json").read_text())
    assert (found["status"], found["steps"]) == ("failed", 3)
    assert found["error"]["message"].startswith("ZeroDivisionError: ")
    assert [step["step"] for step in records(folder, "steps")] == [1, 2, 3]
    logs = "".join(log.read_text() for log in (folder / "logs").iterdir())
    assert "in with_exception" in logs


def test_bad_input_is_refused_before_anything_is_hooked(tmp_path: Path) -> None:
    for refused in as_processes(2, with_refused_input, tmp_path):
        assert len(refused) == 3
        assert 'unknown hook "fp17"' in refused[0]
        assert refused[1].endswith("is not empty: name another with run_dir")
        assert 'track[0]: unknown tracker "tensorbord"; allowed: mlflow, ' in refused[2]
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


def with_copies(folder: Path) -> None:
    """What scripts do with a model beside training it: average it, save it as a whole, trace it."""
    model, optimizer = start()
    run = ddprun.observe(model, optimizer, run_dir=folder)
    average = torch.optim.swa_utils.AveragedModel(model.module)
    for _ in range(4):
        model(torch.ones(2, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model.module)
        torch.save(model.module, io.BytesIO())
        with torch.no_grad():
            average(torch.ones(2, 12))
            torch.jit.trace(model.module, torch.ones(2, 12))  # type: ignore[no-untyped-call]
    for batch in run.steps([torch.ones(2, 12)] * 3):
        run.close()
        model(batch).square().mean().backward()
        optimizer.step()


def with_lone_evaluation(folder: Path) -> None:
    """Rank 0 alone evaluates after each step, and all meet in a barrier after that."""
    model, optimizer = start()
    run = ddprun.observe(model, optimizer, run_dir=folder, timeout_s=20)
    for _ in range(6):
        model(torch.ones(2, 12)).square().mean().backward()
        optimizer.step()
        if dist.get_rank() == 0:
            with torch.no_grad():
                model.module(torch.ones(2, 12))
            time.sleep(0.2)
        dist.barrier()
    run.close()


def with_scaled_loss(folder: Path) -> None:
    """The loss is divided in place after it was noted; a loop over batches is left before its first pass."""
    model, optimizer = start()
    run = ddprun.observe(model, optimizer, run_dir=folder)
    for batch in run.steps([torch.ones(2, 12)] * 3):
        loss = model(batch).square().mean()
        run.note_loss(loss)
        loss /= 4
        loss.backward()
    for _ in run.steps([torch.ones(2, 12)]):
        break
    optimizer.step()
    run.close()


def with_sparse_gradients(folder: Path) -> bool:
    """Plain DDP and an observed one, from the same weights."""

    def trained(observe: bool) -> Tensor:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 2))
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        run = ddprun.observe(model, optimizer, run_dir=folder) if observe else None
        for step in range(5):
            model(torch.tensor([step, 3 + dist.get_rank()])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if run is not None:
            run.close()
        return net[0].weight.detach().clone()  # type: ignore[operator]

    start()
    return torch.equal(trained(False), trained(True))


def with_compiled_model(folder: Path) -> None:
    model, optimizer = start()
    compiled: Any = torch.compile(model, backend="eager")
    run = ddprun.observe(compiled, optimizer, run_dir=folder)
    for _ in range(5):
        compiled(torch.ones(2, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, inputs: Tensor) -> Tensor:
        loss: Tensor = self.net(inputs).square().mean()
        return loss


def with_closure(folder: Path) -> None:
    """The optimizer calls back for each of a step's two passes; between steps the model is evaluated."""
    start()
    model = DistributedDataParallel(WithLoss())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, tolerance_change=0.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 12))
        loss.backward()
        return float(loss)

    run = ddprun.observe(model, optimizer, run_dir=folder)
    for _ in range(5):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            model(torch.ones(2, 12))
        time.sleep(0.2)
    run.close()


def with_buffers(folder: Path) -> tuple[Any, ...]:
    """A model with BatchNorm, whose buffers DDP broadcasts, in training and in evaluations; then the same,
    observed. Rank 1 is slow to get its batches.
    """
    weights = []
    for run_dir in (None, folder):
        start()
        torch.manual_seed(3)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = Samples(0.0 if run_dir is None else 0.008)
        loader = DataLoader(loader, BATCH, sampler=DistributedSampler(loader, shuffle=False))
        if run_dir is not None:
            run = ddprun.observe(model, optimizer, run_dir=run_dir)
            loader = run.steps(loader)
        for epoch in range(8):
            loader.sampler.set_epoch(epoch)
            assert len(loader) == BATCHES
            for inputs, _ in loader:
                model(inputs * (dist.get_rank() + 1)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                model.eval()(torch.ones(2, 12))
            model.train()  # type: ignore[no-untyped-call]
        weights.append([value.clone() for value in model.state_dict().values()])
    run.close()
    return tuple(weights)


def with_left_out_pass(folder: Path, lag_steps: int = 0) -> None:
    """Rank 1 takes a step without a backward pass. Marks are read `lag_steps` later, as on a GPU."""
    model, optimizer = start()
    run = ddprun.observe(model, optimizer, run_dir=folder)
    run._recorder._clock.lag_steps = lag_steps
    for step in range(1, 41):
        loss = model(torch.ones(2, 12)).square().mean()
        if step != 20 or dist.get_rank() == 0:
            loss.backward()
        optimizer.step()
        time.sleep(0.02)
    if dist.get_rank() == 1:  # as many passes as rank 0
        model(torch.ones(2, 12)).square().mean().backward()
        optimizer.step()
    run.close()


def with_left_out_pass_and_lag(folder: Path) -> None:
    with_left_out_pass(folder, 2)


def with_interrupt(folder: Path) -> None:
    """Ctrl-C reaches rank 1 in its own code, and rank 0 where it waits for rank 1."""
    model, optimizer = start()
    error = KeyboardInterrupt if dist.get_rank() else ValueError  # as the broken exchange may also show
    with suppress(KeyboardInterrupt, ValueError), ddprun.observe(model, optimizer, run_dir=folder) as run:
        for _ in range(5):
            model(torch.ones(2, 12)).square().mean().backward()
            optimizer.step()
        if dist.get_rank() == 0:
            run._ranks.store.wait(["interrupted"])
        raise error


def with_signals(folder: Path) -> list[int]:
    """SIGTERM ends a process that rank 0 has forked, and then the script takes that signal itself."""
    model, optimizer = start()
    run = ddprun.observe(model, optimizer, run_dir=folder, track=["prometheus"])
    if not (child := os.fork()):
        time.sleep(60)
        os._exit(0)
    time.sleep(0.5)
    os.kill(child, signal.SIGTERM)
    found = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
    signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    run.close()
    return found


def with_foreign_optimizer(folder: Path) -> list[str]:
    """The optimizer that is named does not hold the model's parameters."""
    model, _ = start()
    run = ddprun.observe(model, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), run_dir=folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(300):
            model(torch.ones(2, 12)).square().mean().backward()
    run.close()
    return [str(one.message) for one in caught]


def with_earlier_error(folder: Path) -> None:
    """Somebody has typed something wrong in an interactive session, and leaves it without `close`."""
    model, optimizer = start()
    sys.last_value = ValueError("typed before")
    run = ddprun.observe(model, optimizer, run_dir=folder)
    model(torch.ones(2, 12)).square().mean().backward()
    optimizer.step()
    run._end_with_process()
    del sys.last_value


def with_restart(folder: Path) -> None:
    """Ranks that torchrun, whose store outlives them, starts again after an attempt that has failed."""
    model, optimizer = start()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for attempt in range(2):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        observing._observed = itertools.count(1000)  # as in a new process
        with suppress(ValueError), ddprun.observe(model, optimizer, run_dir=folder):
            model(torch.ones(2, 12)).square().mean().backward()
            optimizer.step()
            if not attempt:
                raise ValueError("a broken sample")
        model, optimizer = start()
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"], os.environ["TORCHELASTIC_RESTART_COUNT"]


MORE: list[Callable[[Path], Any]]
MORE = [with_copies, with_lone_evaluation, with_scaled_loss, with_sparse_gradients, with_compiled_model]
MORE += [
    with_buffers,
    with_left_out_pass,
    with_left_out_pass_and_lag,
    with_interrupt,
    with_closure,
    with_foreign_optimizer,
    with_earlier_error,
    with_restart,
]
MORE += [with_signals] if find_spec("prometheus_client") else []


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder with that of each of these scripts, and what they returned on rank 0."""
    folder = tmp_path_factory.mktemp("more")
    return folder, as_processes(2, call_each, folder, MORE, timeout_s=150)[0]


More = tuple[Path, dict[str, Any]]


def test_a_model_can_be_copied_saved_and_traced(more: More) -> None:
    """Also after `close`, from which on nothing is recorded."""
    assert [step["step"] for step in records(more[0] / "with_copies", "steps")] == [1, 2, 3, 4]


def test_one_rank_may_evaluate_alone(more: More) -> None:
    """All steps are there, none has the time of the evaluation, and nobody waited for ever."""
    for rank in range(2):
        steps = records(more[0] / "with_lone_evaluation", "steps", rank)
        assert [step["step"] for step in steps] == list(range(1, 7))
    assert all(step["step_us"] < 200_000 for step in records(more[0] / "with_lone_evaluation", "steps"))


def test_the_loss_is_the_one_that_was_noted(more: More) -> None:
    """Three equal passes of one step, divided by nothing."""
    (step,) = records(more[0] / "with_scaled_loss", "steps")
    assert step["samples"] == 6
    assert step["loss"] == pytest.approx(make_net()(torch.ones(2, 12)).square().mean().item())


def test_sparse_gradients_keep_their_bits(more: More) -> None:
    assert more[1]["with_sparse_gradients"]


def test_passes_without_a_step_are_told(more: More) -> None:
    """Once, with what to do; memory does not grow with them."""
    (told,) = more[1]["with_foreign_optimizer"]
    assert told.startswith("no step of an optimizer seen in 256 backward passes, so nothing is recorded: ")
    assert not (more[0] / "with_foreign_optimizer" / "steps").exists()


def test_an_error_before_the_run_is_not_its_own(more: More) -> None:
    found = json.loads((more[0] / "with_earlier_error" / "summary.json").read_text())
    assert (found["status"], found["steps"]) == ("done", 1)


def test_a_restart_knows_nothing_of_the_attempt_before(more: More) -> None:
    """And has a folder of its own."""
    folders = (more[0] / "with_restart", more[0] / "with_restart-restart-1")
    found = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert [(one["status"], one["steps"]) for one in found] == [("failed", 1), ("done", 1)]


def test_buffers_are_sent_as_ddp_sends_them_and_a_rank_that_is_late_with_them_is_named(more: More) -> None:
    """The same bits, timed and counted in training. Ranks wait for each other with the buffers first."""
    folder, found = more
    plain, observed = found["with_buffers"]
    assert len(plain) == 9
    assert all(torch.equal(one, other) for one, other in zip(plain, observed, strict=True))
    run = folder / "with_buffers"
    sent = [one for one in records(run, "buckets") if one["kind"] == "buffers"]
    without = {1 + epoch * BATCHES for epoch in range(1, 8)}  # in a pass after an evaluation DDP sends none
    assert [one["bytes"] for one in sent] == [2 * 6 * 4, 8] * (8 * BATCHES - len(without))
    assert {one["step"] for one in sent} == set(range(1, 8 * BATCHES + 1)) - without
    (late, *_) = events(run, "straggler")
    assert (late["straggler"], late["cause"]) == (1, "data")
    waiting = median(one["forward_us"] for one in records(run, "steps"))
    assert waiting < late["late_us"] / 2


@pytest.mark.parametrize("body", ["with_left_out_pass", "with_left_out_pass_and_lag"])
def test_a_left_out_backward_pass_is_told(more: More, body: str) -> None:
    """From there on the ranks average gradients of different steps."""
    (told,) = events(more[0] / body, "exchange_skipped")
    assert (told["step"], told["ranks"]) == (20, [1])


def test_an_interrupted_run_is_not_failed(more: More) -> None:
    """Though only one of the ranks knows that, and has its totals."""
    summary = json.loads((more[0] / "with_interrupt" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["error"]) == ("interrupted", 5, None)
    assert summary["samples"] == 2 * 5 * 2


def test_signals_stay_the_scripts(more: More) -> None:
    """Though rank 0 closes its trackers if torchrun ends it."""
    assert more[1].get("with_signals", [-signal.SIGTERM, signal.SIGTERM]) == [-signal.SIGTERM, signal.SIGTERM]


def test_a_compiled_model_is_observed(more: More) -> None:
    assert [step["step"] for step in records(more[0] / "with_compiled_model", "steps")] == [1, 2, 3, 4, 5]


def test_a_step_may_have_its_passes_in_a_closure(more: More) -> None:
    """With the loss that the model returns, and without the time of evaluations."""
    steps = records(more[0] / "with_closure", "steps")
    assert [(step["step"], step["samples"]) for step in steps] == [(number, 4) for number in range(1, 6)]
    for step in steps:
        assert step["loss"] is not None
        assert step["step_us"] < 200_000
        assert all(step[f"{part}_us"] > 0 for part in ("forward", "backward", "optimizer"))
