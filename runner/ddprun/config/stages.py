"""The stages of a pipeline: what each may name for itself, and the settings that then hold in it."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from ddprun.config import sections
from ddprun.config.built_in_options import OneOrMoreStrings
from ddprun.config.choices import (
    RESERVED_METRIC_NAMES,
    Choice,
    choice_validator,
    parse_optimizer,
    parse_schedule,
)
from ddprun.config.faults import allowed_values
from ddprun.config.validation_errors import validate
from ddprun.options import (
    CustomValidator,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    expected,
    pattern_constraint,
    problem,
    unknown_name_error,
)
from ddprun.sync.plan import BufferSettings, StageFacts, SyncPlan, SyncPolicy, is_due

if TYPE_CHECKING:
    from ddprun.config.schema import Pipeline


@dataclass(frozen=True)
class StepStageSettings:
    """The settings of one train or forward stage: its own, and the pipeline's for what it does not name."""

    steps: int | None
    epochs: int | None
    hooks: tuple[Choice, ...]
    sync: Choice
    buffers: BufferSettings
    accumulate: int  # 1 in a forward stage
    optimizer: Choice
    clip_norm: float | None
    clip_value: float | None
    on_nan: Literal["continue", "stop"]
    schedule: Choice | None
    warmup_steps: int
    mutate: Choice | None
    data: Choice | None  # None: what the pipeline's `data` gives for training
    freeze: tuple[str, ...]  # patterns of the names of parameters
    turns: tuple["Turn", ...]  # none: all that is trained is updated together
    update: Choice | None  # None in a train stage, and in a forward stage that updates nothing
    has_backward: bool  # the stage has backward passes

    @cached_property
    def plan(self) -> SyncPlan:
        changes_weights = self.has_backward or self.update is not None or self.mutate is not None
        policy = self.sync.settings
        assert isinstance(policy, SyncPolicy)
        return policy.plan(StageFacts(self.has_backward, changes_weights))

    @cached_property
    def updates_weights(self) -> bool:
        """The stage's steps update the weights, by gradients or by its `update`."""
        return self.has_backward or self.update is not None

    @cached_property
    def has_run_schedule(self) -> bool:
        """One schedule spans all stages."""
        return self.schedule is not None and "over" in self.schedule.sibling_keys

    @cached_property
    def schedule_metric(self) -> str | None:
        """The metric by which the schedule steps after evaluations; None: it steps after updates."""
        return self.schedule.sibling_keys.get("metric") if self.schedule and self.updates_weights else None

    def due_turns(self, step: int) -> list[int]:
        """The indices of the turns that a step of the stage takes, which counts from 1; 0 without turns."""
        return [index for index, turn in enumerate(self.turns) if is_due(turn.every, step)] or [0]

    @property
    def hook_specs(self) -> list[Any]:
        """The hooks as a file would have them."""
        return [hook.to_plain_data() for hook in self.hooks]

    @cached_property
    def uses_noop(self) -> bool:
        """The `noop` hook gives each rank its own back, so ranks diverge."""
        return any(hook.name == "noop" for hook in self.hooks)

    @cached_property
    def averages_gradients(self) -> bool:
        """Every step averages the gradients of all ranks, so all take the same update."""
        return self.plan.gradients == "all" and not self.uses_noop


class Turn(Options):
    """One of several parts of a step: forward, backward and an update of some parameters."""

    name: Annotated[str, pattern_constraint(r"^[A-Za-z_]\w*$", "a name of letters, digits and _")]
    """What the model's forward gets as `turn`, and what the loss is called in records."""

    match: OneOrMoreStrings
    """Patterns of the names of the parameters that are updated."""

    every: PositiveInt = 1
    """Steps of the stage from one of its turns to the next."""


class Stage(Options):
    name: ClassVar[str]
    _index: int = PrivateAttr(default=0)

    @cached_property
    def index(self) -> int:
        """Place in `stages`, from 0."""
        return self._index

    @cached_property
    def path(self) -> str:
        """Key path such as `stages[0].train`, for faults."""
        return f"stages[{self._index}].{self.name}"


def _parse_evaluation_interval(value: Any) -> Any:
    if isinstance(value, bool) or (not isinstance(value, int) and value != "epoch"):
        raise expected("a whole number of steps, or epoch")
    if value != "epoch" and value < 1:
        raise problem(f"must be greater than 0, got {value}")
    return value


class StageEvaluation(Options):
    """Evaluate on the held-out data while a stage trains, which leaves training the same, bit for bit."""

    every: Annotated[PositiveInt | Literal["epoch"], CustomValidator(_parse_evaluation_interval)]
    """Steps of the stage from one evaluation to the next, or `epoch`: at the end of each epoch of the data.
    The last comes at the stage's end."""

    steps: PositiveInt | None = None
    """Forward passes of each rank at most, for data without an end; null takes all of it."""

    metrics: sections.Metrics = ()
    """What to measure besides the loss."""

    gradients: bool = False
    """Keep autograd on, for a model or loss that computes gradients, such as forces or a penalty."""


