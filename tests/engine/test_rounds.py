"""Rounds of a local policy: each rank takes as many updates as it manages, and counts by its samples."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddprun.engine.balance import ShareBalancer
from ddprun.engine.samples import positions_by_rank
from ddprun.telemetry.control_message import OWN_AT, READY_AT, SAMPLES_AT, STEPS_AT, US_AT
from ddprun_hooks.comm.groups import RankGroup
from tests.checkpoint.runs import MLP, MODULE, asked, final
from tests.engine.running import SAMPLES, events, lines, run_pipeline, run_to_end, summary, weights
from tests.engine.test_balance import changes, recorded, start_pipeline
from tests.engine.test_data import Ids, Stream, feed, on_ranks
from tests.engine.test_equalities import FP64, NETS

# The feed.


def shares_of_round(step: int) -> Sequence[int]:
    """Of 3 ranks, in batches of 4 samples; also rounds of another size."""
    return [(4, 4, 4), (16, 4, 8), (16, 4, 8), (4, 12, 4)][step % 4]


def rounds_of_rank(group: RankGroup, kind: type[Ids | Stream], workers: int) -> list[Any]:
    found = []
    for size, drop_last in product((12, 37, 61), (False, True)):
        source = feed(kind(size), group.rank, 3, workers=workers, drop_last=drop_last)
        source.set_shares(shares_of_round(0), 4)
        steps = []
        for number, step in enumerate(source.steps(1, epochs=2), start=1):
            batches = list(step.micro_batches)
            assert len(batches) == step.micro_batch_count
            steps.append(([one.content[0].tolist() for one in batches], step.total_weight))
            source.set_shares(shares_of_round(number), 4)
        found.append((size, drop_last, steps))
    return found


@pytest.mark.parametrize(("kind", "workers"), [(Ids, 0), (Ids, 2), (Stream, 0)])
def test_each_sample_is_in_one_batch_of_one_rank_in_an_epoch(kind: type[Ids | Stream], workers: int) -> None:
    """All batches are full but for the last one of an epoch."""
    for of_ranks in zip(*on_ranks(3, rounds_of_rank, kind, workers), strict=True):
        (size, drop_last, _), seen = of_ranks[0], list[list[int]]()
        for number, steps in enumerate(zip(*(steps for *_, steps in of_ranks), strict=True)):
            shares, ids = shares_of_round(number), [i for batches, _ in steps for one in batches for i in one]
            assert {total for _, total in steps} == {len(ids)}
            seen.append(ids)
            smaller = [one for batches, _ in steps for one in batches if len(one) < 4]
            assert len(smaller) <= (not drop_last and len(ids) % 4 > 0)
            if len(ids) == sum(shares):
                assert [sum(map(len, batches)) for batches, _ in steps] == list(shares)
        times = Counter(index for ids in seen for index in ids)
        assert max(times.values()) == 2
        assert sum(times.values()) == 2 * (size - size % 4 * drop_last)


# The decision.


def message(us_per_sample: Sequence[float], shares: Sequence[int], part: float = 1.0) -> Any:
    """All ranks' messages of a round, of which `part` was left."""
    samples = np.array(shares) * part
    found = np.zeros((1, len(shares), READY_AT + 1))
    busy = samples * us_per_sample
    found[0, :, SAMPLES_AT], found[0, :, STEPS_AT] = samples, 1
    found[0, :, US_AT], found[0, :, OWN_AT + 1] = busy.max(), 0.6 * busy
    found[0, :, OWN_AT + 4] = 0.4 * busy  # the optimizer
    return found


def rounds(
    balance: ShareBalancer, us_per_sample: Any, count: int, seed: int = 0
) -> list[tuple[int, tuple[int, ...]]]:
    """The changes in so many rounds."""
    draw, found = random.Random(seed), []
    balance.begin_stage(0)
    for step in range(1, count + 1):
        noisy = [us * max(0.5, draw.gauss(1, 0.03)) for us in us_per_sample(step)]
        balance.add_messages([step], message(noisy, balance.shares, draw.choice([1.0, 1.0, 0.5])))
        if balance.adjust_shares_after(step):
            found.append((step, balance.shares))
    return found


