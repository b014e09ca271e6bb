"""Ranks of different speed: unequal shares of each micro-batch, what decides them, and what they change."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddprun.engine.balance import ShareBalancer, apportion
from ddprun.engine.data import Feed
from ddprun.engine.samples import positions_by_rank
from ddprun.telemetry.control_message import OWN_AT, READY_AT, STEPS_AT, US_AT
from ddprun_hooks.comm.groups import RankGroup
from tests.checkpoint.runs import MLP, MODULE, asked, final, run
from tests.engine.running import SAMPLES, events, lines, run_pipeline, run_to_end, summary, weights
from tests.engine.test_data import Ids, Stream, epoch, feed, on_ranks
from tests.engine.test_equalities import FP64, NETS, one_process
from tests.ranks import ddprun

# Shares, and who gets which sample.


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_first_part_of_a_micro_batch_is_shared_in_proportion(ranks: int) -> None:
    """Each position is one rank's, and equal shares are dealt round robin."""
    for shares in product(range(1, 8), repeat=ranks):
        owners = {at: rank for rank, positions in enumerate(positions_by_rank(shares)) for at in positions}
        total = sum(shares)
        assert sorted(owners) == list(range(total))
        for length in range(total + 1):
            for rank, share in enumerate(shares):
                own = sum(owners[at] == rank for at in range(length))
                assert abs(own - length * share / total) <= 0.5 + ranks * share / (2 * total)
        if len(set(shares)) == 1:
            assert [owners[at] for at in range(total)] == [at % ranks for at in range(total)]


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9), st.integers(1, 60), st.floats(1, 4))
def test_shares_add_up_in_proportion_within_their_bounds(
    speeds: list[float], size: int, max_share: float
) -> None:
    """At least one sample each, none above the most, and no other shares would let all be done earlier."""
    total, most = size * len(speeds), int(max_share * size)
    shares = apportion(speeds, total, most)
    assert sum(shares) == total
    assert all(1 <= share <= most for share in shares)
    done_at, last = max((share / speed, share) for share, speed in zip(shares, speeds, strict=True))
    if last > 1:  # it has a sample that another rank could take
        with_one_more = [(share + 1) / one for share, one in zip(shares, speeds, strict=True) if share < most]
        assert min(with_one_more, default=done_at) >= done_at * (1 - 1e-12)


def test_what_a_share_may_not_have_goes_to_the_others() -> None:
    """Of a rank that is far faster, or far slower, than a micro-batch can show."""
    assert apportion([1, 1, 1], 128, 64) == (43, 43, 42)
    assert apportion([9, 1, 1, 1], 128, 64) == (64, 22, 21, 21)
    assert apportion([1000, 1], 8, 8) == (7, 1)
    assert apportion([1, 0.27, 0.27], 8, 8) == (6, 1, 1)


# The feed.

Plan = Callable[[int], Sequence[int]]


def alternate(step: int) -> Sequence[int]:
    """Shares of 3 ranks that change all the time, of 12 samples."""
    return [(4, 4, 4), (9, 2, 1), (9, 2, 1), (1, 6, 5)][step % 4]


def three_epochs(source: Feed, accumulate: int, plan: Plan) -> Iterator[list[tuple[list[int], int]]]:
    """The steps of three epochs: ids that count, and the step's total."""
    source.set_shares(plan(0))
    for number, step in enumerate(source.steps(accumulate, epochs=3), start=1):
        micro_batches = list(step.micro_batches)
        yield [
            (micro.content[0].tolist()[: micro.samples], int(step.total_weight)) for micro in micro_batches
        ]
        source.set_shares(plan(number))


def balanced_steps(group: RankGroup, kind: type[Ids | Stream], workers: int) -> list[Any]:
    found = []
    sizes = (13, 37) if workers else (12, 13, 37, 61)  # starting loading processes takes a while
    for size, accumulate, drop_last in product(sizes, (1, 3), (False, True)):
        source = feed(kind(size), group.rank, 3, workers=workers, drop_last=drop_last)
        found.append((size, drop_last, list(three_epochs(source, accumulate, alternate))))
    return found


