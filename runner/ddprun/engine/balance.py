"""The ranks' shares of each micro-batch, where ranks are not equally fast (`loader.balance`).

Gradients stay those of the whole batch, since each loss is weighted by its samples (`loop.loss_weight`). All
ranks read the same control messages after the same step, and each decides for itself, with the same result.
That takes arithmetic that has the same bits on every processor: Python's own and `math.fsum`, not NumPy's.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from ddprun.config import LoadedPipeline
from ddprun.config.sections import Replay
from ddprun.engine.data import micro_batch_sizes
from ddprun.engine.feeds import Feeds
from ddprun.parallel.ranks import Ranks
from ddprun.telemetry.control_message import OWN_AT, STEPS_AT
from ddprun.telemetry.reader import NoRunError, Run
from ddprun.telemetry.records import OWN_PARTS, SharesSet
from ddprun.telemetry.steps import FloatArray

_FIRST_WINDOW, _WINDOW, _WINDOW_US = 8, 16, 1e6  # steps, and how long those of a later window take
_LEFT_OUT = 2  # steps after a stage's start or a change that are not measured
_MIN_GAIN = 0.05  # of a step's time
_MIN_ERRORS = 4.0  # and so many standard errors of the measured times
_MEDIAN_ERROR = math.pi / 2  # of a median: in mean deviations of normal values, times the root of how many
_MEASURED = OWN_PARTS[:3]
assert _MEASURED == ("data_us", "forward_us", "backward_us")  # as `Balance.add` reads messages

Shares = tuple[int, ...]


def share_out(weights: Sequence[float], total: int, most: int) -> Shares:
    """Whole numbers that add up to `total`, in proportion to the weights as far as each is from 1 to `most`;
    what rounding leaves goes to the largest remainders. 0 is allowed where `total` is less than one each.
    """
    least, low, high = min(1, total // len(weights)), 0.0, total / min(weights)
    for _ in range(100):  # find the scale at which they add up
        scale = (low + high) / 2
        if math.fsum(min(most, max(least, weight * scale)) for weight in weights) < total:
            low = scale
        else:
            high = scale
    exact = [min(most, max(least, weight * high)) for weight in weights]
    shares = [int(one) for one in exact]
    by_remainder = sorted(range(len(shares)), key=lambda rank: shares[rank] - exact[rank])
    for rank in by_remainder[: total - sum(shares)]:
        shares[rank] += 1
    return tuple(shares)


class Balance:
    """The ranks' shares from the next step on: fixed, those of an earlier run, or `by_speed`.

    By speed: a window of steps (the first is shorter) gives each rank's own work in a step, and so the shares
    with which all would take equally long. They are taken if the slowest rank would gain 5 % of a step and
    more than the times scatter, and, after the first window, if the window before wanted about the same.
    """

    def __init__(
        self,
        shares: Shares = (),
        *,
        speeds: Sequence[float] = (),
        most: int = 0,
        by_speed: bool = False,
        replayed: Mapping[int, Shares] | None = None,
    ) -> None:
        self.shares = shares  # samples of each rank in a full micro-batch; empty: no balance, equal shares
        self.speeds = speeds  # of each rank, in any unit; empty: not known
        self.by_speed, self._most, self._replayed = by_speed, most, replayed or {}
        self._wanted: list[int] | None = None  # the change of shares that the window before wanted
        self._first_window = True
        self._measure_from = 0
        self._busy: list[list[float]] = []  # of the window: by step and rank, in microseconds
        self._step_us: list[float] = []

    def begin_stage(self, step: int) -> None:
        """A stage begins, or is resumed, after this step of the run."""
        self._forget(step)
        self._replay(step + 1)

    def add(self, steps: Sequence[int], messages: FloatArray) -> None:
        """Take all ranks' control messages about these steps, shape (messages, ranks, numbers)."""
        numbers = messages[..., STEPS_AT : OWN_AT + len(_MEASURED)].tolist()
        for step, of_ranks in zip(steps, numbers, strict=True):
            if step >= self._measure_from and all(row[0] for row in of_ranks):
                self._busy.append([math.fsum(row[2:]) / row[0] for row in of_ranks])
                self._step_us.append(math.fsum(row[1] / row[0] for row in of_ranks) / len(of_ranks))

    def changes_after(self, step: int) -> bool:
        """Whether there are other shares from the next step on; alike on all ranks."""
        before = self.shares
        if self._replayed:
            self._replay(step + 1)
        elif self.by_speed and self._window_is_full:
            self._judge()
        if self.shares == before:
            return False
        self._forget(step)
        return True

    def _forget(self, step: int) -> None:
        self._busy, self._step_us, self._wanted = [], [], None
        self._measure_from = step + 1 + _LEFT_OUT

    def _replay(self, step: int) -> None:
        if self._replayed:
            firsts = sorted(self._replayed)
            self.shares = self._replayed[firsts[max(0, bisect_right(firsts, step) - 1)]]

    @property
    def _window_is_full(self) -> bool:
        if self._first_window:
            return len(self._busy) >= _FIRST_WINDOW
        return len(self._busy) >= _WINDOW and math.fsum(self._step_us) >= _WINDOW_US

    def _judge(self) -> None:
        """Adjust the shares if the window says so, and begin the next one."""
        of_ranks, step_us = [*zip(*self._busy, strict=True)], median(self._step_us)
        busy = [max(1.0, median(one)) for one in of_ranks]
        error = max(_median_error(one, us) for one, us in zip(of_ranks, busy, strict=True))
        own = [max(1, share) for share in self.shares]  # a rank without a sample computes along on one
        speeds = [share / us for share, us in zip(own, busy, strict=True)]
        shares = share_out(speeds, sum(self.shares), self._most)
        expected = max(share / speed for share, speed in zip(shares, speeds, strict=True))
        change = [new - old for new, old in zip(shares, self.shares, strict=True)]
        wanted = max(busy) - expected >= max(_MIN_GAIN * step_us, _MIN_ERRORS * error)
        before = change if self._first_window else self._wanted
        self._busy, self._step_us, self._first_window = [], [], False
        self._wanted = change if wanted else None
        if wanted and before is not None and sum(map(int.__mul__, change, before)) > 0:
            self.shares, self.speeds = shares, speeds

    def state_dict(self) -> dict[str, Any]:
        return {"shares": list(self.shares), "speeds": list(self.speeds), "first_window": self._first_window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with shares by speed, unless there are other ranks or micro-batches of another size, or
        `max_share` allows less now.
        """
        shares = tuple(state["shares"])
        same = self.by_speed and (len(shares), sum(shares)) == (len(self.shares), sum(self.shares))
        if same and max(shares) <= self._most:
            self.shares, self.speeds, self._first_window = shares, state["speeds"], state["first_window"]


def _median_error(values: Sequence[float], middle: float) -> float:
    """The standard error of a median, which a few steps that a rank was stopped for hardly change."""
    deviation = math.fsum(abs(value - middle) for value in values) / len(values)
    return _MEDIAN_ERROR * deviation / math.sqrt(len(values))


def open_balance(loaded: LoadedPipeline, feeds: Feeds, ranks: Ranks) -> Balance:
    """What the file asks for, with the shares that the feeds begin with; raises PipelineError for what only
    a run can see. Called by all ranks.
    """
    loader, of_stages = loaded.pipeline.loader, feeds.by_name().values()
    if loader.balance is not None and loader.workers and any(feed.iterable for feed in of_stages):
        text = '"balance" clashes with loading processes for iterable data: new ones would have to read it '
        raise loaded.error("loader.balance", f"{text}again from its start", "write workers: 0")
    balance = _make_balance(loaded, ranks)
    for feed in of_stages:
        feed.set_shares(balance.shares)
    return balance


def _make_balance(loaded: LoadedPipeline, ranks: Ranks) -> Balance:
    loader = loaded.pipeline.loader
    total, most = micro_batch_sizes(loader, ranks.size)[0], int(loader.max_share * loader.batch_size)
    if loader.balance is None:
        return Balance()
    if isinstance(loader.balance, Replay):
        replayed = _read_shares(loaded, loader.balance, ranks, total)
        return Balance(replayed[min(replayed)], replayed=replayed)
    if not isinstance(loader.balance, dict):
        return Balance(share_out([1.0] * ranks.size, total, total), most=most, by_speed=True)
    given, by_rank = loader.balance, [str(rank) for rank in range(ranks.size)]
    least, largest = loaded.pipeline.launch.host_range
    if least == largest and (unknown := [key for key in given if key not in (*by_rank, *ranks.hosts)]):
        hosts = ", ".join(dict.fromkeys(ranks.hosts))
        text, allowed = f'no rank is on a host "{unknown[0]}"', f"the hosts are {hosts}, the ranks 0 to "
        raise loaded.error("loader.balance", text, f"{allowed}{ranks.size - 1}")
    weights = [given.get(rank, given.get(host, 1.0)) for rank, host in zip(by_rank, ranks.hosts, strict=True)]
    shares = share_out(weights, total, total)
    if max(shares) > most:
        text = f"rank {shares.index(max(shares))} would have {max(shares)} samples of a micro-batch, and "
        text += f"max_share allows {most}: {loader.max_share:g} x batch_size {loader.batch_size}"
        raise loaded.error("loader.max_share", text, "raise max_share, or choose other weights")
    return Balance(shares, speeds=weights)


def _read_shares(loaded: LoadedPipeline, setting: Replay, ranks: Ranks, total: int) -> dict[int, Shares]:
    """The shares of an earlier run, by the first step with them, as rank 0 finds them."""
    folder = loaded.folder / loaded.expand_env_and_folder("loader.balance.replay", setting.replay)

    def read() -> list[Any]:
        try:
            return [[one.step, one.samples] for one in Run(folder).events_of(SharesSet)]
        except NoRunError as error:
            return [str(error)]

    found, shares = ranks.from_rank_0("balance", read), dict[int, Shares]()
    problem, allowed = None if found else f"{folder} has no shares: its loader has no balance", None
    for one in found:
        if isinstance(one, str):
            problem = one
            break
        step, samples = one
        # An attempt of the run begins with its shares, and whatever came after that step has been undone.
        shares = {first: of_ranks for first, of_ranks in shares.items() if first < step}
        shares[step] = tuple(samples)
    if shares and min(shares) > 1:
        problem = f"{folder} has no shares before step {min(shares)}, when its loader had no balance"
    for of_ranks in shares.values():
        if len(of_ranks) != ranks.size:
            problem = f"{folder} had {len(of_ranks)} ranks, and this run has {ranks.size}"
            allowed = "start as many ranks"
        elif sum(of_ranks) != total:
            problem = f"micro-batches of {folder} had {sum(of_ranks)} samples of all ranks, and this run's "
            problem, allowed = f"{problem}have {total}", "write its batch_size"
    if problem is not None:
        raise loaded.error("loader.balance.replay", problem, allowed)
    return shares


def batchnorm_warning(model: nn.Module) -> str | None:
    """What to say about a model that normalises over a rank's samples; None: it does not."""
    found = (one for one in model.modules() if isinstance(one, _BatchNorm))
    if all(isinstance(one, SyncBatchNorm) for one in found):
        return None
    return (
        "warning: loader.balance gives ranks unequal shares, and BatchNorm normalises over each rank's own: "
        "a small share has noisy statistics"
    )