def better_values(metric: str) -> Literal["min", "max"]:
    """Which values of a built-in metric are better."""
    return "min" if metric in ("loss", "perplexity") else "max"


class MonitoredMetric(Options):
    """A metric by which evaluations are compared."""

    metric: str
    """`loss`, or one of the metrics of the stage's `evaluate`."""

    mode: Literal["min", "max"] | None = None
    """Which values are better; null is min for `loss` and `perplexity`, max for `accuracy`, and an error
    for other metrics."""

    def improves(self, value: float, best: float | None, by: float = 0.0) -> bool:
        """Whether a value is better than the best so far (None: there is none), by more than this."""
        if not math.isfinite(value) or best is None:
            return math.isfinite(value)
        mode = self.mode or better_values(self.metric)
        return value < best - by if mode == "min" else value > best + by


class KeepBest(MonitoredMetric):
    """The weights of the best evaluation stay in the run's folder, as `best.safetensors`."""


class EarlyStop(MonitoredMetric):
    """The stage ends when evaluations stop improving."""

    patience: PositiveInt
    """This many evaluations in a row without improvement end the stage."""

    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """A value that is better by no more than this is no improvement."""


BEST_FILE = "best.safetensors"  # where `keep_best` writes, in the run's folder


OVERRIDABLE_KEYS = (
    *("accumulate", "sync", "hooks", "buffers", "optimizer", "schedule", "warmup_steps", "clip_norm"),
    *("clip_value", "on_nan", "freeze"),
)  # keys of the pipeline that a train stage may name for itself; a forward stage all but `accumulate`


def _parse_schedule(value: Any) -> Choice:
    if isinstance(value, dict) and "over" in value:
        text = "a stage's own schedule always spans that stage"
        raise problem(text, "write over: run beside the schedule at the top", at="over", on_key=True)
    return parse_schedule(value)


def _parse_optimizer(value: Any) -> Choice:
    if isinstance(value, dict) and "closure" in value:
        text = "whether steps get a closure is said once, for all stages"
        raise problem(text, "write closure: true beside the optimizer at the top", at="closure", on_key=True)
    return parse_optimizer(value)


class StepStage(Stage):
    """Base of the stages that take steps. Their keys apply to this stage only."""

    name: ClassVar[str] = "step"
    inherited_keys: ClassVar[Sequence[str]] = OVERRIDABLE_KEYS

    steps: PositiveInt | None = None
    """Optimizer steps; in a forward stage, forward passes."""

    epochs: PositiveInt | None = None
    """Passes over the training data."""

    data: sections.DataWithoutHeldOut | None = None
    """What this stage reads, used whole; null is what `data` above gives for training."""

    # What these keys of a stage leave out holds from above (`inherited_keys`).
    sync: sections.SyncChoice = Field("every_step", validate_default=True)
    hooks: sections.HookStack = ()
    buffers: sections.BuffersField = Field("auto", validate_default=True)
    optimizer: Annotated[
        Choice | None, choice_validator("optimizer", _parse_optimizer, "stage_optimizer")
    ] = None
    """Other settings for the same optimizer, which keeps its state."""

    schedule: Annotated[Choice, choice_validator("schedule", _parse_schedule, "stage_schedule")] | None = None
    warmup_steps: NonNegativeInt = 0
    clip_norm: PositiveFloat | None = None
    clip_value: PositiveFloat | None = None
    on_nan: Literal["continue", "stop"] = "stop"
    freeze: sections.NamePatterns = ()

    mutate: Annotated[Choice, choice_validator("mutate")] | None = None
    """Change each rank's weights, at the stage's start and after each synchronisation but the last."""

    evaluate: StageEvaluation | None = None
    """Measure the held-out data after every n-th step."""

    keep_best: KeepBest | None = None
    """Keep the weights of the best evaluation."""

    stop: EarlyStop | None = None
    """End the stage when evaluations stop improving."""

    @model_validator(mode="after")
    def _check_steps_or_epochs(self) -> Self:
        if self.steps is None and self.epochs is None:
            text = f"a {self.name} stage needs a length"
            raise problem(text, "write steps: N or epochs: N", on_key=True)
        if self.steps is not None and self.epochs is not None:
            text = "steps and epochs both say how long the stage is"
            raise problem(text, "keep one", at="epochs", on_key=True)
        return self

    def effective_settings(self, pipeline: "Pipeline") -> StepStageSettings:
        """The settings of this stage; those that it does not name are the pipeline's."""
        trains, given = isinstance(self, TrainStage), self.model_fields_set
        settings = {key: getattr(self if key in given else pipeline, key) for key in OVERRIDABLE_KEYS}
        if not trains:
            settings["accumulate"] = 1
        for key in ("steps", "epochs", "mutate", "data", "update"):
            settings[key] = getattr(self, key, None)  # a train stage has no `update`
        turns = getattr(self, "turns", None) or ()  # a forward stage has none
        return StepStageSettings(turns=turns, has_backward=trains, **settings)

    def key_path(self, key: str) -> str:
        """Where a setting of this stage stands in the file: in the stage, or above."""
        return f"{self.path}.{key}" if key in self.model_fields_set else key