@pytest.mark.parametrize(("kind", "workers"), [(Ids, 0), (Ids, 2), (Stream, 0)])
def test_each_sample_counts_once_in_an_epoch_whatever_the_shares(
    kind: type[Ids | Stream], workers: int
) -> None:
    """Shares that change between steps and hold from the next one on, uneven ends, accumulation; every rank
    knows each step's total.
    """
    for of_ranks in zip(*on_ranks(3, balanced_steps, kind, workers), strict=True):
        (size, drop_last, _), seen = of_ranks[0], list[int]()
        for done, steps in enumerate(zip(*(steps for *_, steps in of_ranks), strict=True)):
            counts = [tuple(len(batch) for batch, _ in micros) for micros in zip(*steps, strict=True)]
            assert {count for count in counts if sum(count) == 12} <= {alternate(done)}
            ids = [i for micros in steps for batch, _ in micros for i in batch]
            assert {total for micros in steps for _, total in micros} == {len(ids)}
            seen += ids
        whole = size - size % 12 if drop_last else size
        for number in range(3):
            ids = seen[number * whole : (number + 1) * whole]
            assert len(set(ids)) == whole
        assert len(seen) == 3 * whole


class Asked(Ids):
    """Notes which samples are asked for."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.asked: list[int] = []

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.asked.append(index)
        return super().__getitem__(index)


def test_a_change_of_shares_loads_nothing_twice() -> None:
    """Without loading processes: what ranks ask their data for is each sample, once in an epoch."""
    seen = []
    for rank in range(3):
        data = Asked(61)
        steps = list(three_epochs(feed(data, rank, 3), 1, alternate))
        assert data.asked[-1] in steps[-1][0][0] or not steps[-1][0][0]
        seen += [index for step in steps for ids, _ in step for index in ids]
        computed_along = sum(not ids for step in steps for ids, _ in step)
        assert len(data.asked) == sum(len(ids) for step in steps for ids, _ in step) + computed_along
    assert sorted(seen) == sorted([*range(61)] * 3)


@pytest.mark.parametrize("kind", [Ids, Stream])
def test_a_feed_goes_on_amid_an_epoch_with_other_shares_and_ranks(kind: type[Ids | Stream]) -> None:
    """The position is that of all ranks: no sample twice and none left out."""
    sources = [feed(kind(61), rank, 3) for rank in range(3)]
    seen, states = list[int](), list[dict[str, Any]]()
    for source in sources:
        for _, step in zip(range(3), three_epochs(source, 1, alternate), strict=False):
            seen += [index for ids, _ in step for index in ids]
        states.append(source.state_dict())
    assert states == [{"epoch": 0, "samples": 36}] * 3
    for rank in range(2):
        source = feed(kind(61), rank, 2)
        source.load_state_dict(states[0])
        source.set_shares((7, 1))
        for rest in source.steps(1, epochs=1):
            seen += [i for micro in rest.micro_batches for i in micro.content[0].tolist()[: micro.samples]]
    assert sorted(seen) == list(range(61))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [Ids, Stream])
@pytest.mark.parametrize("size", [10, 61, 70])
def test_a_global_batch_is_the_same_sum_for_every_number_of_ranks(
    kind: type[Ids | Stream], size: int, ranks: int
) -> None:
    """Micro-steps as equal as possible, none above batch_size on a rank; the last step has the rest."""
    for drop_last in (False, True):
        options = {"batch_size": 3, "global_batch": 10, "drop_last": drop_last}
        epochs = [epoch(feed(kind(size), rank, ranks, **options)) for rank in range(ranks)]
        sums = []
        for step in zip(*epochs, strict=True):
            micro_sums = [sum(map(len, of_ranks)) for of_ranks in zip(*map(ids_of, step), strict=True)]
            assert max(len(ids) for of_rank in step for ids in ids_of(of_rank)) <= 3
            assert {total for of_rank in step for _, total in of_rank} == {sum(micro_sums)}
            sums.append(sum(micro_sums))
            if sums[-1] == 10:
                assert len(micro_sums) == -(-10 // (3 * ranks))
                assert max(micro_sums) - min(micro_sums) <= 1
        left = [size % 10] if size % 10 and not drop_last else []
        assert sums == [10] * (size // 10) + left
        seen = [index for steps in epochs for step in steps for ids in ids_of(step) for index in ids]
        assert len(set(seen)) == len(seen) == sum(sums)
        if kind is Ids:
            assert feed(kind(size), 0, ranks, **options).steps_per_epoch(1) == len(sums)


def ids_of(step: list[tuple[list[int], int]]) -> list[list[int]]:
    return [ids for ids, _ in step]


# The decision.

Speeds = Callable[[float], Sequence[float]]


def decide(
    us_per_sample: Speeds, *, seconds: float, seed: int = 0, noise: float = 0.1, fixed_us: float = 0.0
) -> list[tuple[float, tuple[int, ...]]]:
    """The changes of shares, and when, of ranks that take so long for a sample at a time in seconds."""
    draw, now, step, posted_at, changes = random.Random(seed), 0.0, 0, 0.0, []
    ranks = len(us_per_sample(0))
    balance = ShareBalancer((32,) * ranks, max_rank_samples=64, by_speed=True)
    balance.begin_stage(0)
    waiting: list[Any] = []
    while now < seconds:
        step += 1
        message = np.zeros((ranks, READY_AT + 1))
        times = [us * share for us, share in zip(us_per_sample(now), balance.shares, strict=True)]
        busy = [(fixed_us + us) * max(0.1, draw.gauss(1, noise)) for us in times]
        message[:, STEPS_AT], message[:, US_AT], message[:, OWN_AT + 1] = 1, 1.05 * max(busy), busy
        waiting.append(message)
        now += 1.05e-6 * max(busy)
        if now >= posted_at + 0.5:
            balance.add_messages(range(step + 1 - len(waiting), step + 1), np.stack(waiting))
            waiting, posted_at = [], now
        if balance.adjust_shares_after(step):
            changes.append((now, balance.shares))
    return changes


@pytest.mark.parametrize("step_ms", [3, 30, 300])
def test_a_rank_half_as_fast_gets_half_as_much_within_three_windows(step_ms: int) -> None:
    """The first window is enough, and then the shares stay."""
    us = step_ms * 1e3 / 32
    for seed in range(5):
        ((at, (first, second)),) = decide(lambda _: [us, 2 * us], seconds=20, seed=seed)
        assert first + second == 64
        assert 20 <= second <= 22
        assert at < max(1.5, 3 * 11 * step_ms / 1e3)


def test_the_first_steps_are_not_measured() -> None:
    """Two of them, in which memory is allocated and files are opened; then a window of eight."""
    balance = ShareBalancer((32, 32), max_rank_samples=64, by_speed=True)
    balance.begin_stage(0)
    message = np.zeros((1, 2, READY_AT + 1))
    message[..., STEPS_AT], message[..., US_AT], message[..., OWN_AT] = 1, 2e3, [1e3, 2e3]
    for step in range(1, 10):
        balance.add_messages([step], message)
        assert not balance.adjust_shares_after(step)
    balance.add_messages([10], message)
    assert balance.adjust_shares_after(10)
    assert balance.shares == (43, 21)


def test_shares_do_not_swing_where_a_step_costs_more_than_its_samples() -> None:
    """They approach what makes ranks equally fast from one side."""
    for seed in range(5):
        changes = decide(lambda _: [500, 1000], seconds=30, seed=seed, fixed_us=10_000)
        of_slow_rank = [32, *(shares[1] for _, shares in changes)]
        assert of_slow_rank == sorted(of_slow_rank, reverse=True)
        first, second = changes[-1][1]
        assert (10_000 + 1000 * second) / (10_000 + 500 * first) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_equal_ranks_on_a_noisy_machine_are_left_alone(ranks: int) -> None:
    """Each step of each rank takes 10 % more or less: over a thousand windows there is no change."""
    for seed in range(120):
        assert decide(lambda _: [1000.0] * ranks, seconds=10, seed=seed) == []


def test_shares_follow_a_rank_that_becomes_slow_and_fast_again() -> None:
    """Within three windows each time."""
    changes = decide(lambda now: [500, 1000 if 10 < now < 20 else 500], seconds=30)
    (slow_at, slow), (fast_at, fast) = changes
    assert 10 < slow_at < 14 < 20 < fast_at < 24
    assert slow == (43, 21)
    assert max(fast) <= 34


def test_one_slow_step_changes_nothing() -> None:
    """A rank that a step has stopped for half a second is as fast as before."""
    assert decide(lambda now: [500, 20_000 if 0.2 < now < 0.25 else 500], seconds=10, noise=0.02) == []


# Runs.


def recorded(folder: Path, *shares: tuple[int, Sequence[int]]) -> Path:
    """A folder of a run with these shares, each from its step on."""
    folder.mkdir()
    events = [{"event": "shares", "step": step, "samples": samples} for step, samples in shares]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


@pytest.mark.parametrize("accumulate", [1, 2])
def test_changing_shares_are_one_process_with_the_whole_batch(tmp_path: Path, accumulate: int) -> None:
    """In fp64 over 60 steps: every sample weighs the same, whatever the share that it is in. Shares of step
    9 are those of an attempt that was broken off, and that went on after step 2.
    """
    (tmp_path / "nets.py").write_text(NETS)
    shares = [(1, (16, 16, 16)), (9, (46, 1, 1)), (3, (30, 14, 4))]
    recorded(tmp_path / "before", *shares, (17, (1, 1, 46)), (23, (20, 8, 20)), (41, (4, 14, 30)))
    text = FP64.format(batch="16, balance: {replay: before}", accumulate=accumulate, steps=60)
    done = run_pipeline(tmp_path, text, 3)
    for name, value in one_process(tmp_path, 48 * accumulate, 60).items():
        assert torch.allclose(weights(done)[name], value, rtol=0, atol=1e-12), name
    for step, of_ranks in ((2, (16, 16, 16)), (10, (30, 14, 4)), (17, (1, 1, 46))):
        samples = [line["samples"] for line in lines(done, "steps") if line["step"] == step]
        assert samples == [accumulate * share for share in of_ranks]


@pytest.mark.parametrize("balance", ["null", '{"0": 3, "2": 0.5}'])
def test_a_global_batch_is_one_process_with_that_batch(tmp_path: Path, balance: str) -> None:
    """In fp64: 100 samples a step in three micro-steps of 34, 33 and 33, which three ranks share."""
    (tmp_path / "nets.py").write_text(NETS)
    batch = f"14, global_batch: 100, balance: {balance}"
    done = run_pipeline(tmp_path, FP64.format(batch=batch, accumulate=1, steps=60), 3)
    for name, value in one_process(tmp_path, 100, 60).items():
        assert torch.allclose(weights(done)[name], value, rtol=0, atol=1e-12), name
    assert sum(line["samples"] for line in lines(done, "steps")) == 60 * 100
    shares = [event["samples"] for event in events(done) if event["event"] == "shares"]
    assert shares == ([] if balance == "null" else [[24, 7, 3]])


GRADIENTS = """
import torch
from torch import nn


