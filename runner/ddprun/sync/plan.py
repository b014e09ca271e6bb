"""What a sync policy sends and when, said once, in its plan: a run carries it out, process groups are made
for it, and `ddprun explain` shows it. Nothing here imports torch: `ddprun check` reads plans, too.
"""

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, TypeAdapter, model_serializer, model_validator

from ddprun.options import CustomValidator, Options, PositiveFloat, PositiveInt, expected, problem

GradientScope = Literal["all", "host"] | None  # among which ranks backward averages
ConsistencyScope = Literal["common", "host", "apart"]  # all ranks hold the same, those of a host, or none
Effect = Literal["nothing", "common", "host", "hosts_apart", "apart"]
"""What a step did to the ranks' parameters. `nothing`: equal ones stay equal. `common`: all ranks have the
same now. `host`: the ranks of each host have. `hosts_apart`: ranks of one host stay equal if they were, hosts
do not. `apart`: each rank went its own way."""

_MAX_CONTROL_DELAY_STEPS = 8  # that a control message may take, at most, if nothing else holds it up
_LONGEST_CYCLE = 100_000  # periods that have no smaller common multiple are followed for so many steps


def is_due(every: int | None, step: int) -> bool:
    """Whether what comes after every so many steps comes after this one; 0 or None: it never does."""
    return every is not None and every > 0 and step % every == 0


class LocalRound(Options):
    """Local updates of each rank between two exchanges, as many as its speed allows: together one step. A
    slower rank makes fewer, as in DyLU (Liu et al. 2024, arXiv:2401.09135).
    """

    samples: PositiveInt | None = None
    """Of all ranks together."""

    seconds: PositiveFloat | None = None
    """How long a rank works; the number of samples is what it then manages."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        return {key: value for key, value in self if value is not None}

    def __str__(self) -> str:
        [(key, value)] = self._as_written().items()
        return f"{{{key}: {value if key == 'samples' else format(value, 'g')}}}"


_STEPS, _ROUND_KEYS = TypeAdapter(PositiveInt), LocalRound.model_fields.keys()


def _parse_period(value: Any) -> Any:
    if isinstance(value, LocalRound):
        return value
    if isinstance(value, int | float):
        return _STEPS.validate_python(value, strict=True)
    if not isinstance(value, dict) or len(value) != 1 or None in value.values() or value.keys() - _ROUND_KEYS:
        raise expected("a number of steps or a round", "write a number, {samples: N} or {seconds: S}")
    return LocalRound.model_validate(value)


Period = Annotated[PositiveInt | LocalRound, CustomValidator(_parse_period)]
"""From one exchange to the next: a number of steps, or a round, which is one step."""


def period_steps_and_round(period: "int | LocalRound") -> tuple[int, "LocalRound | None"]:
    """Its number of steps, and what a step is, if it is a round."""
    return (1, period) if isinstance(period, LocalRound) else (period, None)


@dataclass(frozen=True)
class Partition:
    """Splits the ranks of a run into groups, each of which exchanges for itself; known by its name."""

    name: str
    groups: Callable[[int], Sequence[Sequence[int]]] = field(compare=False, repr=False)
    """From the number of ranks to the ranks of each group; every rank is in one."""

    def parts(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group, of so many ranks."""
        return tuple(sorted(tuple(sorted(group)) for group in self.groups(ranks)))


OuterKind = Literal["nesterov", "sgd", "adam"]
"""SGD with Nesterov momentum or with plain momentum, as torch has them, or FedAdam (Reddi et al. 2021,
arXiv:2003.00295)."""


@dataclass(frozen=True, slots=True)
class OuterOptimizer:
    """An optimizer of what ranks last had in common; its gradient is their mean change, negated."""

    lr: float
    momentum: float  # of SGD; of Adam its first beta
    kind: OuterKind = "nesterov"
    eps: float = 0.0  # of Adam


