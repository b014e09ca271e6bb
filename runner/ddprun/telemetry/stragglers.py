"""Stragglers: which rank the others wait for, since when, by how much and why.

An all-reduce ends on all ranks when the last one has arrived. So a step takes equally long on all of them,
and its time does not show who was late. Rank 0 therefore looks at the control messages of all ranks
(`control_message.py`): when each had each bucket ready, and what its training thread did before. What it
finds goes into `AgreedSteps`, events and `summary.json`; `straggler_totals` adds up the episodes for the
closing table and the report.

A rank is late by the distance of its last ready time to the median of the others'. It is a straggler if, in
the median over a window of steps, it is late by more than a share of the step and by more than what the other
ranks scatter by, and if two judgements in a row find that, at least half a second apart. Where steps take
different turns, there is a median for each kind of step, and the mean of them over the window's steps counts.
Its cause is the part of the step in which it exceeds the median of the others most. What no part accounts for
is communication: its last exchange ended later than theirs.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np

from ddprun.telemetry.control_message import OWN_COLUMNS, READY_AT, READY_COLUMNS, SYNC_READY_AT
from ddprun.telemetry.records import OWN_PARTS, StragglerCause, StragglerEpisode
from ddprun.telemetry.step_timing import FloatArray

_CAUSES: dict[str, StragglerCause] = {
    f"{cause}_us": cause for cause in get_args(StragglerCause)
}  # by part in `OWN_PARTS`
_CAUSES["hook_us"] = "communication"
_MIN_LATE_US = 1000.0  # less may be the error of clocks or the noise of a busy machine
_SPREAD_FACTOR = 3.0
_HYSTERESIS = 2.0
"""What was found stays until it is less than half of what it takes to be found, so that nothing flickers."""

_JUDGE_EVERY_US = 500_000.0
"""A busy machine makes a rank late for a shorter time, and nobody could look into that."""

_MAX_EPISODES = 200


class _StepMessages(NamedTuple):
    """What all ranks say about one step."""

    step: int
    turns: tuple[bool, ...]  # those that exchanged gradients in it
    skew_us: float  # from the first rank ready with its last bucket to the last; in backward and outside it
    numbers: FloatArray  # shape (ranks, numbers of a message)


class StragglerDetector:
    """Looks for stragglers during training, in bounded memory. A straggler is late by more than the share
    `min_share` of a step, in the median of `window` steps.
    """

    def __init__(self, window: int, min_share: float) -> None:
        self._window, self._min_share = window, min_share
        self._steps: deque[_StepMessages] = deque(maxlen=window)
        self._judged_us = 0.0  # on rank 0's clock
        self._params: Mapping[int, tuple[str, ...]] = {}
        self._turns: Sequence[range] = ()
        self._suspect: StragglerEpisode | None = None  # found by the last judgement, whether it lasts or not
        self.current: StragglerEpisode | None = None  # found by the last judgement, and lasting
        self.episodes: list[StragglerEpisode] = []
        """All that were found, oldest first; of very many the shortest are left out."""

    def begin_stage(self, params: Mapping[int, tuple[str, ...]], turns: Sequence[range]) -> None:
        """Forget the steps of the stage before; `params` are those of each gradient bucket, by its number,
        and `turns` the numbers of each turn's, in the order in which backward fills them.
        """
        self._steps.clear()
        self._params, self._turns = params, turns
        self._judged_us, self._suspect, self.current = 0.0, None, None

    def add_messages(
        self, steps: Sequence[int], messages: FloatArray
    ) -> list[tuple[int, StragglerEpisode | None]]:
        """Take all ranks' control messages, shape (messages, ranks, numbers): one for each of `steps`, in
        that order; what comes after them is ignored. Gives the steps after which `current` was another one,
        each with that.
        """
        messages = messages[: len(steps)]
        ends = [SYNC_READY_AT, *(READY_AT + turn[-1] for turn in self._turns)]
        last_ready = messages[..., ends]  # outside backward, and in each backward pass
        skews = (last_ready.max(1) - last_ready.min(1)).sum(1).tolist()
        exchanged = (messages[..., SYNC_READY_AT:] != 0.0).any(2).any(1).tolist()
        in_turns = map(tuple, (messages[..., ends[1:]] != 0.0).all(1).tolist())
        at_us = messages[..., SYNC_READY_AT:].max((1, 2)).tolist()
        changes = list[tuple[int, StragglerEpisode | None]]()
        for step, turns, skew_us, numbers, any_bucket, now_us in zip(
            steps, in_turns, skews, messages, exchanged, at_us, strict=True
        ):
            if not any_bucket:  # as around an audit: no rank waited for another one
                continue
            self._steps.append(_StepMessages(step, turns, skew_us, numbers))
            # Many steps may come at once, and by then have taken much longer than half a second.
            if len(self._steps) == self._window and now_us - self._judged_us >= _JUDGE_EVERY_US:
                self._judged_us = now_us
                if self._update_current():
                    changes.append((step, self.current))
        return changes

    def _update_current(self) -> bool:
        """Find out who is late; whether that has changed."""
        before, suspect = self.current, self._suspect
        self._suspect = found = self._find_straggler()
        if found is None or suspect is None or suspect.rank != found.rank:
            self.current = None  # one judgement alone says little
            return before is not None
        self.current = found
        same = ("rank", "cause", "bucket")
        if before is not None and all(getattr(before, name) == getattr(found, name) for name in same):
            known, more = before.last_step - before.first_step, found.last_step - before.last_step
            found.late_us = (before.late_us * known + found.late_us * more) / (known + more)
            found.first_step = before.first_step
            self.episodes[-1] = found
            return False
        if before is None:
            found.first_step = suspect.first_step
        self.episodes.append(found)
        if len(self.episodes) > _MAX_EPISODES:
            self.episodes.remove(min(self.episodes[:-1], key=lambda one: one.last_step - one.first_step))
        return True

    def _find_straggler(self) -> StragglerEpisode | None:
        """The latest rank of the window, if it is late by enough."""
        if len(self._steps[0].numbers) < 2:
            return None
        kinds = dict[tuple[bool, ...], list[int]]()  # the indices of the steps with the same turns
        for place, one in enumerate(self._steps):
            kinds.setdefault(one.turns, []).append(place)
        # The usual case comes first and is cheap: no rank is later than the skew of all.
        skews = np.array([one.skew_us for one in self._steps])
        if all(_median(skews[of_kind]) <= _MIN_LATE_US / _HYSTERESIS for of_kind in kinds.values()):
            return None

        def over_kinds(statistic: Callable[[FloatArray], Any], values: FloatArray) -> Any:
            """The mean over steps of a statistic of their kind; the first dimension is that of steps."""
            weighted = [len(of_kind) * statistic(values[of_kind]) for of_kind in kinds.values()]
            return sum(weighted) / len(values)

        numbers = np.stack([one.numbers for one in self._steps])  # (steps, ranks, numbers of a message)
        # Ranks wait for each other in each backward pass that exchanges buckets, and once more outside it. A
        # step need not have all of them.
        ends = [numbers[..., READY_AT + turn[-1]] for turn in self._turns]
        outside = numbers[..., SYNC_READY_AT]
        last_ready = [at for at in (*ends, outside) if at.all()]
        if not last_ready:
            return None
        *in_backward, outside_late = (
            np.where(at.all(1, keepdims=True), _above_others_median(at), 0.0) for at in (*ends, outside)
        )
        # Ranks that do not wait for a late one outside backward, as in a broadcast, wait for it in backward;
        # those that wait for it in backward among the ranks of a host are as late outside it.
        late: FloatArray = np.sum(in_backward, axis=0) if in_backward else np.zeros_like(outside_late)
        late = np.maximum(late, outside_late)
        typical = over_kinds(_median, late)  # (ranks,)
        rank = int(typical.argmax())
        late_us = float(typical[rank])
        before = self.current if self.current is not None and self.current.rank == rank else None
        divisor = 1.0 if before is None else _HYSTERESIS
        spread = over_kinds(_median_absolute_deviation, np.delete(late, rank, 1))
        step_us = float(_median(last_ready[0][-1] - last_ready[0][0])) / max(1, len(numbers) - 1)
        least_us = max(self._min_share * step_us, _SPREAD_FACTOR * spread, _MIN_LATE_US) / divisor
        if late_us <= least_us:
            return None
        in_most = over_kinds(partial(np.quantile, q=0.25), late[:, rank])
        if before is None and in_most <= least_us / _HYSTERESIS:
            return None  # late in too few of the steps

        def more_than_others(values: FloatArray) -> list[float]:
            """By how much this rank is above the others."""
            found: list[float] = over_kinds(_median, _above_others_median(values)[:, rank]).tolist()
            return found

        last_cause = None if before is None else before.cause
        cause, bucket = self._find_cause(more_than_others, late_us, numbers, last_cause)
        params = () if bucket is None else self._params[bucket]
        first, last = self._steps[0].step, self._steps[-1].step
        return StragglerEpisode(rank, cause, bucket, params, late_us, step_us, first, last)

    def _find_cause(
        self,
        more_than_others: Callable[[FloatArray], list[float]],
        late_us: float,
        numbers: FloatArray,
        last_cause: StragglerCause | None,
    ) -> tuple[StragglerCause, int | None]:
        """The part of the step in which a rank is furthest above the others; its last cause is preferred. For
        backward also the late bucket.
        """
        more = more_than_others(numbers[..., OWN_COLUMNS])  # of each part
        parts: dict[StragglerCause, float] = dict.fromkeys(get_args(StragglerCause), 0.0)
        for name, us in zip(OWN_PARTS, more, strict=True):
            parts[_CAUSES[name]] += us
        parts["communication"] += late_us - sum(more)
        cause = max(parts, key=lambda part: parts[part] * (_HYSTERESIS if part == last_cause else 1.0))
        ready = numbers[..., READY_COLUMNS]
        if cause != "backward" or not ready.any():
            return cause, None
        above = more_than_others(ready)  # of each bucket
        turn = max(self._turns, key=lambda turn: above[turn[-1]])  # in which it is latest
        # From one bucket to the next; what is left of backward lies before its first bucket.
        more = more_than_others(np.diff(ready[..., turn.start : turn.stop]))
        whole = parts["backward"] if len(self._turns) == 1 else above[turn[-1]]
        shares = [whole - sum(more), *more]
        return cause, turn.start + shares.index(max(shares))


def _above_others_median(values: FloatArray) -> FloatArray:
    """How far each rank is above the median of the others; shape as `values`: (steps, ranks, …)."""
    ranks = values.shape[1]
    ordered = np.sort(values, 1)
    medians = [
        np.where(values <= ordered[:, at : at + 1], ordered[:, at + 1 : at + 2], ordered[:, at : at + 1])
        for at in ((ranks - 2) // 2, (ranks - 1) // 2)  # of the ranks - 1 others, in order
    ]
    above: FloatArray = values - (medians[0] + medians[1]) / 2
    return above


def _median(values: FloatArray) -> FloatArray:
    """Over the first dimension; of an even number the lower one."""
    middle: FloatArray = np.sort(values, 0)[(len(values) - 1) // 2]
    return middle


def _median_absolute_deviation(values: FloatArray) -> float:
    """The median absolute deviation of all values."""
    return float(_median(abs(values.ravel() - _median(values.ravel()))))


class StragglerTotal(StragglerEpisode, kw_only=True):
    """All episodes in which a rank was late for one cause and, in backward, before one bucket. `late_us` and
    `step_us`, the time between two synchronisations, are means over `steps`.
    """

    steps: int  # how many steps the episodes lasted
    episodes: int

    @property
    def lost_steps(self) -> float:
        """How many steps would have taken as long as the other ranks waited for this one."""
        return self.steps * self.late_us / self.step_us

    def when(self) -> str:
        """In which steps, or in how many."""
        if self.episodes == 1:
            return f"in steps {self.first_step:,} to {self.last_step:,}"
        return f"in {self.steps:,} steps ({self.episodes} episodes)"


def straggler_totals(episodes: Iterable[StragglerEpisode]) -> list[StragglerTotal]:
    """Totals of episodes by rank, cause, bucket and parameters; the one that cost most first."""
    alike: dict[tuple[int, StragglerCause, int | None, tuple[str, ...]], list[StragglerEpisode]] = {}
    for one in episodes:
        alike.setdefault((one.rank, one.cause, one.bucket, one.params), []).append(one)
    totals = []
    for who, some in alike.items():
        lengths = [one.last_step - one.first_step + 1 for one in some]
        steps = sum(lengths)
        late_us = sum(one.late_us * length for one, length in zip(some, lengths, strict=True)) / steps
        step_us = sum(one.step_us * length for one, length in zip(some, lengths, strict=True)) / steps
        first, last = min(one.first_step for one in some), max(one.last_step for one in some)
        totals.append(StragglerTotal(*who, late_us, step_us, first, last, steps=steps, episodes=len(some)))
    return sorted(totals, key=lambda one: one.lost_steps, reverse=True)
