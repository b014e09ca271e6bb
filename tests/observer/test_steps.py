"""Scripts that do more than a usual one: what `ddprun.observe` takes for their steps."""

import io
import itertools
import json
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import ddprun
from ddprun.observer import run as observing
from ddprun_hooks import HookSetupError
from tests.observer.script import (
    BATCH,
    BATCHES,
    Samples,
    events,
    explained,
    make_net,
    records,
    start,
)
from tests.ranks import as_processes


class Scripts(NamedTuple):
    """What has come of the functions `with_…` below, each a script of two ranks."""

    folder: Path  # with the run of each, by its name
    returned: dict[str, Any]  # by rank 0, by name

    def steps(self, name: str, rank: int = 0) -> list[dict[str, Any]]:
        return records(self.folder / name, "steps", rank)


def run_each(folder: Path) -> dict[str, Any]:
    bodies = {name: body for name, body in globals().items() if name.startswith("with_")}
    if not find_spec("prometheus_client"):
        del bodies["with_signals"]
    return {name: body(folder / name) for name, body in bodies.items()}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    folder = tmp_path_factory.mktemp("scripts")
    return Scripts(folder, as_processes(2, run_each, folder, timeout_s=200)[0])


def with_scaler(folder: Path, *, late: bool = False) -> float:
    """In update 3 a gradient is infinite, and the scaler skips the optimizer's step. `late`: the scaler is
    made after the model, as it may be under `ddprun observe`.
    """
    model, optimizer = start()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run = ddprun.observe(model, optimizer, hooks=["int8"], scaler=None if late else scaler, run_dir=folder)
    if late:
        run.use_scaler(scaler)
    for step in range(1, 7):
        loss = model(torch.ones(2, 12)).square().mean() * (float("inf") if step == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    run.close()
    return float(run.hooks.state_dict()["int8"]["gradient/2.bias"]["residual"].abs().max())


def with_late_scaler(folder: Path) -> float:
    return with_scaler(folder, late=True)


def with_scaler_of_another_model(folder: Path) -> None:
    """As in a GAN: it is updated for the other model between two forward passes of the observed one."""
    model, optimizer = start()
    other = nn.Linear(4, 1)
    optimizer_of_other = torch.optim.SGD(other.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run = ddprun.observe(model, optimizer, scaler=scaler, run_dir=folder)
    for _ in range(3):
        for net, width, stepped in ((other, 4, optimizer_of_other), (model, 12, optimizer)):
            model(torch.ones(2, 12))
            scaler.scale(net(torch.ones(2, width)).square().mean()).backward()
            scaler.step(stepped)
            scaler.update()
            stepped.zero_grad()
    run.close()


def test_the_scale_of_another_models_step_ends_none(scripts: Scripts) -> None:
    steps = scripts.steps("with_scaler_of_another_model")
    assert [step["optimizer_us"] > 0 for step in steps] == [True] * 3


@pytest.mark.parametrize("body", ["with_scaler", "with_late_scaler"])
def test_a_step_that_the_scaler_skips_is_a_step(scripts: Scripts, body: str) -> None:
    """It ends like any other; only the optimizer has not run in it. The hooks keep nothing of it."""
    assert 0 < scripts.returned[body] < 1e-3
    steps = scripts.steps(body)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step["optimizer_us"] > 0 for step in steps] == [True, True, False, True, True, True]
    assert [step["lr"] for step in steps] == [[0.01], [0.01], None, [0.01], [0.01], [0.01]]


def with_two_optimizers(folder: Path) -> None:
    """One for each layer; the second steps in every other iteration. The scaler is disabled."""
    model, _ = start()
    first = torch.optim.SGD(model.module[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model.module[2].parameters(), lr=0.2)
    unrelated = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    run = ddprun.observe(model, scaler=scaler, run_dir=folder)
    for step in range(6):
        model(torch.ones(2, 12)).square().mean().backward()
        unrelated.step()
        first.step()
        if step % 2:
            second.step()
        first.zero_grad()
        second.zero_grad()
    run.close()


def test_optimizers_side_by_side_take_one_step_together(scripts: Scripts) -> None:
    """The one that holds no parameter of the model ends none."""
    steps = scripts.steps("with_two_optimizers")
    assert [step["lr"] for step in steps] == [[0.1], [0.1, 0.2]] * 3


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


def test_passes_of_one_step_are_counted_together(scripts: Scripts) -> None:
    folder = scripts.folder / "with_several_passes"
    steps, buckets = records(folder, "steps"), records(folder, "buckets")
    assert [step["samples"] for step in steps] == [10] * 5
    assert [bucket["step"] for bucket in buckets] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_explain_refuses_a_run_with_several_exchanges_in_a_step(scripts: Scripts, tmp_path: Path) -> None:
    done = explained(tmp_path, scripts.folder / "with_several_passes")
    assert done.code == 2
    assert "a rank sent 5.14 kB in a step, but in p.yaml it sends 2.57 kB; hooks must have " in done.stderr


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


def test_a_loop_that_is_left_early_keeps_its_half_step(scripts: Scripts) -> None:
    """It ends with the next optimizer step: nothing is counted twice."""
    steps = scripts.steps("with_early_exit")
    assert [step["samples"] for step in steps] == [2, 2, 2, 2, 4, 2, 2, 2]


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


def test_an_exception_in_a_step_ends_the_run_as_failed(scripts: Scripts) -> None:
    folder = scripts.folder / "with_exception"
    found = json.loads((folder / "summary.json").read_text())
    assert (found["status"], found["steps"]) == ("failed", 3)
    assert found["error"]["message"].startswith("ZeroDivisionError: ")
    assert [step["step"] for step in records(folder, "steps")] == [1, 2, 3]
    logs = "".join(log.read_text() for log in (folder / "logs").iterdir())
    assert "in with_exception" in logs


def with_not_a_number(folder: Path) -> None:
    """In step 3, on rank 1; from there on no weight is a number."""
    model, optimizer = start()
    run = ddprun.observe(model, optimizer, run_dir=folder)
    for step, batch in enumerate(run.steps([torch.ones(2, 12)] * 6), start=1):
        loss = model(batch).square().mean() * (math.nan if (step, dist.get_rank()) == (3, 1) else 1.0)
        run.note_loss(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()


def test_a_loss_that_is_no_number_is_told_once(scripts: Scripts) -> None:
    """As in a run of the engine."""
    folder = scripts.folder / "with_not_a_number"
    found = {"step": 3, "rank": 1, "value": "nan", "parameter": "0.weight"}
    (event,) = events(folder, "nonfinite")
    assert found.items() <= event.items()
    assert json.loads((folder / "summary.json").read_text())["nonfinite"] == found


def with_copies(folder: Path) -> bytes:
    """What scripts do with a model beside training it: average it, save it as a whole, trace it."""
    model, optimizer = start()
    run = ddprun.observe(model, optimizer, run_dir=folder)
    average = torch.optim.swa_utils.AveragedModel(model.module)
    for _ in range(4):
        model(torch.ones(2, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model.module)
        torch.save(model.module, saved := io.BytesIO())
        with torch.no_grad():
            average(torch.ones(2, 12))
            torch.jit.trace(model.module, torch.ones(2, 12))  # type: ignore[no-untyped-call]
    for batch in run.steps([torch.ones(2, 12)] * 3):
        run.close()
        model(batch).square().mean().backward()
        optimizer.step()
    return saved.getvalue()


def test_a_model_can_be_copied_saved_and_traced(scripts: Scripts) -> None:
    """Also after `close`, from which on nothing is recorded. To load what was saved needs no ddprun."""
    assert [step["step"] for step in scripts.steps("with_copies")] == [1, 2, 3, 4]
    assert b"ddprun" not in scripts.returned["with_copies"]


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


def test_one_rank_may_evaluate_alone(scripts: Scripts) -> None:
    """All steps are there, none has the time of the evaluation, and nobody waited for ever."""
    for rank in range(2):
        steps = scripts.steps("with_lone_evaluation", rank)
        assert [step["step"] for step in steps] == list(range(1, 7))
    assert all(step["step_us"] < 200_000 for step in scripts.steps("with_lone_evaluation"))


def with_join(folder: Path) -> str:
    """Rank 1 has fewer batches, and `Join` would have it send zeros for those that it lacks."""
    model, optimizer = start()
    run = ddprun.observe(model, optimizer, run_dir=folder, timeout_s=20)

    def train() -> None:
        with model.join():
            for _ in range(3 - dist.get_rank()):
                model(torch.ones(2, 12)).square().mean().backward()

    with pytest.raises(HookSetupError) as refused:
        train()
    run.close()
    return str(refused.value)


def test_uneven_batches_under_join_are_refused(scripts: Scripts) -> None:
    """Where they begin, rather than by a hang."""
    assert scripts.returned["with_join"].startswith("Join is not supported")


def with_scaled_loss(folder: Path) -> None:
    """The loss is divided in place after it was noted; a loop over batches is left before its first pass. An
    evaluation notes its loss, too.
    """
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
    with torch.no_grad():
        run.note_loss(model(torch.zeros(2, 12)).square().mean())
    run.close()


def test_the_loss_is_the_one_that_was_noted(scripts: Scripts) -> None:
    """Three equal passes of one step, divided by nothing."""
    (step,) = scripts.steps("with_scaled_loss")
    assert step["samples"] == 6
    assert step["loss"] == pytest.approx(make_net()(torch.ones(2, 12)).square().mean().item())


class Detector(nn.Module):
    """A model whose batches are no tensors, but lists of images and of boxes, or a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, batch: Any, boxes: Any = None) -> Tensor:
        images = batch["image"] if isinstance(batch, dict) else torch.stack([*batch])
        loss: Tensor = self.net(images).square().mean()
        return loss


def with_lists_of_samples(folder: Path) -> None:
    start()
    model = DistributedDataParallel(Detector())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, named = torch.ones(2, 12), {"boxes": torch.ones(7, 4), "file": ("1.png", "2.png")}
    calls: list[tuple[Any, ...]] = [
        ([*images], [{"boxes": torch.ones(5, 4)}] * 2),
        (named | {"image": images},),
        ({"image": images, "boxes": [torch.ones(7, 4)] * 3},),
    ]
    run = ddprun.observe(model, optimizer, run_dir=folder)
    for arguments in calls:
        model(*arguments).backward()
        optimizer.step()
        optimizer.zero_grad()
    model(batch=images, boxes=["cat", "dog", "cow"]).backward()
    optimizer.step()
    run.close()


def test_samples_are_counted_in_lists_of_them(scripts: Scripts) -> None:
    """Neither an image's channels nor all boxes of a batch are its samples; else the first tensor counts, as
    it does where it is the first input, by name or not.
    """
    assert [step["samples"] for step in scripts.steps("with_lists_of_samples")] == [2, 2, 2, 2]


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


def test_sparse_gradients_keep_their_bits(scripts: Scripts) -> None:
    assert scripts.returned["with_sparse_gradients"]


def with_compiled_model(folder: Path) -> None:
    model, optimizer = start()
    compiled: Any = torch.compile(model, backend="eager")
    compiled = nn.Sequential(compiled)  # as a framework wraps it
    run = ddprun.observe(compiled, optimizer, run_dir=folder)
    for _ in range(5):
        compiled(torch.ones(2, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()


def test_a_compiled_model_is_observed(scripts: Scripts) -> None:
    assert [step["step"] for step in scripts.steps("with_compiled_model")] == [
        1,
        2,
        3,
        4,
        5,
    ]


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, inputs: Tensor) -> Tensor:
        loss: Tensor = self.net(inputs).square().mean()
        return loss


class WithSharedLoss(WithLoss):
    """A model as transformers has them."""

    def forward(self, inputs: Tensor, num_items_in_batch: int | None = None) -> Tensor:
        return super().forward(inputs) * len(inputs) / (num_items_in_batch or len(inputs))


def with_shared_loss(folder: Path) -> None:
    """Each rank's loss is its share of the mean over four samples, and then the mean over its own two."""
    start()
    model = DistributedDataParallel(WithSharedLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = ddprun.observe(model, optimizer, run_dir=folder)
    for options in ({"num_items_in_batch": 4}, {}, {"num_items_in_batch": None}):
        model(torch.ones(2, 12), **options).backward()
        optimizer.step()
    run.close()


def test_a_loss_that_is_no_mean_of_its_batch_is_not_noted(scripts: Scripts) -> None:
    steps = scripts.steps("with_shared_loss")
    assert [step["loss"] is None for step in steps] == [True, False, False]


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


def test_a_step_may_have_its_passes_in_a_closure(scripts: Scripts) -> None:
    """With the loss that the model returns, and without the time of evaluations."""
    steps = scripts.steps("with_closure")
    assert [(step["step"], step["samples"]) for step in steps] == [(number, 4) for number in range(1, 6)]
    for step in steps:
        assert step["loss"] is not None
        assert step["step_us"] < 200_000
        assert all(step[f"{part}_us"] > 0 for part in ("forward", "backward", "optimizer"))


class StepsItself(nn.Module):
    """A model whose forward pass takes the whole step, as Lightning's manual optimization makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, take_step: Callable[[Tensor], None]) -> None:
        for _ in range(2):
            time.sleep(0.02)
            take_step(self.net(torch.ones(2, 12)).square().mean())


def with_steps_in_forward(folder: Path) -> None:
    start()
    model = DistributedDataParallel(StepsItself())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def take_step(loss: Tensor) -> None:
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    run = ddprun.observe(model, optimizer, run_dir=folder)
    for _ in range(4):
        model.require_backward_grad_sync = False  # else DDP would prepare for a backward pass afterwards
        model(take_step)
    run.close()


def test_a_forward_pass_may_take_the_step(scripts: Scripts) -> None:
    """Its own work before each backward pass is part of the forward pass."""
    steps = scripts.steps("with_steps_in_forward")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["forward_us"] > 40_000 for step in steps)
    assert all(step[f"{part}_us"] > 0 for part in ("backward", "optimizer") for step in steps)


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


def test_buffers_are_sent_as_ddp_sends_them_and_who_is_late_with_them_is_named(scripts: Scripts) -> None:
    """The same bits, timed and counted in training. Ranks wait for each other with the buffers first."""
    plain, observed = scripts.returned["with_buffers"]
    assert len(plain) == 9
    assert all(torch.equal(one, other) for one, other in zip(plain, observed, strict=True))
    run = scripts.folder / "with_buffers"
    sent = [one for one in records(run, "buckets") if one["kind"] == "buffers"]
    without = {1 + epoch * BATCHES for epoch in range(1, 8)}  # in a pass after an evaluation DDP sends none
    assert [one["bytes"] for one in sent] == [2 * 6 * 4, 8] * (8 * BATCHES - len(without))
    assert {one["step"] for one in sent} == set(range(1, 8 * BATCHES + 1)) - without
    (late, *_) = events(run, "straggler")
    assert (late["straggler"], late["cause"]) == (1, "data")
    waiting = median(one["forward_us"] for one in records(run, "steps"))
    assert waiting < late["late_us"] / 2


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


@pytest.mark.parametrize("body", ["with_left_out_pass", "with_left_out_pass_and_lag"])
def test_a_left_out_backward_pass_is_told(scripts: Scripts, body: str) -> None:
    """From there on the ranks average gradients of different steps."""
    (told,) = events(scripts.folder / body, "exchange_skipped")
    assert (told["step"], told["ranks"]) == (20, [1])


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


def test_an_interrupted_run_is_not_failed(scripts: Scripts) -> None:
    """Though only one of the ranks knows that, and has its totals."""
    summary = json.loads((scripts.folder / "with_interrupt" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["error"]) == ("interrupted", 5, None)
    assert summary["samples"] == 2 * 5 * 2


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


def test_signals_stay_the_scripts(scripts: Scripts) -> None:
    """Though rank 0 closes its trackers if torchrun ends it."""
    assert scripts.returned.get("with_signals", [-signal.SIGTERM, signal.SIGTERM]) == [
        -signal.SIGTERM,
        signal.SIGTERM,
    ]


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


def test_passes_without_a_step_are_told(scripts: Scripts) -> None:
    """Once, with what to do; memory does not grow with them."""
    (told,) = scripts.returned["with_foreign_optimizer"]
    assert told.startswith("no step of an optimizer seen in 256 backward passes, so nothing is recorded: ")
    assert not (scripts.folder / "with_foreign_optimizer" / "steps").exists()


def with_earlier_error(folder: Path) -> None:
    """Somebody has typed something wrong in an interactive session, and leaves it without `close`."""
    model, optimizer = start()
    sys.last_value = ValueError("typed before")
    run = ddprun.observe(model, optimizer, run_dir=folder)
    model(torch.ones(2, 12)).square().mean().backward()
    optimizer.step()
    run._close_at_exit()
    del sys.last_value


def test_an_error_before_the_run_is_not_its_own(scripts: Scripts) -> None:
    found = json.loads((scripts.folder / "with_earlier_error" / "summary.json").read_text())
    assert (found["status"], found["steps"]) == ("done", 1)


def with_restart(folder: Path) -> None:
    """Ranks that torchrun, whose store outlives them, starts again after an attempt that has failed."""
    model, optimizer = start()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for attempt in range(2):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        observing._run_counter = itertools.count(1000)  # as in a new process
        with suppress(ValueError), ddprun.observe(model, optimizer, run_dir=folder):
            model(torch.ones(2, 12)).square().mean().backward()
            optimizer.step()
            if not attempt:
                raise ValueError("a broken sample")
        model, optimizer = start()
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"], os.environ["TORCHELASTIC_RESTART_COUNT"]


def test_a_restart_knows_nothing_of_the_attempt_before(scripts: Scripts) -> None:
    """And has a folder of its own."""
    folders = (scripts.folder / "with_restart", scripts.folder / "with_restart-restart-1")
    found = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert [(one["status"], one["steps"]) for one in found] == [("failed", 1), ("done", 1)]