class Samples(torch.utils.data.Dataset):
    '''A gradient each, of which the second half is zero.'''

    def __len__(self):
        return 8 * 32

    def __getitem__(self, place):
        generator = torch.Generator().manual_seed(place)
        return torch.randn(36, dtype=torch.float64, generator=generator) * (place < 8 * 12)


class Net(nn.Linear):
    def __init__(self):
        super().__init__(5, 6, dtype=torch.float64)

    def forward(self, gradients):
        return (torch.cat([param.flatten() for param in self.parameters()]) * gradients).sum(1).mean()
"""
FED_BACK = """
model: mine.Net
data: mine.Samples
loss: model
loader: {batch_size: BATCH, shuffle: false, balance: {replay: before}}
optimizer: {sgd: {lr: 1.0}}
sync: SYNC
hooks: HOOKS
stages: [{train: {steps: 32}}, save]
"""


@pytest.mark.parametrize(
    ("sync", "batch"), [("every_step", 4), ("{local_sgd: {every: {samples: 8}}}", 1)], ids=["steps", "rounds"]
)
def test_error_feedback_loses_nothing_while_shares_change(tmp_path: Path, sync: str, batch: int) -> None:
    """After steps of zeros, weights are those without hooks: what was not sent has been sent later, once."""
    (tmp_path / "mine.py").write_text(GRADIENTS)
    recorded(tmp_path / "before", (1, (4, 4)), (3, (7, 1)), (6, (2, 6)), (10, (5, 3)), (15, (1, 7)))
    text = FED_BACK.replace("BATCH", str(batch)).replace("SYNC", sync)
    plain = weights(run_pipeline(tmp_path, text.replace("HOOKS", "[]"), 2, "plain"))
    for name, stack in (
        ("int8", "[int8]"),
        ("topk", "[{topk: {density: 0.2}}]"),
        ("powersgd", "[{powersgd: {rank: 1}}]"),
    ):
        hooked = weights(run_pipeline(tmp_path, text.replace("HOOKS", stack), 2, name))
        for key, value in plain.items():
            assert (hooked[key] - value).abs().max() < 1e-12, (name, key)


SLOW = MODULE.replace("time.sleep(0.005)", "time.sleep([0.001, 0.006][RANK])")
"""A data set whose samples take rank 1 six times as long."""

KILLED = f"""
model: {MLP}
data: {{train: samples.Samples}}
loader: {{batch_size: 2, balance: BALANCE}}
optimizer: {{adamw: {{lr: 0.01}}}}
checkpoint: {{every: 20, keep: 2}}
stages: [{{train: {{epochs: 16}}}}, save]
"""


def start(folder: Path, balance: str, *, kill: str | None = None) -> Path:
    return start_pipeline(folder, SLOW, KILLED.replace("BALANCE", balance), kill)


def start_pipeline(folder: Path, module: str, pipeline: str, kill: str | None) -> Path:
    """Run a pipeline and its `samples.py` in a new folder; with `kill`, which the module reads, to its death
    and then to the end.
    """
    folder.mkdir()
    (folder / "samples.py").write_text(module)
    (folder / "p.yaml").write_text(pipeline)
    if kill is not None:
        (folder / "kill").write_text(kill)
        assert ddprun("p.yaml", "--run-dir=run", "--nproc-per-node=2", cwd=folder).code == 1
        (folder / "kill").unlink()
    return run(folder, 2, resuming=kill is not None)


def changes(run_dir: Path) -> list[tuple[int, list[int]]]:
    return [(event["step"], event["samples"]) for event in events(run_dir) if event["event"] == "shares"]


def test_a_replay_has_the_bits_of_the_run_that_measured(tmp_path: Path) -> None:
    """Also one that is killed and goes on, and the replay of that one."""
    measured = start(tmp_path / "measured", "speed")
    (_, even), (_, shares), *_ = changes(measured)
    assert even == [2, 2]
    assert shares == [3, 1]
    assert sum(line["samples"] for line in lines(measured, "steps")) == 16 * 61
    replayed = start(tmp_path / "replayed", "{replay: ../measured/run}")
    assert changes(replayed) == changes(measured)
    assert final(replayed) == final(measured)
    last = len(asked(tmp_path / "measured", 1)) - 10
    broken = start(tmp_path / "broken", "{replay: ../measured/run}", kill=f"1 {last}")
    assert [one["event"] for one in events(broken)].count("resumed") == 1
    assert final(broken) == final(measured)
    again = start(tmp_path / "again", "{replay: ../broken/run}")
    assert final(again) == final(measured), "what a killed run has undone is not replayed"


def test_a_resumed_run_goes_on_with_the_shares_that_it_had_found(tmp_path: Path) -> None:
    """And each sample counts once in an epoch, over the break."""
    resumed = start(tmp_path / "killed", "speed", kill="1 250")
    found = [event for event in events(resumed) if event["event"] in ("shares", "resumed")]
    (at,) = (place for place, event in enumerate(found) if event["event"] == "resumed")
    *_, before = (event for event in found[:at] if event["step"] <= found[at]["step"] + 1)
    assert found[at + 1]["step"] == found[at]["step"] + 1
    assert found[at + 1]["samples"] == before["samples"] == [3, 1]
    assert summary(resumed)["samples"] == 16 * 61


def test_a_global_batch_stays_when_ranks_leave(tmp_path: Path) -> None:
    """Four ranks, then three, then two: 12 samples in every step, and each sample once in an epoch."""
    (tmp_path / "samples.py").write_text(MODULE)
    text = KILLED.replace("balance: BALANCE", "global_batch: 12").replace("every: 20", "every: 4")
    (tmp_path / "p.yaml").write_text(text.replace("epochs: 16", "epochs: 4"))
    for ranks, kill in ((4, "3 25"), (3, "2 40")):
        (tmp_path / "kill").write_text(kill)
        run(tmp_path, ranks, resuming=ranks < 4, may_die=True)
        (tmp_path / "kill").unlink()
    done = run(tmp_path, 2, resuming=True)
    sizes = [size for _, size in summary(done)["world_sizes"]]
    assert sizes == [4, 3, 2]
    of_steps = Counter[int]()
    for line in lines(done, "steps"):
        of_steps[line["step"]] += line["samples"]
    assert [of_steps[step] for step in sorted(of_steps)] == [12, 12, 12, 12, 12, 1] * 4


STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(map(Samples().__getitem__, range(48)))


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 3), nn.BatchNorm1d(3))
        self.double()
"""
SMALL = """
model: mine.Net
data: {train: mine.DATA}
loader: {batch_size: 8, shuffle: false, LOADER}
optimizer: sgd
stages: [{train: {steps: 8}}, save]
"""


