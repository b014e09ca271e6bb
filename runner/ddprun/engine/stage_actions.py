"""What a stage does between the ranks, in order: a run does it (`stage_run.execute_action`), and
`ddprun explain` counts what it sends. Imports no torch.

Only the part of a step before its update is in two places, here and in `loop.train_step`, whose orders
tests/engine/test_sequence.py compares. The caller reports what a run alone knows: how many steps were taken
(`end`), and updates of the weights (`note_update`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ddprun.config import Pipeline, StepStage, StepStageSettings
from ddprun.sync.plan import BufferPlan, DueTransfers, Effect, PlanProgress, ReplicaConsistency, is_due

ActionPhase = Literal["begin", "before_forward", "backward", "after_step", "evaluate", "end", "once"]
"""`begin`, `end`: before a stage's first step and after its last. `evaluate`: in an evaluation inside it.
`once`: by a stage without steps.
"""


@dataclass(frozen=True, slots=True)
class EqualizeBuffers:
    """Make these buffers equal."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EqualizeState:
    """Average over all ranks, or broadcast from rank `source`; without hooks."""

    what: Literal["parameters", "optimizer", "averages"]  # the averages are the weights' (`ema`)
    source: int | None = None


@dataclass(frozen=True, slots=True)
class AuditParameters:
    """Compare all parameters with what `ReplicaConsistency` says."""

    recorded: bool  # it counts as one of those that the file asks for
    at_end: bool = False  # the stage has just made ranks equal


@dataclass(frozen=True)
class AverageGradients:
    """The backward pass of a turn averages them among the plan's ranks."""

    turn: int  # its index in the stage; 0 for a stage without turns


StageAction = (
    EqualizeBuffers
    | AverageGradients
    | DueTransfers
    | EqualizeState
    | AuditParameters
    | Literal["compare frozen", "mutate"]
)
"""`compare frozen`: make those frozen parameters equal that differ. `mutate`: each rank changes its own
weights."""


