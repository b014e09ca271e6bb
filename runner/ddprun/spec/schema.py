"""What a pipeline file may say: one model for each part, a docstring with the unit under each key."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PrivateAttr,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, ValidationError, core_schema

from ddprun.spec.choices import Choice, OneOf, choose
from ddprun.spec.faults import listing
from ddprun.spec.options import NonNegativeInt, Options, PositiveInt
from ddprun.spec.problems import mismatch, problem, unknown, validate, within
from ddprun_hooks import grammar

PositiveFloat = Annotated[float, Field(gt=0)]


def _check_stack(hooks: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Refuse stacks that make no sense, each hook that is out of place with its reason."""
    found = grammar.problems([grammar.entry(hook.name, hook.options) for hook in hooks])
    details = [
        InitErrorDetails(type=problem(wrong.text), loc=wrong.path, input=None)
        for wrong in found
        if wrong.severity == "error"
    ]
    if details:
        raise ValidationError.from_exception_data("hooks", details)
    return hooks


ModelChoice = Annotated[Choice, OneOf("model")]
LossChoice = Annotated[Choice, OneOf("loss")]
OptimizerChoice = Annotated[Choice, OneOf("optimizer")]
ScheduleChoice = Annotated[Choice, OneOf("schedule")]
SyncChoice = Annotated[Choice, OneOf("sync")]
HookStack = Annotated[
    tuple[Annotated[Choice, OneOf("hook")], ...], Field(strict=False), AfterValidator(_check_stack)
]
Metrics = Annotated[tuple[Annotated[Choice, OneOf("metric")], ...], Field(strict=False)]


@dataclass(frozen=True)
class _Validated:
    """Marks a type that a function of ours reads; JSON Schema knows it as one of the definitions."""

    read: Callable[[Any], Any]
    definition: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"definition": self.definition}


def _whole(value: Any) -> Choice:
    """Data that is used whole: nothing of it is held out, and asking for that is a fault."""
    choice = choose("data", value)
    if choice.settings is None or "held_out" not in choice.options or isinstance(value, Choice):
        return choice
    given = value[choice.name] if isinstance(value, dict) else None
    nothing = 0 if choice.name == "synthetic" else None
    if given and given.get("held_out"):
        text = "held_out has no effect where train and evaluate are given apart: each is used whole"
        raise within(problem(text, "remove it", where="key"), choice.name, "held_out")
    settings = choice.settings.model_copy(update={"held_out": nothing})
    return Choice("data", choice.name, {**choice.options, "held_out": nothing}, "built-in", settings)


WholeData = Annotated[Choice, _Validated(_whole, "data")]


class DataPair(Options):
    """Training and evaluation data given apart; each is used whole."""

    train: WholeData
    """What train stages read."""

    evaluate: WholeData | None = None
    """What evaluate stages read."""


def _read_data(value: Any) -> Choice | DataPair:
    if isinstance(value, DataPair):
        return value
    if isinstance(value, dict) and ("train" in value or "evaluate" in value):
        return validate(DataPair, value)
    return choose("data", value)


class Loader(Options):
    """How samples reach a rank."""

    batch_size: PositiveInt = 64
    """Samples per rank and micro-step."""

    shuffle: bool = True
    """A new order in each epoch, the same on all ranks and for the same seed."""

    workers: NonNegativeInt = 0
    """Processes per rank that load samples; 0 loads in the training process."""

    drop_last: bool = False
    """Drop the last, smaller batch of an epoch."""


class Ddp(Options):
    """What DistributedDataParallel is built with."""

    bucket_cap_mb: Annotated[float, Field(ge=1)] = 25.0
    """Largest size of a gradient bucket in MiB, at least 1: DDP's first bucket is 1 MiB and must not be the
    largest."""

    gradient_as_bucket_view: bool = True
    """Gradients are views into the buckets, which saves a copy of all gradients."""

    static_graph: bool = False
    """The same parameters take part in each step; DDP then prepares less."""

    find_unused_parameters: bool = False
    """Look in each step for parameters that take no part; needed where some take none, slower otherwise."""


class Launch(Options):
    """Where the ranks run. The launcher's environment and flags go before these."""

    nproc_per_node: PositiveInt | None = None
    """Ranks per host; null is one for each GPU, or two on a host without."""

    nnodes: PositiveInt = 1
    """Hosts."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is cuda where torch sees a GPU, else cpu."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto` is nccl where each rank of a host has a GPU of its own, else gloo."""

    timeout_s: PositiveFloat = 600.0
    """Seconds that a collective may take before the run fails."""


class Timings(Options):
    """What is recorded."""

    every: PositiveInt = 1
    """Record every n-th step."""

    fidelity_every: NonNegativeInt = 0
    """Compare each bucket of every n-th step with the exact mean gradient; 0 never does."""