def test_shares_of_a_checkpoint_are_no_larger_than_the_file_allows() -> None:
    """A rank has run out of memory, and `max_share` is lower now."""
    state = ShareBalancer((24, 8), max_rank_samples=32, by_speed=True).state_dict()
    for most, shares in ((24, (24, 8)), (20, (16, 16))):
        resumed = ShareBalancer((16, 16), max_rank_samples=most, by_speed=True)
        resumed.load_state_dict(state)
        assert resumed.shares == shares


REPLAY = "balance: {replay: before}"


@pytest.mark.parametrize(
    ("loader", "shares", "message"),
    [
        (
            REPLAY,
            [(1, (5, 11)), (4, (5, 5, 6))],
            "before has shares of [5, 5, 6] samples from step 4 on, and this run needs shares of 2 ranks",
        ),
        (
            REPLAY,
            [(1, (8, 8)), (4, (10, 10))],
            "before has shares of [10, 10] samples from step 4 on, and this run needs shares of 2 ranks from "
            "step 1 on, of 16 samples together; name a run of as many ranks",
        ),
        (REPLAY, [], "before has equal shares alone, and this run needs"),
        (
            REPLAY,
            [(4, (5, 11))],
            "before has shares of [5, 11] samples from step 4 on, and this run needs shares of 2 ranks from "
            "step 1 on, of",
        ),
        ("balance: {replay: other}", [], "other is not the folder of a run: it does not exist"),
        ("balance: {node9: 3}", [], 'no rank is on a host "node9"; the hosts are '),
    ],
)
def test_shares_that_do_not_fit_the_run_are_refused(
    tmp_path: Path, loader: str, shares: list[tuple[int, Sequence[int]]], message: str
) -> None:
    """Before step 1, with what is different, and what is allowed."""
    (tmp_path / "mine.py").write_text(SAMPLES + STREAM)
    recorded(tmp_path / "before", *shares)
    codes, told = run_to_end(tmp_path, SMALL.replace("DATA", "Samples").replace("LOADER", loader))
    assert codes == [2, 2]
    assert message in told


def test_iterable_data_is_shared_unequally_without_loading_processes_alone(tmp_path: Path) -> None:
    """New processes would have to read it again from its start. BatchNorm is warned of."""
    text = SMALL.replace("DATA", "Stream").replace("LOADER", 'balance: {"1": 3}, workers: N')
    for workers in (0, 1):
        (folder := tmp_path / str(workers)).mkdir()
        (folder / "mine.py").write_text(SAMPLES + STREAM)
        codes, told = run_to_end(folder, text.replace("N,", f"{workers},").replace(": N}", f": {workers}}}"))
        assert codes == [0, 0] if not workers else [2, 2]
        if workers:
            assert "unequal shares clash with loading processes for iterable data" in told
            continue
        assert "rank 0 4, rank 1 12 of 16 samples (rank 0 is 0.33 times as fast)" in told
        assert "BatchNorm normalises over each rank's own" in told
        assert [line["samples"] for line in lines(folder / "run", "steps")] == [4] * 8 + [12] * 8
