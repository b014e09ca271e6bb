"""DiLoCo: an outer optimizer on what the ranks learn apart; in fragments, and while training goes on."""

from dataclasses import replace
from typing import Annotated, Self

from pydantic import Field, model_validator

from ddprun.options import NonNegativeInt, PositiveFloat, combine, problem
from ddprun.sync.plan import (
    OuterKind,
    OuterOptimizer,
    Period,
    StageFacts,
    SyncPlan,
    SyncPolicy,
    Transfer,
    period_steps_and_round,
)


class Diloco(SyncPolicy):
    """Every n steps an outer optimizer takes the ranks' mean change as its gradient (Douillard et al. 2023,
    arXiv:2311.08105).
    """

    every: Period
    """Steps between two exchanges of the same parameter, or a round: `{samples: N}` of all ranks or
    `{seconds: S}`, in which each rank takes as many local updates as its speed allows. A round is one
    step."""

    outer: OuterKind = "nesterov"
    """The outer optimizer: SGD with Nesterov momentum, SGD with plain momentum, or FedAdam
    (arXiv:2003.00295) with a second beta of 0.99."""

    outer_lr: PositiveFloat = 0.7
    """Learning rate of the outer optimizer. SGD multiplies the mean change by it. Adam moves each weight by
    about this amount; with Adam, set it."""

    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of the outer SGD, or the first beta of Adam; with 0 and `outer_lr: 1`, SGD is `local_sgd`."""

    outer_eps: PositiveFloat | None = None
    """Added to the root of the second moments of Adam; null is 0.001."""

    fragments: Annotated[int, Field(gt=0, le=10_000)] = 1
    """Number of parts that the parameters are split into, exchanged at evenly spaced steps (Streaming DiLoCo,
    arXiv:2501.18512)."""

    overlap_steps: NonNegativeInt = 0
    """The exchange runs while training goes on, and is applied exactly this many steps later."""

    alpha: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Part of its own weights that a rank mixes into the new common ones (Streaming DiLoCo); null: it keeps
    what it has learned while the exchange ran."""

    @model_validator(mode="after")
    def _check_fits_period(self) -> Self:
        every, (steps, _) = f"every {self.every}", period_steps_and_round(self.every)
        faults = []
        if self.fragments > steps:
            text = f"fragments {self.fragments} is more than {every}: each needs a step of its own"
            faults.append(problem(text, f"at most {steps}", at="fragments"))
        if self.overlap_steps >= steps:
            text = f"overlap_steps {self.overlap_steps} is not less than {every}: the next exchange would "
            text += "start before the last one is applied"
            faults.append(problem(text, f"at most {steps - 1}", at="overlap_steps"))
        if self.outer == "adam" and "outer_lr" not in self.model_fields_set:
            text = "adam moves each weight by about outer_lr in a step, so it has no default"
            faults.append(problem(text, "write one, such as outer_lr: 0.001", at="outer"))
        if self.outer != "adam" and self.outer_eps is not None:
            text = f"outer: {self.outer} takes none"
            faults.append(problem(text, "remove it", at="outer_eps", on_key=True))
        if faults:
            raise combine(faults)
        return self

    def plan(self, stage: StageFacts) -> SyncPlan:
        """Each fragment's change at a phase of its own; overlap applies it exactly so many steps later."""
        outer = OuterOptimizer(self.outer_lr, self.outer_momentum, self.outer, self.outer_eps or 1e-3)
        every, one_round = period_steps_and_round(self.every)
        one = Transfer("change", every, delay=self.overlap_steps, outer=outer, own_part=self.alpha)
        parts = self.fragments
        phases = enumerate(index * every // parts for index in range(parts))
        transfers = [replace(one, phase=phase, fragment=(index, parts)) for index, phase in phases]
        return SyncPlan(transfers=tuple(transfers), round=one_round)