@dataclass(frozen=True)
class TrainSettings:
    """What holds in one train stage: its own settings over those of the pipeline."""

    steps: int | None
    epochs: int | None
    hooks: tuple[Choice, ...]
    sync: Choice
    accumulate: int
    clip_norm: float | None
    schedule: Choice | None
    warmup_steps: int


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


class Train(Stage):
    """Train for a number of steps or epochs. Whatever else stands in it holds for this stage only."""

    name: ClassVar[str] = "train"

    steps: PositiveInt | None = None
    """Optimizer steps."""

    epochs: PositiveInt | None = None
    """Passes over the training data."""

    accumulate: PositiveInt = 1
    """As `accumulate` above."""

    sync: SyncChoice = Field("every_step", validate_default=True)
    """As `sync` above."""

    hooks: HookStack = ()
    """As `hooks` above."""

    schedule: ScheduleChoice | None = None
    """As `schedule` above."""

    warmup_steps: NonNegativeInt = 0
    """As `warmup_steps` above."""

    clip_norm: PositiveFloat | None = None
    """As `clip_norm` above."""

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Self:
        if self.steps is None and self.epochs is None:
            raise problem("a train stage needs a length", "write steps: N or epochs: N", where="key")
        if self.steps is not None and self.epochs is not None:
            text = "steps and epochs both say how long the stage is"
            raise within(problem(text, "keep one", where="key"), "epochs")
        return self

    def effective(self, pipeline: "Pipeline") -> TrainSettings:
        """What holds in this stage: a key that the stage does not name is taken from the pipeline."""

        def of(key: str) -> Any:
            return getattr(self if key in self.model_fields_set else pipeline, key)

        return TrainSettings(
            steps=self.steps,
            epochs=self.epochs,
            hooks=of("hooks"),
            sync=of("sync"),
            accumulate=of("accumulate"),
            clip_norm=of("clip_norm"),
            schedule=of("schedule"),
            warmup_steps=of("warmup_steps"),
        )


OVERRIDABLE = ("accumulate", "sync", "hooks", "schedule", "warmup_steps", "clip_norm")
"""Keys of the pipeline that a train stage may name for itself."""


class Evaluate(Stage):
    """Measure the loss, and the metrics named, on the held-out data."""

    name: ClassVar[str] = "evaluate"

    metrics: Metrics = ()
    """What to measure besides the loss."""


class Save(Stage):
    """Write the model's weights to the run's folder."""

    name: ClassVar[str] = "save"

    to: Annotated[str, Field(pattern=r"\.safetensors$")] = "model.safetensors"
    """File name, relative to the run's folder."""


STAGES: dict[str, type[Stage]] = {stage.name: stage for stage in (Train, Evaluate, Save)}


def _read_stage(value: Any) -> Stage:
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
    tuple[Annotated[Stage, _Validated(_read_stage, "stage")], ...],
    Field(strict=False, min_length=1),
    AfterValidator(_number),
]


class Pipeline(Options):
    """A whole pipeline file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "pipeline"
    """Name of the run's folder; the file's own name if left out."""

    seed: NonNegativeInt = 0
    """Seed of weights, shuffling and dropout."""

    model: ModelChoice
    """What is trained."""

    data: Annotated[Choice | DataPair, _Validated(_read_data, "data_or_pair")]
    """What it is trained on; a built-in brings its own held-out part."""

    loader: Loader = Loader()
    """How samples reach a rank."""

    loss: LossChoice = Field("cross_entropy", validate_default=True)
    """A torch loss, a dotted function of (output, target), or `model` if the model returns its own."""

    optimizer: OptimizerChoice
    """A torch optimizer, or a dotted name."""

    schedule: ScheduleChoice | None = None
    """A torch schedule, stepped once per optimizer step; a length that is left out is the stage's steps."""

    warmup_steps: NonNegativeInt = 0
    """Optimizer steps in which the learning rate rises to its full value."""

    clip_norm: PositiveFloat | None = None
    """Largest norm of all gradients together; null does not clip."""

    precision: Literal["fp32", "bf16", "fp16", "pure_bf16", "pure_fp16"] = "fp32"
    """bf16 and fp16 are autocast; with pure_ the model itself is half."""

    ddp: Ddp = Ddp()
    """What DistributedDataParallel is built with."""

    accumulate: PositiveInt = 1
    """Micro-steps per optimizer step; only the last one synchronises."""

    sync: SyncChoice = Field("every_step", validate_default=True)
    """When ranks synchronise."""

    hooks: HookStack = ()
    """How gradients travel, in the order in which they leave the rank; none is plain all-reduce."""

    stages: Stages = Field(default=[{"train": {"epochs": 1}}], validate_default=True)
    """What is done, in order."""

    launch: Launch = Launch()
    """Where the ranks run."""

    timings: Timings = Timings()
    """What is recorded."""

    def train_stages(self) -> list[Train]:
        """The stages that train, in order."""
        return [stage for stage in self.stages if isinstance(stage, Train)]

    def train_data(self) -> Choice:
        """What train stages read."""
        return self.data.train if isinstance(self.data, DataPair) else self.data