def test_a_round_of_so_many_samples_is_shared_by_speed_in_whole_batches() -> None:
    """After a round that is not measured and two that are; a round that the epoch's end cuts counts, too."""
    for seed in range(10):
        balance = ShareBalancer((1024, 1024), max_rank_samples=2048, by_speed=True, local_batch=32)
        ((step, (first, second)), *more) = rounds(balance, lambda _: [500, 1000], 60, seed)
        assert step == 3
        assert first + second == 2048
        assert first % 32 == second % 32 == 0
        assert abs(second - 2048 / 3) <= 96
        assert len(more) <= 1, "they do not swing"


def test_a_round_of_so_many_seconds_grows_to_what_each_rank_manages() -> None:
    """From one batch of each; a rank that becomes slow takes fewer from then on."""
    balance = ShareBalancer((32, 32), by_speed=True, local_batch=32, round_seconds=2.0)
    found = rounds(balance, lambda step: [500, 1000 if step < 20 else 2000], 60)
    assert found[0][0] == 3
    assert {share % 32 for share in found[0][1]} == {0}
    assert list(found[0][1]) == pytest.approx([4000, 2000], rel=0.1)
    assert list(balance.shares) == pytest.approx([4000, 1000], rel=0.1)
    assert min(step for step, shares in found if shares[1] < 1300) <= 20 + 3 * 4


def test_a_rank_that_becomes_fast_takes_more_in_its_seconds() -> None:
    """Although the slowest one works for as long as before."""
    balance = ShareBalancer((32, 32), by_speed=True, local_batch=32, round_seconds=2.0)
    rounds(balance, lambda step: [500, 1000 if step < 20 else 500], 60)
    assert list(balance.shares) == pytest.approx([4000, 4000], rel=0.1)


def test_equal_ranks_keep_equal_rounds() -> None:
    for seed in range(30):
        balance = ShareBalancer((1024, 1024), max_rank_samples=2048, by_speed=True, local_batch=32)
        assert rounds(balance, lambda _: [700, 700], 100, seed) == []


def test_the_round_of_a_checkpoint_goes_on_unless_it_does_not_fit() -> None:
    """Of other batches or ranks, or a round of another size: measured anew."""
    state = ShareBalancer((96, 32), by_speed=True, local_batch=32, round_seconds=1.0).state_dict()
    for batch, seconds, ranks, shares in (
        (32, 1.0, 2, (96, 32)),
        (64, 1.0, 2, (64, 64)),
        (48, 1.0, 2, (48, 48)),
        (32, 1.0, 3, (32, 32, 32)),
        (32, None, 2, (32, 32)),
    ):
        resumed = ShareBalancer(
            (batch,) * ranks, max_rank_samples=999, by_speed=True, local_batch=batch, round_seconds=seconds
        )
        resumed.load_state_dict(state)
        assert resumed.shares == shares


# Runs.