@dataclass(eq=False)
class StageActions:
    """What a train or forward stage does to the ranks, moment by moment; steps count from 1 in the stage.
    Carry each action out before you ask for the next one: `replicas` changes between them.
    """

    pipeline: Pipeline
    stage: StepStage
    settings: StepStageSettings
    buffers: BufferPlan
    replicas: ReplicaConsistency  # from stage to stage
    steps: int | None  # how many the stage has; None where nobody can know
    first_step: int = 0  # steps of the run before the stage
    progress: PlanProgress = field(init=False)
    compared: bool = field(init=False, default=False)  # parameters, after a step of this attempt

    def __post_init__(self) -> None:
        self.progress = PlanProgress(self.settings.plan)
        self.replicas.hosts = self.settings.plan.hosts

    # What is asked in any step.

    def exchanges_in_step(self, step: int) -> bool:
        """Whether this step has a control message: ranks exchange something in it, or never anything."""
        by_policy = self.settings.plan.synchronizes(step) or self.settings.plan.never_exchanges
        return by_policy or self.buffers.synchronizes(step) or is_due(self.pipeline.audit.every, step)

    @property
    def exchange_cycle(self) -> int:
        """After how many steps those in which ranks exchange something come again."""
        return self.settings.plan.cycle(self.settings.buffers.every, self.pipeline.audit.every)

    # What is done, moment by moment.

    def actions_at_begin(self) -> Iterator[StageAction]:
        """Before the first step."""
        # Equal gradients keep ranks equal only if their optimizers' state is.
        if self.settings.plan.gradients is not None and self.replicas.optimizer != "common":
            yield EqualizeState("optimizer")
            self.replicas.optimizer = "common"
        yield from self._mutate_action(0)

    def actions_in_step(self, step: int) -> Iterator[tuple[ActionPhase, StageAction]]:
        """All actions of one step, for `explain`. A run asks for `after_step` alone; what comes before it is
        in the order of `loop.train_step`.
        """
        for turn in self.settings.due_turns(step):
            if names := self.buffers.names_before_forward():
                yield "before_forward", EqualizeBuffers(names)
            if self.settings.plan.gradients is not None:
                yield "backward", AverageGradients(turn)
        if self.settings.updates_weights:
            self.note_weights_updated()
        for action in self.actions_after_step(step):
            yield "after_step", action

    def note_weights_updated(self) -> None:
        """The weights were updated, so that their average (`ema`) moves."""
        if self.pipeline.ema is None:
            return
        plan = self.settings.plan
        equal = self.settings.averages_gradients and self.replicas.parameters == "common"
        follows = self.settings.mutate is None and not self.settings.uses_noop  # the exchange in a round
        follows = follows and not any(transfer.leaves_apart for transfer in plan.transfers)
        if not (equal or (plan.round is not None and follows)):
            self.replicas.averages_differ = True

    def actions_after_step(self, step: int) -> Iterator[StageAction]:
        """After the optimizer's step: sync policy, buffers, audit, `mutate`."""
        plan = self.settings.plan
        transfers, effect = self.progress.advance_step(step)
        if transfers.applied or transfers.started:
            yield transfers
        self._apply_effect(effect)
        synchronized = plan.synchronizes(step)
        if names := self.buffers.names_after_step(step, synchronized=synchronized):
            yield EqualizeBuffers(names)
        audits = is_due(self.pipeline.audit.every, step)
        # Also after the first step in this attempt that leaves ranks the same.
        first = not self.compared and plan.changes_weights and self.replicas.parameters != "apart"
        if audits or first:
            yield AuditParameters(recorded=audits)
            self.compared = True
        if synchronized and step != self.steps:  # after the last step no other would use it
            yield from self._mutate_action(step)

    def transfers_when_interrupted(self) -> DueTransfers:
        """The stage ends before its last step: only what is in flight is applied."""
        return self.progress.finish_stage(reconcile=False)[0]

    def actions_at_end(self, step: int) -> Iterator[StageAction]:
        """End a complete stage of `step` steps: make ranks equal, unless the next stage takes them so."""
        replicas, reconcile = self.replicas, self.pipeline.averages_at_end_of(self.stage)
        transfers, effect = self.progress.finish_stage(
            reconcile=reconcile and replicas.parameters != "common"
        )
        yield transfers
        if effect != "nothing":
            self._apply_effect(effect)
        if self.settings.mutate is not None and replicas.mutated_at == self.first_step + step:
            replicas.parameters = "apart"  # the stage's length was not known, and no step has come after
        if not reconcile:
            return
        if replicas.parameters != "common":
            yield from equalizing_actions(replicas)
            effect = "common"
        else:
            if effect == "nothing":
                yield "compare frozen"
            yield from _ema_equalizing_actions(replicas, None)
        yield AuditParameters(recorded=effect == "common", at_end=True)

    def _apply_effect(self, effect: Effect) -> None:
        self.replicas.apply_effect(effect, self.settings.plan, noop=self.settings.uses_noop)

    def _mutate_action(self, step: int) -> Iterator[StageAction]:
        if self.settings.mutate is not None:
            yield "mutate"
            self.replicas.parameters, self.replicas.mutated_at = "apart", self.first_step + step


def equalizing_actions(replicas: ReplicaConsistency, source: int | None = None) -> Iterator[EqualizeState]:
    """Make all ranks' parameters their mean or those of rank `source`, and what belongs to them."""
    yield EqualizeState("parameters", source)
    if source is not None and replicas.optimizer_is_read:
        yield EqualizeState("optimizer", source)
    replicas.parameters = "common"
    yield from _ema_equalizing_actions(replicas, source)


def _ema_equalizing_actions(replicas: ReplicaConsistency, source: int | None) -> Iterator[EqualizeState]:
    if replicas.averages_differ:
        yield EqualizeState("averages", source)
        replicas.averages_differ = False