@dataclass(frozen=True, slots=True)
class Transfer:
    """One kind of exchange, at regular intervals of a stage's steps, which count from 1."""

    what: Literal["change", "parameters", "optimizer"]
    """`change`: the mean change of the parameters since ranks last held equal ones, through the stage's
    hooks; never among the parts of a partition. `parameters`, `optimizer`: the mean of the parameters, or of
    the optimizer's state, without hooks."""

    every: int  # steps from one time to the next; 0: only at the stage's end, where it makes ranks equal
    phase: int = 0  # it starts after steps whose number, divided by `every`, leaves this remainder
    not_every: int | None = None  # never after a step that is a multiple of this
    delay: int = 0
    """Training continues during the exchange, and the result is applied this many steps later; only for
    `change`."""

    among: Literal["all", "host"] | Partition = "all"
    source: int | None = None  # the rank whose `parameters` all take; None: their mean
    fragment: tuple[int, int] = (0, 1)  # which of how many parts of the parameters, about equally large
    outer: OuterOptimizer | None = None  # what becomes of the mean change; None: it is added
    own_part: float | None = None
    """The fraction of its own weights that a rank keeps when a `change` is applied, until the stage's end;
    None: what it has learned since the exchange began."""

    def __post_init__(self) -> None:
        if self.what == "change" and self.partition is not None:
            raise ValueError(
                "a change goes among all ranks or those of a host, not among the parts of "
                f'"{self.partition.name}": there, average the parameters'
            )

    def starts_after(self, step: int) -> bool:
        starts = step > 0 and self.every > 0 and step % self.every == self.phase
        return starts and not is_due(self.not_every, step)

    def is_applied_after(self, step: int) -> bool:
        return self.starts_after(step - self.delay)

    @property
    def leaves_apart(self) -> bool:
        """Ranks differ when its result is applied, until the stage's end."""
        return self.delay > 0 or bool(self.own_part)

    @property
    def partition(self) -> Partition | None:
        """Among the ranks of each of its groups, if it is one."""
        return self.among if isinstance(self.among, Partition) else None

    @property
    def equalizes(self) -> bool:
        """It makes its parameters equal on all ranks."""
        return self.what != "optimizer" and self.among == "all"


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """All that ranks exchange in a stage besides buffers and control messages."""

    gradients: GradientScope = None
    transfers: tuple[Transfer, ...] = ()  # in the order in which they start after one step
    hosts: int | None = None  # into how many hosts `host` splits the ranks; None: as they were launched
    changes_weights: bool = True  # False: nothing in the stage changes weights
    round: LocalRound | None = None  # what a step is, if each rank takes as many updates in it as it manages
    keeps_apart: bool = False
    """Ranks are meant to differ: a stage before this one need not make them equal, and this one cannot be
    resumed with a different number of ranks."""

    def __post_init__(self) -> None:
        outer = [(one.among, one.fragment) for one in self.transfers if one.outer is not None]
        splits = {(among, parts) for among, (_, parts) in outer}
        if len({*outer}) < len(outer) or len(splits) > len({among for among, _ in outer}):
            raise ValueError("two outer optimizers have the same parameters among the same ranks")

    def synchronizes(self, step: int) -> bool:
        """Whether all ranks exchange something in this step; exchanges inside hosts do not count."""
        counted = (one for one in self.transfers if one.what != "optimizer" and one.among != "host")
        return self.gradients == "all" or any(one.is_applied_after(step) for one in counted)

    @property
    def never_exchanges(self) -> bool:
        """Ranks do not exchange anything before the stage's end."""
        return self.gradients != "all" and all(one.among == "host" for one in self.transfers)

    @property
    def has_host_legs(self) -> bool:
        """The ranks of a host exchange something by themselves."""
        return self.gradients == "host" or any(one.among == "host" for one in self.transfers)

    @property
    def uses_hooks(self) -> bool:
        """Something goes through the stage's hooks."""
        return self.gradients is not None or any(one.what == "change" for one in self.transfers)

    @property
    def control_delay_steps(self) -> int:
        """Steps until control messages are read: more where transfers overlap, or ranks meet rarely."""
        between_exchanges = min(self.exchange_period - 1, _MAX_CONTROL_DELAY_STEPS)
        return max(1, self.overlap_steps, between_exchanges)

    @property
    def overlap_steps(self) -> int:
        """After how many steps an exchange that overlaps with training is applied; 0: none does."""
        return max((one.delay for one in self.transfers), default=0)

    @property
    def period(self) -> int:
        """Steps between two exchanges of the same parameters among all ranks; 0: there are none."""
        return 1 if self.gradients == "all" else max([0, *(t.every for t in self.transfers if t.equalizes)])

    @property
    def exchange_period(self) -> int:
        """As `period`, or steps between two exchanges among the parts of a partition; 0: there are none."""
        rates = [1 / one.every for one in self.transfers if one.partition is not None and one.every]
        return self.period or (round(1 / sum(rates)) if rates else 0)

    def cycle(self, *more: int | None) -> int:
        """After how many steps everything begins again, `more` periods included."""
        periods = [period for period in (*(one.every for one in self.transfers), *more) if period]
        return min(math.lcm(*periods), _LONGEST_CYCLE)


