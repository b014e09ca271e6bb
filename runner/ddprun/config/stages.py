"""The stages of a pipeline: what each takes, and what holds in one that takes steps."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from ddprun.config import patterns
from ddprun.config.buffers import Buffers, BuffersField
from ddprun.config.choices import Choice, OneOf
from ddprun.config.faults import listing
from ddprun.config.fields import (
    HookStack,
    Metrics,
    MutateChoice,
    ScheduleChoice,
    SyncChoice,
    UpdateChoice,
    Validated,
)
from ddprun.config.options import HierarchicalSgd, NonNegativeInt, Options, PositiveFloat, PositiveInt
from ddprun.config.problems import mismatch, problem, unknown, validate, within

if TYPE_CHECKING:
    from ddprun.config.schema import Pipeline


@dataclass(frozen=True)
class TrainSettings:
    """What holds in one train or forward stage: its own settings over those of the pipeline."""

    steps: int | None
    epochs: int | None
    hooks: tuple[Choice, ...]
    sync: Choice
    buffers: Buffers
    accumulate: int
    """1 in a forward stage."""

    optimizer: Choice
    clip_norm: float | None
    on_nan: Literal["continue", "stop"]
    schedule: Choice | None
    warmup_steps: int
    mutate: Choice | None
    update: Choice | None
    """None in a train stage, which updates by gradients, and in a forward stage that updates nothing."""

    gradients: Literal["all", "host"] | None
    """Among which ranks backward sums gradients: all, or those of a host; None if ranks exchange none."""


class Stage(Options):
    """Base of all stages."""

    name: ClassVar[str]
    _index: int = PrivateAttr(default=0)

    @property
    def index(self) -> int:
        """Place in `stages`, from 0."""
        return self._index

    @property
    def path(self) -> str:
        """Key path such as `stages[0].train`, for faults."""
        return f"stages[{self._index}].{self.name}"


class StepStage(Stage):
    """Base of the stages that take steps. What stands in one beside its length holds for it only."""

    name: ClassVar[str] = "step"

    steps: PositiveInt | None = None
    """Optimizer steps; in a forward stage, forward passes."""

    epochs: PositiveInt | None = None
    """Passes over the training data."""

    sync: SyncChoice = Field("every_step", validate_default=True)
    """As `sync` above."""

    hooks: HookStack = ()
    """As `hooks` above."""

    buffers: BuffersField = Field("auto", validate_default=True)
    """As `buffers` above."""

    optimizer: Annotated[Choice | None, OneOf("optimizer")] = None
    """Other settings of the optimizer above, whose state stays."""

    schedule: ScheduleChoice | None = None
    """As `schedule` above."""

    warmup_steps: NonNegativeInt = 0
    """As `warmup_steps` above."""

    clip_norm: PositiveFloat | None = None
    """As `clip_norm` above."""

    on_nan: Literal["continue", "stop"] = "stop"
    """As `on_nan` above."""

    mutate: MutateChoice | None = None
    """Change each rank's weights, at the stage's start and after each synchronisation but the last."""

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Self:
        if self.steps is None and self.epochs is None:
            text = f"a {self.name} stage needs a length"
            raise problem(text, "write steps: N or epochs: N", where="key")
        if self.steps is not None and self.epochs is not None:
            text = "steps and epochs both say how long the stage is"
            raise within(problem(text, "keep one", where="key"), "epochs")
        return self

    def effective(self, pipeline: "Pipeline") -> TrainSettings:
        """What holds in this stage: a key that the stage does not name is taken from the pipeline."""

        def of(key: str) -> Any:
            return getattr(self if key in self.model_fields_set else pipeline, key)

        trains = isinstance(self, Train)
        return TrainSettings(
            steps=self.steps,
            epochs=self.epochs,
            hooks=of("hooks"),
            sync=of("sync"),
            buffers=of("buffers"),
            accumulate=of("accumulate") if trains else 1,
            optimizer=of("optimizer"),
            clip_norm=of("clip_norm"),
            on_nan=of("on_nan"),
            schedule=of("schedule"),
            warmup_steps=of("warmup_steps"),
            mutate=self.mutate,
            update=self.update if isinstance(self, Forward) else None,
            gradients=_gradients(of("sync")) if trains else None,
        )


def _gradients(sync: Choice) -> Literal["all", "host"] | None:
    """Among which ranks a policy has backward sum gradients."""
    if sync.name == "every_step":
        return "all"
    return "host" if isinstance(sync.settings, HierarchicalSgd) and sync.settings.within == 1 else None


class Train(StepStage):
    """Train for a number of steps or epochs. Whatever else stands in it holds for this stage only."""

    name: ClassVar[str] = "train"
    elsewhere = MappingProxyType({"update": "write it in a forward stage"})

    accumulate: PositiveInt = 1
    """As `accumulate` above."""


class Forward(StepStage):
    """Forward passes only, for a number of steps or epochs; `update` trains without gradients."""

    name: ClassVar[str] = "forward"
    elsewhere = MappingProxyType({"accumulate": "remove it: without a backward pass nothing accumulates"})

    update: UpdateChoice | None = None
    """What changes the weights in each step; null changes nothing."""


OVERRIDABLE = (
    "accumulate",
    "sync",
    "hooks",
    "buffers",
    "optimizer",
    "schedule",
    "warmup_steps",
    "clip_norm",
    "on_nan",
)
"""Keys of the pipeline that a train stage may name for itself; a forward stage all but `accumulate`."""


class AverageStage(Stage):
    """The parameters of all ranks become their mean, once."""

    name: ClassVar[str] = "average"


class BroadcastStage(Stage):
    """The parameters of all ranks become those of one, once."""

    name: ClassVar[str] = "broadcast"

    source: NonNegativeInt = 0
    """The rank whose parameters all take."""


class Evaluate(Stage):
    """Measure the loss, and the metrics named, on the held-out data."""

    name: ClassVar[str] = "evaluate"

    metrics: Metrics = ()
    """What to measure besides the loss."""


class Save(Stage):
    """Write the model's weights to the run's folder."""

    name: ClassVar[str] = "save"

    to: Annotated[str, Field(pattern=patterns.SAVED)] = "model.safetensors"
    """A file, relative to the run's folder; the one way in which a pipeline may write outside of it."""


STAGES: dict[str, type[Stage]] = {
    stage.name: stage for stage in (Train, Forward, AverageStage, BroadcastStage, Evaluate, Save)
}


def read_stage(value: Any) -> Stage:
    if isinstance(value, Stage):
        return value
    if isinstance(value, str):
        if value not in STAGES:
            raise unknown("stage", value, STAGES)
        return validate(STAGES[value], {}, owner=value)
    if not isinstance(value, dict) or not value:
        raise mismatch("a stage", listing(STAGES))
    if len(value) > 1:
        first, second, *_ = value
        hint = "write each stage as a list item of its own"
        if first in STAGES and all(key in STAGES[first].model_fields for key in list(value)[1:]):
            hint = f'indent {", ".join(list(value)[1:])} further, under "{first}"'
        raise within(problem(f'expected one stage, got "{first}" and "{second}"', hint, where="key"), second)
    ((name, settings),) = value.items()
    if name not in STAGES:
        raise within(unknown("stage", name, STAGES, where="key"), name)
    return validate(STAGES[name], {} if settings is None else settings, name, owner=name)


def _number(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    for index, stage in enumerate(stages):
        stage._index = index
    return stages


Stages = Annotated[
    tuple[Annotated[Stage, Validated(read_stage, "stage")], ...],
    Field(strict=False, min_length=1),
    AfterValidator(_number),
]
