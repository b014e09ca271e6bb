"""One step: its marks while it runs, and what ranks agree about it afterwards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ddprun.telemetry.clock import Clock
from ddprun.telemetry.overflow import Overflow
from ddprun.telemetry.records import Traffic
from ddprun.telemetry.stragglers import Straggler
from ddprun_hooks.flight import Flight


@dataclass(slots=True)
class Marks:
    """Traffic of a step that runs, its times still marks."""

    sent: list[Flight[Any]] = field(default_factory=list)
    landed: list[Flight[Any]] = field(default_factory=list)
    waits: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def used(self) -> bool:
        """Whether there was any."""
        return bool(self.sent or self.landed or self.waits)

    def read(self, clock: Clock) -> Traffic:
        """The traffic in microseconds."""
        us = clock.us
        landed = clock.read(self.landed)
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

    gradients: Mapping[str, Any] = field(default_factory=dict)
    """When the gradients were complete, by parameter; empty if nobody has looked."""

    sync: Marks = field(default_factory=Marks)
    """What else was exchanged: changes of parameters, buffers."""

    backward_end: Any = None
    losses: list[tuple[Tensor, int]] = field(default_factory=list)
    """(mean loss of a micro-batch, samples) of this rank."""

    synchronised: bool = True
    stop: bool = False
    checkpoint: bool = False
    compare_clocks: bool = False


class Agreed(NamedTuple):
    """What all ranks know alike about one finished step, and about those since the last one like it."""

    step: int
    mean_loss: float
    """Mean over all samples of all ranks since the ranks synchronised before."""

    rank_losses: Sequence[float]
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