class BufferSettings(Options):
    """When ranks make their buffers equal, such as BatchNorm's running statistics, and how."""

    when: Literal["auto", "every_forward", "every", "before_evaluate", "never"] = "auto"
    """`auto` sends what passes before step 1 change, before a forward pass or after ranks have synchronised,
    unless all of that belongs to torch's own batch or instance norm layers and the loss does not depend on
    it; `every` is after every n-th step. All but `never` also make buffers equal before evaluate and save."""

    every: PositiveInt | None = None
    """Steps from one time to the next; implies `when: every`."""

    reduce: Literal["broadcast", "mean"] = "broadcast"
    """`broadcast`: all ranks take those of rank 0. `mean`: all ranks take their mean, of integers those of
    rank 0."""

    @model_validator(mode="before")
    @classmethod
    def _when_every(cls, value: Any) -> Any:
        return {"when": "every", **value} if isinstance(value, dict) and "every" in value else value

    @model_validator(mode="after")
    def _one_time(self) -> Self:
        if self.when == "every" and self.every is None:
            raise problem('"every" needs a number of steps', "write {every: N}", at="every")
        if self.when != "every" and self.every is not None:
            text = f'"every" clashes with "when: {self.when}"'
            raise problem(text, "remove one of the two", at="every", on_key=True)
        if self.when == "never" and self.reduce != "broadcast":
            text = f'"reduce: {self.reduce}" clashes with "when: never"'
            raise problem(text, "remove one of the two", at="reduce", on_key=True)
        return self

    def to_plain_data(self) -> Any:
        """As a file would hold it."""
        if self.when == "every":
            return {"every": self.every, "reduce": self.reduce}
        return self.when if self.reduce == "broadcast" else {"when": self.when, "reduce": self.reduce}


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Which buffers are sent in the steps of a stage, and when."""

    setting: BufferSettings
    names: tuple[str, ...]  # all but counters, in the model's order
    changing: tuple[str, ...]  # those that a training forward pass changes
    read_in_training: bool  # a forward pass may depend on the changing ones
    gradients_everywhere: bool  # in every step; else a forward pass is no time to synchronise, either

    def names_before_forward(self) -> tuple[str, ...]:
        """Before the first forward pass of a step: those it may read, so that all ranks read the same."""
        when = self.setting.when
        if when == "auto" and self.read_in_training and self.gradients_everywhere:
            return self.changing
        return self.names if when == "every_forward" else ()

    def names_after_step(self, step: int, *, synchronized: bool) -> tuple[str, ...]:
        """After a step, counted from 1 in the stage; `synchronized`: the policy has exchanged something."""
        if self.setting.when == "every" and self.synchronizes(step):
            return self.names
        follows_policy = self.setting.when == "auto" and not self.gradients_everywhere
        if follows_policy and self.read_in_training and synchronized:
            return self.changing
        return ()

    def synchronizes(self, step: int) -> bool:
        """Whether ranks exchange buffers in this step, whatever the sync policy does."""
        every = 1 if self.setting.when == "every_forward" else self.setting.every
        return bool(self.names) and is_due(every, step)


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What a plan may depend on besides the policy's options."""

    backward: bool  # the stage has backward passes, so there are gradients
    changes_weights: bool  # something in the stage does: a backward pass, `update` or `mutate`


@dataclass(frozen=True, slots=True)
class DueTransfers:
    """Transfers of a plan, by their index in it."""

    applied: Sequence[int]  # that were in flight
    started: Sequence[int]  # those without a delay are applied at once
    without_steps_since: Container[int] = ()  # since whose start no step was taken
    reset_to_common: Sequence[int] = ()  # whose common weights are taken now, without this rank's own part
    at_end: bool = False  # training is over, so nothing overlaps with it, and all changes travel at once