def by_hand(shares_of: Any, rounds: int, outer: tuple[float, float]) -> dict[str, torch.Tensor]:
    """Three ranks in one process: local SGD on each one's batches, and the mean of changes by samples."""
    scope: dict[str, Any] = {}
    exec(compile(NETS, "nets", "exec"), scope)
    torch.manual_seed(1)
    common, data = scope["Wide"](), scope["Wave"](300)
    replicas = [scope["Wide"]() for _ in range(3)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in replicas]
    by_outer = torch.optim.SGD(common.parameters(), lr=outer[0], momentum=outer[1], nesterov=outer[1] > 0)
    epoch, start, done = 0, 0, 0
    while done < rounds:
        shares = shares_of(done + 1)
        order = torch.randperm(300, generator=torch.Generator().manual_seed(1 + epoch))
        ids, mean = order[start : start + sum(shares)], [torch.zeros_like(p) for p in common.parameters()]
        for rank, (model, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            model.load_state_dict(common.state_dict())
            batches = [
                ids[8 * at : 8 * at + 8] for at in positions_by_rank(tuple(one // 8 for one in shares))[rank]
            ]
            own = sum(map(len, batches))
            for batch in filter(len, batches):
                inputs = data.inputs[batch]
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            for total, new, old in zip(mean, model.parameters(), common.parameters(), strict=True):
                total += (new - old).detach() * own / len(ids)
        for param, change in zip(common.parameters(), mean, strict=True):
            param.grad = -change
        by_outer.step()
        done, start = done + 1, start + sum(shares)
        if start >= 300:
            epoch, start = epoch + 1, 0
    return dict(common.state_dict())


@pytest.mark.parametrize(
    ("sync", "outer"),
    [
        ("{local_sgd: {every: {samples: 48}}}", (1.0, 0.0)),
        ("{diloco: {every: {samples: 48}, outer_lr: 0.7, outer_momentum: 0.8}}", (0.7, 0.8)),
    ],
)
def test_rounds_are_local_updates_whose_changes_count_by_samples(
    tmp_path: Path, sync: str, outer: tuple[float, float]
) -> None:
    """In fp64, with shares that change, over epochs whose last round is cut: as ranks in one process."""
    (tmp_path / "nets.py").write_text(NETS)
    shares = {1: (16, 16, 16), 4: (32, 8, 8), 9: (8, 8, 32)}
    recorded(tmp_path / "before", *shares.items())
    text = FP64.format(batch="8, balance: {replay: before}", accumulate=1, steps=16)
    done = run_pipeline(tmp_path, f"{text}sync: {sync}\n", 3)
    expected = by_hand(lambda step: shares[max(first for first in shares if first <= step)], 16, outer)
    for name, value in expected.items():
        assert torch.allclose(weights(done)[name], value, rtol=0, atol=1e-12), name
    of_ranks = [[line["samples"] for line in lines(done, "steps") if line["step"] == step] for step in (4, 7)]
    assert of_ranks[0] == [32, 8, 8]
    assert sum(of_ranks[1]) == 300 - 6 * 48
    assert summary(done)["samples"] == 2 * 300 + 2 * 48


MEASURED = f"""
model: {MLP}
data: {{train: samples.Samples}}
loader: {{batch_size: 2, balance: BALANCE}}
optimizer: {{adamw: {{lr: 0.01}}}}
checkpoint: {{every: 10, keep: 2}}
sync: {{diloco: {{every: {{EVERY}}}}}}
hooks: [{{topk: {{density: 0.2}}}}]
stages: [{{train: {{steps: STEPS}}}}, save]
"""


def start(
    folder: Path, balance: str, every: str, steps: int, *, sleeps: str = "[0.002, 0.016]", kill: str = ""
) -> Path:
    """Each rank sleeps so many seconds for a sample."""
    text = MEASURED.replace("BALANCE", balance).replace("EVERY", every).replace("STEPS", str(steps))
    module = MODULE.replace("time.sleep(0.005)", f"time.sleep({sleeps}[RANK])")
    return start_pipeline(folder, module.replace("return 61", "return 400"), text, kill or None)


def test_a_slow_rank_takes_fewer_updates_and_a_replay_has_the_same_bits(tmp_path: Path) -> None:
    """Rank 1 takes eight times as long for a sample; also killed and resumed."""
    measured = start(tmp_path / "measured", "null", "samples: 20", 60)
    (_, even), (_, shares), *_ = changes(measured)
    assert even == [10, 10]
    assert sum(shares) == 20
    assert shares[0] >= 12
    assert {share % 2 for share in shares} == {0}
    replayed = start(tmp_path / "replayed", "{replay: ../measured/run}", "samples: 20", 60)
    assert changes(replayed) == changes(measured)
    assert final(replayed) == final(measured)
    last = len(asked(tmp_path / "measured", 1)) - 5
    broken = start(tmp_path / "broken", "{replay: ../measured/run}", "samples: 20", 60, kill=f"1 {last}")
    assert [one["event"] for one in events(broken)].count("resumed") == 1
    assert final(broken) == final(measured)


def test_a_round_takes_about_so_many_seconds(tmp_path: Path) -> None:
    """It begins with a batch of each rank; then it has as many as its records say that a rank manages."""
    done = start(tmp_path / "seconds", "null", "seconds: 0.5", 12, sleeps="[0.01, 0.04]")
    (_, even), (changed_at, shares), *_ = changes(done)
    assert even == [2, 2]
    for rank, share in enumerate(shares):
        measured = [
            sum(one[f"{part}_us"] for part in ("data", "forward", "backward", "exposed_hook", "optimizer"))
            for one in lines(done, "steps")
            if one["rank"] == rank and 1 < one["step"] < changed_at
        ]
        assert share / 2 == pytest.approx(0.5e6 / np.median(measured), rel=0.25, abs=1)
    assert math.isfinite(summary(done)["loss"])


NET = f"""{SAMPLES}

class Net(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        self.double()


class Loss(nn.Module):
    def forward(self, output, target):
        loss = nn.functional.cross_entropy(output, target)
        return {{"loss": loss, "square": output.square().mean()}}
"""


def test_equal_steps_first_then_rounds(tmp_path: Path) -> None:
    """Post-local SGD: the first stage has no shares, and its steps are `batch_size` of each rank."""
    (tmp_path / "mine.py").write_text(NET)
    text = """
model: mine.Net
data: {train: mine.Samples}
loader: {batch_size: 4}
optimizer: sgd
stages:
  - train: {steps: 3, sync: every_step}
  - train: {steps: 3, sync: {local_sgd: {every: {samples: 24}}}}
  - train: {steps: 2, sync: every_step}
"""
    done = run_pipeline(tmp_path, text, 2)
    of_steps = [line["samples"] for line in lines(done, "steps") if line["rank"] == 0]
    assert of_steps == [4, 4, 4, 12, 12, 12, 4, 4]


MIXED = """
model: mine.Net
data: {train: mine.Samples}
loader: {batch_size: 4, drop_last: true, balance: BALANCE}
loss: mine.Loss
optimizer: sgd
schedule: {CosineAnnealingLR: {}, over: run}
ema: 0.9
stages:
  - train: {steps: 7, sync: {local_sgd: {every: {samples: 44}}}}
  - train: {epochs: 2, sync: every_step}
  - save
"""


def test_stages_beside_rounds_keep_their_lengths_and_schedules(tmp_path: Path) -> None:
    """Ranks without a batch in a round that an epoch's end cuts stay in step with the others, also with
    numbers beside the loss; averages of the weights follow the exchange, so that they are equal. A replay of
    it has shares in its rounds alone.
    """
    (tmp_path / "mine.py").write_text(NET)
    done = run_pipeline(tmp_path, MIXED.replace("BALANCE", "null"), 3)
    started = {one["stage"]: one["steps"] for one in events(done) if one["event"] == "stage_started"}
    assert started == {0: 7, 1: 8}
    rounds_of_ranks = [one for one in lines(done, "steps") if one["stage"] == 0]
    assert min(one["samples"] for one in rounds_of_ranks) == 0, "a round of one batch"
    assert {tuple(one["mean_values"]) for one in lines(done, "steps")} == {("square",)}
    for step in range(8, 16):
        rates = [one["lr"][0] for one in lines(done, "steps") if one["step"] == step]
        assert rates == pytest.approx([1e-3 * (1 + math.cos(math.pi * (step - 1) / 15)) / 2] * 3)
    assert not any(one["kind"] == "parameters" for one in lines(done, "buckets")), "no averages were sent"
    replayed = run_pipeline(tmp_path, MIXED.replace("BALANCE", "{replay: run}"), 3, "again")
    assert final(replayed) == final(done)


def test_averages_of_mixed_weights_are_made_equal(tmp_path: Path) -> None:
    """With `alpha` ranks differ after a round, and so do averages of their weights."""
    text = MIXED.replace("BALANCE", "null").replace("  - train: {epochs: 2, sync: every_step}\n", "")
    text = text.replace("{local_sgd: {every: {samples: 44}}}", "{diloco: {every: {samples: 44}, alpha: 0.5}}")
    (tmp_path / "mine.py").write_text(NET)
    done = run_pipeline(tmp_path, text, 3)
    assert any(one["kind"] == "parameters" for one in lines(done, "buckets")), "averages were sent"


SMALL = """
model: mine.Net
data: {train: mine.Samples}
loader: {batch_size: 8, LOADER}
optimizer: sgd
sync: {local_sgd: {every: {EVERY}}}
stages: [{train: {steps: 8}}, save]
"""


@pytest.mark.parametrize(
    ("loader", "every", "shares", "message"),
    [
        (
            "shuffle: false",
            "samples: 8",
            [],
            "every.samples: a round of 8 samples has less than a batch of 8 for",
        ),
        (
            "balance: {replay: before}",
            "samples: 32",
            [(1, (20, 12))],
            "of 32 samples together, each a multiple of batch_size 8",
        ),
        (
            "balance: {replay: before}",
            "samples: 32",
            [(1, (8, 8))],
            "before has shares of [8, 8] samples from step 1 on, and this run needs",
        ),
    ],
)
def test_rounds_that_do_not_fit_the_run_are_refused(
    tmp_path: Path, loader: str, every: str, shares: list[tuple[int, Sequence[int]]], message: str
) -> None:
    """Before step 1."""
    (tmp_path / "mine.py").write_text(NET)
    recorded(tmp_path / "before", *shares)
    codes, told = run_to_end(tmp_path, SMALL.replace("LOADER", loader).replace("EVERY", every))
    assert codes == [2, 2]
    assert message in told
