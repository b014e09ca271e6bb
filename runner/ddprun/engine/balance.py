"""The ranks' shares of samples, where ranks are not equally fast: of each micro-batch (`loader.balance`), or
of a round of local updates (`every: {samples: n}` of a sync policy).

Gradients stay those of the whole batch, since each loss is weighted by its samples (`loop.loss_weight`). All
ranks read the same control messages after the same step, and each decides for itself, with the same result.
That takes arithmetic that has the same bits on every processor: Python's own and `math.fsum`, not NumPy's.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from statistics import median
from typing import Any, cast

from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from ddprun.config import LoadedPipeline, StepStage
from ddprun.config.sections import BalanceReplay
from ddprun.engine.data import global_micro_batch_sizes
from ddprun.engine.feeds import Feeds
from ddprun.parallel.ranks import Ranks
from ddprun.sync.plan import LocalRound
from ddprun.telemetry.control_message import OWN_AT, SAMPLES_AT
from ddprun.telemetry.reader import NoRunError, RecordedRun
from ddprun.telemetry.records import OWN_PARTS
from ddprun.telemetry.step_timing import FloatArray

_FIRST_WINDOW, _WINDOW, _WINDOW_US = 8, 16, 1e6  # steps, and how long those of a later window take
_LEFT_OUT = 2  # steps after a stage's start or a change that are not measured
_ROUND_WINDOWS, _ROUNDS_LEFT_OUT = (2, 4), 1  # the same in rounds, each of which has many batches
_MIN_GAIN = 0.05  # of a step's time
_MIN_ERRORS = 4.0  # and so many standard errors of the measured times
_MEDIAN_ERROR = math.pi / 2  # of a median: in mean deviations of normal values, times the root of how many
_MEASURED = OWN_PARTS.index("optimizer_us") + 1  # of a round; of a step, without hooks and optimizer
assert OWN_PARTS[:_MEASURED] == ("data_us", "forward_us", "backward_us", "hook_us", "optimizer_us")

Shares = tuple[int, ...]


def apportion(weights: Sequence[float], total: int, most: int) -> Shares:
    """Whole numbers from 1 to `most` that add up to `total`; their largest ratio to a rank's weight is as
    small as possible. 0 is allowed where `total` is less than one each.
    """
    least, low, high = min(1, total // len(weights)), 0.0, (total + 1) / min(weights)

    def shares_at(ratio: float) -> list[int]:
        return [min(most, max(least, int(weight * ratio))) for weight in weights]

    for _ in range(100):  # find the ratio at which they add up
        ratio = (low + high) / 2
        if sum(shares_at(ratio)) < total:
            low = ratio
        else:
            high = ratio
    shares = shares_at(low)
    for rank, share in enumerate(shares_at(high)):  # several may reach their next number at once
        shares[rank] += min(share - shares[rank], total - sum(shares))
    return tuple(shares)


@dataclass(eq=False)
class ShareBalancer:
    """The ranks' shares from the next step on: fixed, those of an earlier run, or `by_speed`.

    By speed: a window of steps (the first is shorter) gives each rank's own work in a step, and so the shares
    with which all would take equally long. They are taken if the slowest rank would gain 5 % of a step and
    more than the times scatter, and, after the first window, if the window before wanted about the same.
    """

    shares: Shares = ()  # samples of each rank in a full micro-batch; empty: no balance, equal shares
    _: KW_ONLY
    speeds: Sequence[float] = ()  # of each rank, in any unit; empty: not known
    max_rank_samples: int = 0  # that a share by speed may be
    by_speed: bool = False
    replayed: Mapping[int, Shares] | None = None  # those of an earlier run, by the first step with them
    round_seconds: float | None = None  # how long a rank works in a round; None: that has a fixed size
    local_batch: int | None = None  # samples of a local update, of which a share has several; None: one

    def __post_init__(self) -> None:
        self._initial_shares = self.shares
        self._wanted: list[int] | None = None  # the change of shares that the window before wanted
        self._first_window = True
        self._measure_from = 0
        self._busy: list[list[float]] = []  # of the window: by step and rank, in microseconds
        self._step_us: list[float] = []

    def begin_stage(self, step: int, *, resumed: bool = False) -> None:
        """A stage begins, or is resumed, after this step of the run. Rounds of another stage may take longer:
        it measures its own.
        """
        self._discard_measurements(step)
        if self.by_speed and self.local_batch is not None and not resumed:
            self.shares, self.speeds, self._first_window = self._initial_shares, (), True
        self._take_replayed_shares(step + 1)

    def add_messages(self, steps: Sequence[int], messages: FloatArray) -> None:
        """Take all ranks' control messages about these steps, shape (messages, ranks, numbers)."""
        numbers = messages[..., SAMPLES_AT : OWN_AT + _MEASURED].tolist()
        for step, of_ranks in zip(steps, numbers, strict=True):
            if step >= self._measure_from and all(row[1] for row in of_ranks):
                busy = [self._busy_us(rank, row) for rank, row in enumerate(of_ranks)]
                if None not in busy:
                    self._busy.append(cast(list[float], busy))
                    self._step_us.append(math.fsum(row[2] / row[1] for row in of_ranks) / len(of_ranks))

    def _busy_us(self, rank: int, numbers: Sequence[float]) -> float | None:
        """A rank's own work in a step, in microseconds; in a round, which an epoch's end may cut, of a whole
        share. None: it had none.
        """
        samples, steps, _, *parts = numbers
        if self.local_batch is None:
            return math.fsum(parts[:3]) / steps
        return math.fsum(parts) * self.shares[rank] / samples if samples else None

    def adjust_shares_after(self, step: int) -> bool:
        """Whether there are other shares from the next step on; alike on all ranks."""
        before = self.shares
        if self.replayed:
            self._take_replayed_shares(step + 1)
        elif self.by_speed and self._window_is_full:
            self._adjust_shares_by_speed()
        if self.shares == before:
            return False
        self._discard_measurements(step)
        return True

    def _discard_measurements(self, step: int) -> None:
        self._busy, self._step_us, self._wanted = [], [], None
        self._measure_from = step + 1 + (_LEFT_OUT if self.local_batch is None else _ROUNDS_LEFT_OUT)

    def _take_replayed_shares(self, step: int) -> None:
        if self.replayed:
            firsts = sorted(self.replayed)
            self.shares = self.replayed[firsts[max(0, bisect_right(firsts, step) - 1)]]

    @property
    def _window_is_full(self) -> bool:
        first, later = (_FIRST_WINDOW, _WINDOW) if self.local_batch is None else _ROUND_WINDOWS
        if self._first_window:
            return len(self._busy) >= first
        return len(self._busy) >= later and math.fsum(self._step_us) >= _WINDOW_US

    def _adjust_shares_by_speed(self) -> None:
        """Adjust the shares if the window says so, and begin the next one."""
        of_ranks, step_us = [*zip(*self._busy, strict=True)], median(self._step_us)
        busy = [max(1.0, median(one)) for one in of_ranks]
        error = max(_median_error(one, us) for one, us in zip(of_ranks, busy, strict=True))
        own = [max(1, share) for share in self.shares]  # a rank without a sample computes along on one
        speeds = [share / us for share, us in zip(own, busy, strict=True)]
        unit, seconds = self.local_batch or 1, self.round_seconds
        if seconds is None:
            shares = apportion(speeds, sum(self.shares) // unit, self.max_rank_samples // unit)
        else:
            shares = tuple(max(1, int(seconds * 1e6 * speed / unit)) for speed in speeds)
        shares = tuple(share * unit for share in shares)
        expected = max(share / speed for share, speed in zip(shares, speeds, strict=True))
        change = [new - old for new, old in zip(shares, self.shares, strict=True)]
        gain = max(busy) - expected
        if seconds is not None:
            changed = [us - share / speed for us, share, speed in zip(busy, shares, speeds, strict=True)]
            gain = max(map(abs, changed))
        wanted = gain >= max(_MIN_GAIN * step_us, _MIN_ERRORS * error)
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
        same = self.by_speed and len(shares) == len(self.shares)
        same = same and not any(share % (self.local_batch or 1) for share in shares)
        if self.round_seconds is None:
            same = same and sum(shares) == sum(self.shares) and max(shares) <= self.max_rank_samples
        if same:
            self.shares, self.speeds, self._first_window = shares, state["speeds"], state["first_window"]


def _median_error(values: Sequence[float], middle: float) -> float:
    """The standard error of a median, which a few steps that a rank was stopped for hardly change."""
    deviation = math.fsum(abs(value - middle) for value in values) / len(values)
    return _MEDIAN_ERROR * deviation / math.sqrt(len(values))


class ShareBalancers(dict[LocalRound | None, ShareBalancer]):
    """Those of a pipeline's stages, by their round; None: of steps in which all ranks average gradients."""

    def state_dict(self) -> dict[str, Any]:
        return {str(one_round): balance.state_dict() for one_round, balance in self.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for one_round, balance in self.items():
            if str(one_round) in state:
                balance.load_state_dict(state[str(one_round)])


def build_share_balancers(loaded: LoadedPipeline, feeds: Feeds, ranks: Ranks) -> ShareBalancers:
    """What the file asks for, with the shares that the feeds begin with; raises PipelineError for what only
    a run can see. Called by all ranks.
    """
    loader, of_stages = loaded.pipeline.loader, feeds.by_name().values()
    by_round = defaultdict[LocalRound | None, dict[int, StepStage]](dict)
    for stage, settings in loaded.pipeline.stages_and_settings():
        by_round[settings.plan.round][stage.index] = stage
    unequal = loader.balance is not None or bool(by_round.keys() - {None})
    if loader.workers and unequal and any(feed.iterable for feed in of_stages):
        text = "unequal shares clash with loading processes for iterable data: "
        text += "new ones would have to read it again from its start"
        raise loaded.error("loader.workers", text, "write workers: 0")
    balances = ShareBalancers({None: ShareBalancer()})
    for one_round, stages in by_round.items():
        balances[one_round] = _build_share_balancer(loaded, ranks, stages, one_round)
    for feed in of_stages:
        feed.set_shares(balances[None].shares)
    return balances


def _build_share_balancer(
    loaded: LoadedPipeline, ranks: Ranks, stages: Mapping[int, StepStage], one_round: LocalRound | None
) -> ShareBalancer:
    """That of stages, by their index, with this round. Shares of a round are whole batches, and by speed
    unless `loader.balance` says otherwise.
    """
    loader = loaded.pipeline.loader
    if loader.balance is None and one_round is None:
        return ShareBalancer()
    size, total = 1, global_micro_batch_sizes(loader, ranks.size)[0]
    most = int(loader.max_share * loader.batch_size)
    if one_round is not None:
        size, total = loader.batch_size, one_round.samples or total
        most = total
        if total < size * ranks.size:
            stage = next(iter(stages.values()))
            name = stage.effective_settings(loaded.pipeline).sync.name
            key = f"{stage.key_path('sync')}.{name}.every.samples"
            text = f"a round of {total} samples has less than a batch of {size} "
            text += f"for each of {ranks.size} ranks"
            raise loaded.error(key, text, f"at least {size * ranks.size} samples")
    is_fixed = isinstance(loader.balance, dict)
    weights = _fixed_rank_weights(loaded, ranks) if is_fixed else [1.0] * ranks.size
    shares, replayed = tuple(size * share for share in apportion(weights, total // size, total // size)), None
    if isinstance(loader.balance, BalanceReplay):
        replayed = _read_shares(loaded, loader.balance, ranks, stages, one_round, total, size)
        if not replayed:
            return ShareBalancer()
        shares = replayed[min(replayed)]
    return ShareBalancer(
        shares,
        speeds=weights if is_fixed else (),
        max_rank_samples=most,
        by_speed=not is_fixed and replayed is None,
        replayed=replayed,
        round_seconds=None if one_round is None else one_round.seconds,
        local_batch=None if one_round is None else size,
    )


def _fixed_rank_weights(loaded: LoadedPipeline, ranks: Ranks) -> list[float]:
    """Each rank's, as `loader.balance` names them."""
    given = loaded.pipeline.loader.balance
    assert isinstance(given, dict), "the weights are fixed"
    by_rank = [str(rank) for rank in range(ranks.size)]
    hosts = ranks.placement.hosts
    least, largest = loaded.pipeline.launch.host_range
    if least == largest and (unknown := [key for key in given if key not in (*by_rank, *hosts)]):
        listed = ", ".join(dict.fromkeys(hosts))
        text, allowed = f'no rank is on a host "{unknown[0]}"', f"the hosts are {listed}, the ranks 0 to "
        raise loaded.error("loader.balance", text, f"{allowed}{ranks.size - 1}")
    return [given.get(rank, given.get(host, 1.0)) for rank, host in zip(by_rank, hosts, strict=True)]


def _read_shares(
    loaded: LoadedPipeline,
    setting: BalanceReplay,
    ranks: Ranks,
    stages: Container[int],
    one_round: LocalRound | None,
    total: int,
    unit: int,
) -> dict[int, Shares]:
    """The shares of an earlier run in some stages, by the first step with them, as rank 0 finds them. Each is
    a multiple of `unit`, and they add up to `total` samples, but for rounds of some seconds. None for stages
    without rounds of a run that had shares in rounds alone.
    """
    folder = loaded.folder / loaded.expand_env_and_folder("loader.balance.replay", setting.replay)

    def read() -> list[Any] | str:
        try:
            return [[one.stage, one.step, one.samples] for one in RecordedRun(folder).shares]
        except NoRunError as error:
            return str(error)

    found = ranks.from_rank_0("balance", read)
    if isinstance(found, str):
        raise loaded.error("loader.balance.replay", found, None)
    shares = {step: tuple(samples) for stage, step, samples in found if stage in stages}
    if found and not shares and one_round is None:
        return {}
    free = one_round is not None and bool(one_round.seconds)
    unfit = [
        step
        for step, one in shares.items()
        if len(one) != ranks.size or any(share % unit for share in one) or not (free or sum(one) == total)
    ]
    if shares and not unfit and (min(shares) == 1 or 0 not in stages):
        return shares
    step = min(unfit or shares, default=1)
    has = f"shares of {list(shares[step])} samples from step {step} on" if shares else "equal shares alone"
    text = f"{folder} has {has}, and this run needs shares of {ranks.size} ranks from step 1 on"
    text += "" if free else f", of {total} samples together"
    text += "" if one_round is None else f", each a multiple of batch_size {unit}"
    raise loaded.error("loader.balance.replay", text, "name a run of as many ranks, with the same sizes")


def batchnorm_warning(model: nn.Module) -> str | None:
    """What to say about a model that normalises over a rank's samples; None: it does not."""
    found = (one for one in model.modules() if isinstance(one, _BatchNorm))
    if all(isinstance(one, SyncBatchNorm) for one in found):
        return None
    return (
        "warning: loader.balance gives ranks unequal shares, and BatchNorm normalises over each rank's own: "
        "a small share has noisy statistics"
    )