class PlanProgress:
    """Follows a stage's plan step by step: what starts, what is applied, and what that makes of the ranks."""

    def __init__(self, plan: SyncPlan) -> None:
        self.plan = plan
        self.steps_since_start = [0] * len(plan.transfers)  # of each transfer: steps since it started last
        self.in_flight: set[int] = set()  # indices of transfers that have started and are not applied

    def advance_step(self, step: int) -> tuple[DueTransfers, Effect]:
        """Advance by a step of the optimizer; gives also the effect on the ranks' parameters."""
        transfers = self.plan.transfers
        if not transfers:
            return DueTransfers((), ()), self._effect(())
        self.steps_since_start = [steps + 1 for steps in self.steps_since_start]
        finishing = [index for index, one in enumerate(transfers) if one.delay and one.is_applied_after(step)]
        starting = [index for index, one in enumerate(transfers) if one.starts_after(step)]
        self.in_flight -= set(finishing)
        for index in starting:
            self.steps_since_start[index] = 0
            if transfers[index].delay:
                self.in_flight.add(index)
        return DueTransfers(finishing, starting), self._effect(starting)

    def _effect(self, starting: Sequence[int]) -> Effect:
        plan = self.plan
        if plan.gradients == "all" or not plan.changes_weights:
            return "nothing"
        equalizing = [index for index, one in enumerate(plan.transfers) if one.equalizes]
        since = self.steps_since_start
        if equalizing and not any(since[index] or plan.transfers[index].leaves_apart for index in equalizing):
            return "common"
        sent = [plan.transfers[index] for index in starting]
        if any(one.what != "optimizer" and one.among == "host" for one in sent):
            return "host"
        return "hosts_apart" if plan.gradients == "host" else "apart"

    def finish_stage(self, *, reconcile: bool) -> tuple[DueTransfers, Effect]:
        """The stage is over: apply what is in flight; if to `reconcile`, after a last short round."""
        since, transfers = self.steps_since_start, [*enumerate(self.plan.transfers)]
        unchanged = {index for index, steps in enumerate(since) if not steps}
        finishing = sorted(self.in_flight)
        self.in_flight.clear()
        starting, mixed = list[int](), list[int]()
        if reconcile:
            mixed = [index for index, one in transfers if one.own_part and not since[index]]
            if any(since[index] for index, one in transfers if one.equalizes):
                starting = [index for index, one in transfers if one.among == "all" and since[index]]
        for index in starting:
            since[index] = 0
        effect: Effect = "common" if reconcile and (finishing or starting or mixed) else "nothing"
        return DueTransfers(finishing, starting, unchanged, mixed, at_end=True), effect


@dataclass(slots=True)
class ReplicaConsistency:
    """Which ranks hold the same parameters, and the same optimizer state."""

    parameters: ConsistencyScope = "common"
    optimizer: ConsistencyScope = "common"
    mutated_at: int = -1  # after how many steps of the run each rank changed its weights in a way of its own
    hosts: int | None = None  # into which the running stage splits the ranks; None: as launched
    averages_differ: bool = False  # the ranks' averages of the weights (`ema`)
    optimizer_is_read: bool = False  # its state is part of the weights that are read (`train()`, `eval()`)

    @property
    def weights_differ(self) -> bool:
        """Ranks differ in the weights that are measured and saved."""
        differ = self.parameters != "common" or self.averages_differ
        return differ or (self.optimizer_is_read and self.optimizer != "common")

    def apply_effect(self, effect: Effect, plan: SyncPlan, *, noop: bool) -> None:
        """A step or stage had this effect on the parameters; `noop`: hooks return each rank's own."""
        noop = noop and plan.uses_hooks
        state_averages = (one.what == "optimizer" and one.among == "all" for one in plan.transfers)
        if noop and effect != "nothing":
            self.parameters = "apart"
        elif effect == "hosts_apart":
            self.parameters = "apart" if self.parameters == "apart" else "host"
        elif effect != "nothing":
            self.parameters = effect
        if noop and plan.gradients:
            self.parameters = self.optimizer = "apart"
        elif effect == "common" and not noop and any(state_averages):
            self.optimizer = "common"
        elif plan.gradients != "all" or self.parameters != "common":
            self.optimizer = "apart"  # weight decay makes momentum of weights


OptimizerStateMode = Literal["local", "average"]


class SyncPolicy(Options):
    """Base class of all sync policies. The fields of a subclass are its options in the file, checked before a
    run; its docstring is its line in `ddprun catalog`.
    """

    period_key: ClassVar[str] = "every"
    """The option that says after how many steps all ranks synchronise, for messages."""

    def plan(self, stage: StageFacts) -> SyncPlan:
        """What ranks exchange in a stage, and when; `ddprun explain` shows it."""
        raise NotImplementedError
