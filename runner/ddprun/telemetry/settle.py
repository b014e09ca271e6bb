"""A step that is over: its marks become microseconds, and what this rank tells the others is added up."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ddprun.telemetry.clock import Clock
from ddprun.telemetry.overflow import first_finding
from ddprun.telemetry.records import PARTS, Traffic, exposed, tail
from ddprun.telemetry.step import Step
from ddprun.telemetry.word import NOTHING_SPENT, Spent
from ddprun_hooks.flight import Flight


@dataclass(slots=True)
class Settled:
    """A finished step whose marks have become microseconds."""

    step: Step
    us: dict[str, int]
    start_us: int
    step_us: int
    laps: Sequence[tuple[str, int]]
    """(part, microseconds), one after the other from `start_us` on; waiting is in them."""

    backward: Traffic
    sync: Traffic
    loss: float
    samples: int
    gradients: Mapping[str, int] = field(default_factory=dict)
    """When the gradients were complete, by parameter."""

    @property
    def landed(self) -> Sequence[Flight[int]]:
        return [*self.backward.landed, *self.sync.landed] if self.sync.landed else self.backward.landed

    @property
    def waits(self) -> list[tuple[int, int]]:
        """When the training thread had nothing to do but wait: from, to."""
        return [*self.backward.waits, *self.sync.waits]

    @property
    def spent(self) -> Spent:
        """What the training thread did itself."""
        us, in_backward, beside = self.us, self.backward.in_hooks_us, self.sync.in_hooks_us
        return Spent(
            us["data_us"],
            us["forward_us"],
            us["backward_us"] - self.backward.waited_us - in_backward,
            in_backward + beside,
            us["optimizer_us"],
            us["sync_us"] - self.sync.waited_us - beside,
            us["other_us"],
        )


@dataclass(slots=True)
class Round:
    """This rank's losses since the last control word, what it did, and what its hooks have found."""

    loss_sum: float = 0.0
    samples: int = 0
    steps: int = 0
    us: int = 0
    """That these took."""

    last_step: int = 0
    code: int = 0
    spent: Spent = NOTHING_SPENT
    flights: list[Flight[int]] = field(default_factory=list)

    def find(self, landed: Sequence[Flight[int]]) -> None:
        """Keep the first finding."""
        if found := [flight for flight in landed if flight.findings]:
            self.code = self.code or first_finding(found)
            self.flights += found

    def plain(self) -> dict[str, Any]:
        """As a checkpoint can hold it; `of` reads it back."""
        return {
            "loss_sum": self.loss_sum,
            "samples": self.samples,
            "steps": self.steps,
            "us": self.us,
            "last_step": self.last_step,
            "code": self.code,
            "spent": list(self.spent),
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Round":
        """From what `plain` gave."""
        return cls(**{**plain, "spent": Spent(*plain["spent"])})

    def add(self, settled: "Settled") -> None:
        self.loss_sum += settled.loss * settled.samples if settled.samples else 0.0
        self.samples += settled.samples
        self.steps += 1
        self.us += settled.step_us
        self.last_step = settled.step.number
        self.spent = self.spent.plus(settled.spent) if self.steps > 1 else settled.spent
        self.find(settled.landed)


NOTHING_ADDED: Mapping[str, Any] = MappingProxyType(Round().plain())
"""The part `round` of a ledger's state that has just met."""


_NOTHING = Traffic()
_NO_MICROSECONDS = dict.fromkeys(PARTS, 0)


def settle(step: Step, clock: Clock, *, gradients: bool) -> Settled:
    """Read a step's marks; waits for those that the device has not passed.

    Args:
        step: that is over.
        clock: which took the marks; later ones are measured from the step's end.
        gradients: also those of single gradients.
    """
    read = clock.us
    parts = _NO_MICROSECONDS.copy()
    start = before = read(step.laps[0][1])
    laps = []
    for part, mark in step.laps[1:]:
        now = read(mark)
        took = now - before
        parts[part] += took
        laps.append((part, took))
        before = now
    backward = sync = _NOTHING
    if step.backward_end is not None:
        flights = clock.read(step.flights)
        backward = Traffic(flights, flights, [tail(flights, read(step.backward_end))])
    if step.sync.used:
        sync = step.sync.read(clock)
    samples, loss_sum = 0, 0.0
    for loss, count in step.losses:
        if count:
            samples += count
            loss_sum += float(loss) * count
    mean = loss_sum / samples if samples else math.nan
    complete = {name: read(mark) for name, mark in step.gradients.items()} if gradients else {}
    clock.rebase(step.laps[-1][1])
    return Settled(step, parts, start, before - start, laps, backward, sync, mean, samples, complete)


def divide(settled: Settled, all_ready_us: Sequence[float | None]) -> int:
    """Take out of backward's and sync's microseconds what of them was exposed communication; gives its sum.

    Args:
        settled: the step.
        all_ready_us: when the last rank had each payload that landed ready; None: ranks have not told.
    """
    us, ready = settled.us, [at or 0.0 for at in all_ready_us]
    hook = wait = wire = 0
    gradients = len(settled.backward.landed)
    both = (
        ("backward_us", settled.backward, ready[:gradients]),
        ("sync_us", settled.sync, ready[gradients:]),
    )
    for part, traffic, at in both:
        if traffic is not _NOTHING:
            found = exposed(traffic, at)
            us[part] -= found.total_us
            hook += found.hook_us
            wait += found.wait_us
            wire += found.wire_us
    us["exposed_hook_us"], us["exposed_wait_us"], us["exposed_wire_us"] = hook, wait, wire
    return hook + wait + wire
