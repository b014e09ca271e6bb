"""One step: its marks while it runs, and what ranks agree about it afterwards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ddprun.telemetry.overflow import Overflow
from ddprun.telemetry.stragglers import Straggler
from ddprun_hooks.flight import Flight


@dataclass(slots=True)
class Traffic:
    """What is exchanged beside backward: in a step that runs, or between steps."""

    sent: list[Flight[Any]] = field(default_factory=list)
    """What set out; it may not have landed yet."""

    landed: list[Flight[Any]] = field(default_factory=list)
    """What was waited for; it may have set out in an earlier step."""

    waits: list[tuple[Any, Any]] = field(default_factory=list)
    """When the training thread had nothing to do but wait: marks, from and to."""


@dataclass(slots=True)
class Step:
    """One step while it runs."""

    number: int
    stage: int
    parts: list[str]
    """What ended at each mark (one of `records.PARTS`); the first entry only starts the time."""

    marks: list[Any]

    flights: list[Flight[Any]] = field(default_factory=list)
    """Gradient buckets of the backward pass."""

    gradients: Mapping[str, Any] | None = None
    """When the gradients were complete, by parameter; None: nobody has looked."""

    sync: Traffic | None = None
    """What else was exchanged: changes of parameters, buffers."""

    backward_end: Any = None
    losses: list[Tensor] = field(default_factory=list)
    """Of this rank: the mean loss of each micro-batch."""

    samples: list[int] = field(default_factory=list)
    """Of each micro-batch."""

    synchronised: bool = True
    wishes: int = 0
    """Of this rank (`word.STOP` …)."""


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
