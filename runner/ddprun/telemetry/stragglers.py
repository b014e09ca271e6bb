"""Stragglers: which rank the others wait for, since what, and by how much.

In all-reduce every rank leaves a step when the last one has come, so that steps take equally long on all of
them and a step's time tells nobody who was late. What tells it is when each rank had each bucket ready: the
control message has that, and what each rank's training thread did before.

A rank is late by the distance of its last ready time to the median of the others'. It is a straggler if it is
late by more than a share of the step in the median over a window of steps, and by more than what the other
ranks scatter by; and if it was so whenever it was looked for in half a second. Its cause is where it spent
more than the median of the others: of what is left when all parts are taken off, its communication came to an
end later than theirs.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ddprun.telemetry.control_message import (
    SPENT,
    SYNC_READY_AT,
    ControlMessages,
    Numbers,
    ready_of,
    spent_of,
    sync_ready_of,
    told_buckets,
)

Cause = Literal["data", "forward", "backward", "optimizer", "sync", "communication"]

_CAUSES: dict[str, Cause] = {
    "data_us": "data",
    "forward_us": "forward",
    "backward_us": "backward",
    "hook_us": "communication",
    "optimizer_us": "optimizer",
    "sync_us": "sync",
    "other_us": "sync",
}
_LEAST_US = 1000.0
"""Less is not told from what clocks and a busy machine do."""

_SPREADS = 3.0
_STAYS = 2.0
"""What was found stays so until it is less than half of what it takes to be found: nothing flickers."""

_A_WHILE_US = 500_000.0
"""What is over sooner is what a busy machine does, and nobody could look into it."""

_MOST_EPISODES = 200


@dataclass(slots=True)
class Straggler:
    """A rank that was late for some time, for one cause."""

    rank: int
    cause: Cause
    bucket: int | None
    """The gradient bucket that came late, if backward is the cause and gradients are exchanged."""

    params: tuple[str, ...]
    """The parameters in that bucket."""

    late_us: float
    """By how much, in the median of a step; the mean over windows."""

    step_us: float
    """How long a step takes, in the median."""

    first_step: int
    last_step: int

    def describe(self) -> str:
        """In one line."""
        where = "" if self.bucket is None else f", bucket {self.bucket}"
        return f"rank {self.rank} is late by {self.late_us / 1000:.1f} ms ({self.cause}{where})"


class _Told(NamedTuple):
    """What ranks have told about a step."""

    step: int
    apart_us: float
    """As of `ControlMessages`."""

    numbers: Numbers
    """Shape (ranks, numbers of a word)."""


class Stragglers:
    """Looks for stragglers while training goes on; in bounded memory.

    Args:
        window: steps to look at.
        over: a straggler is late by more than this share of a step.
    """

    def __init__(self, window: int, over: float) -> None:
        self._window, self._over = window, over
        self._steps: deque[_Told] = deque(maxlen=window)
        self._since = 0
        self._params: Sequence[tuple[str, ...]] = ()
        self._suspect: Straggler | None = None  # what was found last, be it for a while or not
        self._suspect_since_us = 0.0
        self.now: Straggler | None = None
        """In the steps that were looked at last."""

        self.episodes: list[Straggler] = []
        """All that were found, oldest first; of very many the shortest are left out."""

    def begin_stage(self, params: Sequence[tuple[str, ...]]) -> None:
        """Other steps begin.

        Args:
            params: of each gradient bucket.
        """
        self._steps.clear()
        self._since, self._params, self._suspect, self.now = 0, params, None, None

    def add(self, steps: Sequence[int], messages: ControlMessages) -> list[tuple[int, Straggler | None]]:
        """Take what ranks have told about steps.

        Args:
            steps: the first of those that the words are about.
            messages: of all ranks.

        Returns:
            Where `now` is newly known: the step, and who is late from then on, or that nobody is any more.
        """
        # In a step without `met` ranks were together, as for an audit, and none was waited for.
        told = [
            _Told(step, apart_us, numbers)
            for step, met, apart_us, numbers in zip(
                steps, messages.met, messages.apart_us, messages.numbers, strict=False
            )
            if met
        ]
        news: list[tuple[int, Straggler | None]] = []
        first, half = 0, max(1, self._window // 2)
        while first < len(told):
            more = told[first : first + max(1, self._window - len(self._steps), half - self._since)]
            self._steps.extend(more)
            self._since += len(more)
            first += len(more)
            if len(self._steps) == self._window and self._since >= half and self._look_again():
                news.append((more[-1].step, self.now))
        return news

    def _look_again(self) -> bool:
        """Look who is late; whether that is news."""
        self._since = 0
        found = self._again(self._look())
        before, self.now = self.now, found
        if found is None:
            return before is not None
        if before is not None and _kind(before) == _kind(found):
            looks = max(1, (before.last_step - before.first_step) // max(1, self._window // 2))
            found.late_us = (before.late_us * looks + found.late_us) / (looks + 1)
            found.first_step = before.first_step
            self.episodes[-1] = found
            return False
        self.episodes.append(found)
        if len(self.episodes) > _MOST_EPISODES:
            self.episodes.remove(min(self.episodes[:-1], key=lambda one: one.last_step - one.first_step))
        return True

    def state_dict(self) -> list[dict[str, Any]]:
        """What was found so far."""
        return [asdict(episode) for episode in self.episodes]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Go on after it."""
        self.episodes = [Straggler(**{**episode, "params": tuple(episode["params"])}) for episode in state]

    def _again(self, found: Straggler | None) -> Straggler | None:
        """A straggler if its rank was late whenever it was looked for of late, too: a busy machine makes a
        rank late for a while.
        """
        before, self._suspect = self._suspect, found
        if found is None:
            return None
        if before is None or before.rank != found.rank:
            self._suspect_since_us = _latest(self._steps[0])
            return None
        if self.now is None:
            found.first_step = before.first_step
            if _latest(self._steps[-1]) - self._suspect_since_us < _A_WHILE_US:
                return None
        return found

    def _look(self) -> Straggler | None:
        if len(self._steps[0].numbers) < 2:
            return None
        # The usual case, and so the cheap one: no rank is later than the last one comes after the first.
        apart = sorted([told.apart_us for told in self._steps])
        if apart[(len(apart) - 1) // 2] <= _LEAST_US / _STAYS:
            return None
        told = np.stack([one.numbers for one in self._steps])  # (steps, ranks, numbers of a word)
        # Where ranks meet twice in a step, beside backward and in it, they wait for each other twice.
        places = (ready_of(told), sync_ready_of(told))
        meetings = [at[..., -1] for at in places if at.shape[2] and at.all()]
        if not meetings:
            return None
        late: Numbers = np.sum([_beyond(at) for at in meetings], axis=0)  # (steps, ranks)
        typical = _median(late)  # (ranks,)
        rank = int(typical.argmax())
        late_us = float(typical[rank])
        before = self.now if self.now is not None and self.now.rank == rank else None
        stays = 1.0 if before is None else _STAYS
        if late_us <= _LEAST_US / stays:
            return None
        others = np.delete(late, rank, 1).ravel()
        spread = float(_median(abs(others - _median(others))))
        first, last = self._steps[0].step, self._steps[-1].step
        step_us = float(_median(meetings[0][-1] - meetings[0][0])) / max(1, len(told) - 1)
        least_us = max(self._over * step_us, _SPREADS * spread, _LEAST_US) / stays
        if late_us <= least_us:
            return None
        if before is None and float(np.quantile(late[:, rank], 0.25)) <= least_us / _STAYS:
            return None  # late in many steps, and as often not
        cause, bucket = _cause(rank, late_us, told, None if before is None else before.cause)
        return Straggler(rank, cause, *self._named(bucket), late_us, step_us, first, last)

    def _named(self, place: int | None) -> tuple[int | None, tuple[str, ...]]:
        if place is None:
            return None, ()
        bucket = told_buckets(len(self._params))[place]
        return bucket, self._params[bucket]


def _cause(rank: int, late_us: float, told: Numbers, before: Cause | None) -> tuple[Cause, int | None]:
    """Where a rank spent more than the others, and which of the buckets told of shows it."""
    more = _median(_beyond(spent_of(told))[:, rank]).tolist()  # (parts,)
    parts: dict[Cause, float] = dict.fromkeys(get_args(Cause), 0.0)
    for name, us in zip(SPENT, more, strict=True):
        parts[_CAUSES[name]] += us
    parts["communication"] += late_us - sum(more)
    cause = max(parts, key=lambda part: parts[part] * (_STAYS if part == before else 1.0))
    ready = ready_of(told)
    if cause != "backward" or not ready.any():
        return cause, None
    # From one bucket to the next; what is left of backward lies before its first bucket.
    beyond = _median(_beyond(np.diff(ready))[:, rank]).tolist()
    shares = [parts["backward"] - sum(beyond), *beyond]
    return cause, shares.index(max(shares))


def _beyond(values: Numbers) -> Numbers:
    """How far each rank is beyond the median of the others; shape as `values`: (steps, ranks, …)."""
    ranks = values.shape[1]
    ordered = np.sort(values, 1)
    medians = [
        np.where(values <= ordered[:, at : at + 1], ordered[:, at + 1 : at + 2], ordered[:, at : at + 1])
        for at in ((ranks - 2) // 2, (ranks - 1) // 2)  # of the ranks - 1 others, in order
    ]
    beyond: Numbers = values - (medians[0] + medians[1]) / 2
    return beyond


def _median(values: Numbers) -> Numbers:
    """Over the first dimension; of an even number the lower one."""
    middle: Numbers = np.sort(values, 0)[(len(values) - 1) // 2]
    return middle


def _latest(told: _Told) -> float:
    """When the last rank had its last payload ready."""
    return float(told.numbers[:, SYNC_READY_AT:].max())


def _kind(one: Straggler) -> tuple[int, Cause, int | None]:
    return one.rank, one.cause, one.bucket
