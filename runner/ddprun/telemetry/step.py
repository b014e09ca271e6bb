"""One step: its marks while it runs, its microseconds afterwards, and what ranks agree about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ddprun.telemetry.clock import Clock
from ddprun.telemetry.overflow import Overflow, first_finding
from ddprun.telemetry.records import Traffic
from ddprun.telemetry.stragglers import Straggler
from ddprun.telemetry.word import NOTHING_SPENT, Spent
from ddprun_hooks.flight import Flight


@dataclass(slots=True)
class Marks:
    """Traffic of a step that runs, its times still marks."""

    sent: list[Flight[Any]] = field(default_factory=list)
    landed: list[Flight[Any]] = field(default_factory=list)
    waits: list[tuple[Any, Any]] = field(default_factory=list)

    def read(self, clock: Clock) -> Traffic:
        """The traffic in microseconds."""
        us = clock.us
        landed = [flight.mapped(us) for flight in self.landed]
        # What has not landed yet is not complete; of it only the time inside its hooks is wanted.
        sent = [_set_out(flight, clock) for flight in self.sent]
        return Traffic(sent, landed, [(us(start), us(end)) for start, end in self.waits])


def _set_out(flight: Flight[Any], clock: Clock) -> Flight[int]:
    return Flight(
        flight.kind,
        flight.bucket,
        flight.hooks,
        flight.dtype,
        flight.numel,
        flight.bytes,
        ready=clock.us(flight.ready),
        handed_over=clock.us(flight.handed_over),
    )


@dataclass(slots=True)
class Step:
    """One step while it runs."""

    number: int
    stage: int
    laps: list[tuple[str, Any]]
    """(part that ended here, mark); the first entry only starts the time."""

    flights: list[Flight[Any]] = field(default_factory=list)
    """Gradient buckets of the backward pass."""

    sync: Marks = field(default_factory=Marks)
    """What else was exchanged: changes of parameters, buffers."""

    backward_end: Any = None
    losses: list[tuple[Tensor, int]] = field(default_factory=list)
    """(mean loss of a micro-batch, samples) of this rank."""

    synchronised: bool = True
    stop: bool = False
    checkpoint: bool = False
    compare_clocks: bool = False


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know alike about one finished step, and about those since the last one like it."""

    step: int
    mean_loss: float
    """Mean over all samples of all ranks since the ranks synchronised before."""

    rank_losses: tuple[float, ...]
    """Each rank's own mean."""

    stop: bool
    """Some rank wants to stop."""

    checkpoint: bool
    """Some rank was asked for a checkpoint."""

    compare_clocks: bool
    """Rank 0 wants the clocks compared again."""

    overflow: Overflow | None = None
    """The first that is known."""

    straggler: Straggler | None = None
    """Who is late just now; known on rank 0 alone."""

    straggler_is_news: bool = False


@dataclass(slots=True)
class Settled:
    """A finished step whose marks have become microseconds."""

    step: Step
    us: dict[str, int]
    start_us: int
    laps: Sequence[tuple[str, int]]
    """(part, microseconds), one after the other from `start_us` on; waiting is in them."""

    backward: Traffic
    sync: Traffic
    loss: float
    samples: int

    @property
    def landed(self) -> list[Flight[int]]:
        return [*self.backward.landed, *self.sync.landed]

    @property
    def waits(self) -> list[tuple[int, int]]:
        """When the training thread had nothing to do but wait: from, to."""
        return [*self.backward.waits, *self.sync.waits]

    @property
    def spent(self) -> Spent:
        """What the training thread did itself."""
        us, hooks = self.us, [self.backward.in_hooks_us, self.sync.in_hooks_us]
        return Spent(
            us["data_us"],
            us["forward_us"],
            us["backward_us"] - self.backward.waited_us - hooks[0],
            sum(hooks),
            us["optimizer_us"],
            us["sync_us"] - self.sync.waited_us - hooks[1],
            us["other_us"],
        )


@dataclass(slots=True)
class Round:
    """This rank's losses since the last control word, what it did, and what its hooks have found."""

    loss_sum: float = 0.0
    samples: int = 0
    steps: int = 0
    last_step: int = 0
    code: int = 0
    spent: Spent = NOTHING_SPENT
    flights: list[Flight[int]] = field(default_factory=list)

    def find(self, landed: Sequence[Flight[int]]) -> None:
        """Keep the first finding."""
        self.code = self.code or first_finding(landed)
        self.flights += [flight for flight in landed if flight.findings]

    def plain(self) -> dict[str, Any]:
        """As a checkpoint can hold it; `of` reads it back."""
        return {
            "loss_sum": self.loss_sum,
            "samples": self.samples,
            "steps": self.steps,
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
        self.last_step = settled.step.number
        self.spent = self.spent.plus(settled.spent)
        self.find(settled.landed)


NOTHING_ADDED: Mapping[str, Any] = MappingProxyType(Round().plain())
"""The part `round` of a ledger's state that has just met."""