class TrainStage(StepStage):
    """Train for a number of steps or epochs. The other keys apply to this stage only."""

    name: ClassVar[str] = "train"

    accumulate: PositiveInt = 1

    turns: Annotated[tuple[Turn, ...], Field(strict=False, min_length=2)] | None = None
    """Parts of each step, in order, on the same batch, each with its own loss and parameters, as in a GAN.
    null updates all that is trained together."""

    @model_validator(mode="after")
    def _check_turns(self) -> Self:
        turns = self.turns or ()
        names = [turn.name for turn in turns]
        if reserved := RESERVED_METRIC_NAMES.intersection(names):
            allowed = "choose a name that is none of a metric"
            raise problem(f'a turn cannot be called "{min(reserved)}"', allowed, at="turns")
        if twice := [name for name, often in Counter(names).items() if often > 1]:
            raise problem(f'two turns are called "{twice[0]}"', "give each a name of its own", at="turns")
        if turns and all(turn.every > 1 for turn in turns):
            raise problem("some steps would update nothing", "leave out every in one turn", at="turns")
        return self


class ForwardStage(StepStage):
    """Forward passes only, for a number of steps or epochs; `update` trains without gradients."""

    name: ClassVar[str] = "forward"

    update: Annotated[Choice, choice_validator("update")] | None = None
    """What changes the weights in each step; null changes nothing."""


class AverageStage(Stage):
    """The parameters of all ranks become their mean, once."""

    name: ClassVar[str] = "average"


class BroadcastStage(Stage):
    """The parameters of all ranks become those of one rank, once."""

    name: ClassVar[str] = "broadcast"

    source: NonNegativeInt = 0
    """The rank whose parameters all ranks take."""


class EvaluateStage(Stage):
    """Measure the loss, and the metrics named, on the held-out data."""

    name: ClassVar[str] = "evaluate"

    data: sections.DataWithoutHeldOut | None = None
    """What to measure on, used whole; null is what `data` above holds out."""

    steps: PositiveInt | None = None
    """Forward passes of each rank at most, for data without an end; null takes all of it."""

    metrics: sections.Metrics = ()
    """What to measure besides the loss."""

    gradients: bool = False
    """Keep autograd on, for a model or loss that computes gradients, such as forces or a penalty."""


class SaveStage(Stage):
    """Write the model's weights to the run's folder."""

    name: ClassVar[str] = "save"

    to: Annotated[str, sections.SAFETENSORS_CONSTRAINT] = "model.safetensors"
    """A file, relative to the run's folder; the only key that may write outside of that folder."""

    only: Literal["trainable"] | None = None
    """`trainable` leaves out buffers and frozen parameters; null saves everything."""


STAGES: dict[str, type[Stage]] = {
    stage.name: stage
    for stage in (TrainStage, ForwardStage, AverageStage, BroadcastStage, EvaluateStage, SaveStage)
}


def parse_stage(value: Any) -> Stage:
    named = {value: None} if isinstance(value, str) else value
    if not isinstance(named, dict) or not named:
        raise expected("a stage", allowed_values(STAGES))
    if len(named) > 1:
        first, *others = named
        hint = f'indent {", ".join(others)} further, under "{first}"'
        if not STAGES.keys().isdisjoint(others):  # `evaluate` is a stage, and a key of others
            hint += ", or write each stage as a list item of its own"
        text = f'expected one stage, got "{first}" and "{others[0]}"'
        raise problem(text, hint, at=others[0], on_key=True)
    ((name, settings),) = named.items()
    at = () if isinstance(value, str) else (name,)
    if name not in STAGES:
        raise unknown_name_error("stage", name, STAGES, at=at, on_key=True)
    return validate(STAGES[name], {} if settings is None else settings, *at, owner=name)


def _number_stages(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    for index, stage in enumerate(stages):
        stage._index = index
    return stages


Stages = Annotated[
    tuple[Annotated[Stage, CustomValidator(parse_stage, "stage")], ...],
    Field(strict=False, min_length=1),
    AfterValidator(_number_stages),
]
