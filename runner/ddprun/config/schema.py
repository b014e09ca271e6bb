"""What a pipeline file may say: one model for each part, a docstring with the unit under each key."""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    create_model,
    model_validator,
)

from ddprun.config.choices import (
    CHOICE_KINDS,
    Choice,
    choice_validator,
    installed_options_model,
    parse_choice,
    parse_schedule,
)
from ddprun.config.errors import validate
from ddprun.config.faults import allowed_values, suggest
from ddprun.config.options import parse_batch_key
from ddprun.options import (
    CustomValidator,
    FractionFloat,
    NonNegativeInt,
    NoOptions,
    Options,
    PositiveFloat,
    PositiveInt,
    PositiveInts,
    combine,
    expected,
    pattern_constraint,
    problem,
    unknown_name,
)
from ddprun.plugins import CLUSTERS
from ddprun.sync.plan import BufferReduction, BufferSettings, GradientScope, StageFacts, SyncPlan, SyncPolicy

_HOST_RANGE = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")
_NAME_CONSTRAINT = pattern_constraint(
    r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", 'letters, digits, ".", "_" and "-" only, not "." first'
)
_SAFETENSORS_CONSTRAINT = pattern_constraint(
    r"^[^\x00-\x1f\x7f]*\.safetensors$",
    'a file name that ends in ".safetensors", without control characters',
)
_TIMES_ALLOWED = "allowed: auto, every_forward, before_evaluate, never, {every: N}"

ModelChoice = Annotated[Choice, choice_validator("model")]
LossChoice = Annotated[Choice, choice_validator("loss")]
OptimizerChoice = Annotated[Choice, choice_validator("optimizer")]


def _parse_stage_schedule(value: Any) -> Choice:
    """A schedule of one stage."""
    if isinstance(value, dict) and "over" in value:
        text = "the schedule of a stage is over that stage"
        raise problem(text, "write over: run beside the schedule at the top", at="over", on_key=True)
    return parse_choice("schedule", value)


ScheduleChoice = Annotated[
    Choice, CustomValidator(_parse_stage_schedule, "schedule", CHOICE_KINDS["schedule"].allowed_names)
]
AnySchedule = Annotated[
    Choice, CustomValidator(parse_schedule, "any_schedule", CHOICE_KINDS["schedule"].allowed_names)
]
SyncChoice = Annotated[Choice, choice_validator("sync")]
MutateChoice = Annotated[Choice, choice_validator("mutate")]
UpdateChoice = Annotated[Choice, choice_validator("update")]
HookStack = Annotated[tuple[Annotated[Choice, choice_validator("hook")], ...], Field(strict=False)]
Metrics = Annotated[tuple[Annotated[Choice, choice_validator("metric")], ...], Field(strict=False)]
Trackers = Annotated[tuple[Annotated[Choice, choice_validator("tracker")], ...], Field(strict=False)]


def _parse_whole_data(value: Any) -> Choice:
    """Data that is used whole: nothing of it is held out, and asking for that is a fault."""
    choice = parse_choice("data", value)
    if choice.settings is None or "held_out" not in choice.options or isinstance(value, Choice):
        return choice
    given = value[choice.name] if isinstance(value, dict) else None
    nothing = 0 if choice.name == "synthetic" else None
    if given and given.get("held_out"):
        text = "held_out has no effect where train and evaluate are given separately: each is used whole"
        raise problem(text, "remove it", at=(choice.name, "held_out"), on_key=True)
    settings = choice.settings.model_copy(update={"held_out": nothing})
    return Choice("data", choice.name, {**choice.options, "held_out": nothing}, "built-in", settings)


WholeData = Annotated[Choice, CustomValidator(_parse_whole_data, "data")]


class DataPair(Options):
    """Training and evaluation data given separately; each is used whole."""

    train: WholeData
    """What train stages read."""

    evaluate: WholeData | None = None
    """What evaluate stages read."""


def _parse_data(value: Any) -> Choice | DataPair:
    if isinstance(value, dict) and ("train" in value or "evaluate" in value):
        return validate(DataPair, value)
    return parse_choice("data", value)


Patterns = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]
"""Names with `*`, `?` and `[…]`, as a shell's; `*` matches dots, too."""


class Init(Options):
    """The weights with which the model starts."""

    file: Annotated[str, _SAFETENSORS_CONSTRAINT]
    """A file of safetensors, relative to the pipeline's folder."""

    missing: Patterns = ()
    """Weights that the file may lack, or hold in another shape: they stay as the model makes them."""

    unexpected: Patterns = ()
    """Weights that the file may hold and the model has not."""


def _parse_init(value: Any) -> Init:
    if not isinstance(value, str | dict):
        raise expected("a file, or {file: …, missing: […], unexpected: […]}")
    return validate(Init, {"file": value} if isinstance(value, str) else value)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with options of their own."""

    match: tuple[str, ...]
    """Patterns of their names."""

    options: dict[str, Any]
    """The optimizer's, as far as they are other ones than those of all parameters."""

    def to_plain_data(self) -> dict[str, Any]:
        """As a file would hold it."""
        return {"match": list(self.match), **self.options}


class _Match(Options):
    match: Annotated[Patterns, Field(min_length=1)]


def _parse_parameter_group(value: Any) -> ParameterGroup:
    if not isinstance(value, dict) or "match" not in value:
        raise expected("a group of parameters", "write {match: pattern, option: value}")
    match = [value["match"]] if isinstance(value["match"], str) else value["match"]
    options = {key: option for key, option in value.items() if key != "match"}
    if not options:
        raise problem(
            "a group needs options of its own", "write {match: pattern, weight_decay: 0}", at="match"
        )
    return ParameterGroup(validate(_Match, {"match": match}).match, options)


ParameterGroups = Annotated[
    tuple[Annotated[ParameterGroup, CustomValidator(_parse_parameter_group, "group")], ...],
    Field(strict=False),
]


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

    sharded: bool = False
    """The data set gives each rank samples of its own, and is taken as it is."""

    collate: Annotated[Choice, choice_validator("collate")] | None = None
    """Makes a batch of a list of samples; null is torch's `default_collate`."""

    sampler: Annotated[Choice, choice_validator("sampler")] | None = None
    """Gives the indices of an epoch, of all ranks together, in place of `shuffle`."""

    @model_validator(mode="before")
    @classmethod
    def _sampler_shuffles(cls, value: Any) -> Any:
        """A sampler decides the order, so that `shuffle` is false where the file does not say it."""
        named = isinstance(value, dict) and value.get("sampler") is not None
        return {"shuffle": False, **value} if named else value


def _parse_batch_parts(value: Any) -> Any:
    """Read a key, a list of keys, or a mapping of keys by the argument that each becomes."""
    if isinstance(value, dict):
        if wrong := next((name for name in value if not name.isidentifier()), None):
            raise problem(
                f'"{wrong}" is no name of an argument', "write argument: key", at=wrong, on_key=True
            )
        return {name: _parse_batch_part(key, name) for name, key in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_parse_batch_part(key, index) for index, key in enumerate(value))
    return parse_batch_key(value)


def _parse_batch_part(value: Any, at: str | int) -> Any:
    try:
        return parse_batch_key(value)
    except ValidationError as error:
        raise combine([error], at=(at,)) from None


BatchParts = Annotated[Any, CustomValidator(_parse_batch_parts, "parts")]


class Batch(Options):
    """Which parts of a batch the model and the loss get."""

    inputs: BatchParts | None = None
    """The model's arguments: a key, a list of keys, or a mapping of keys by argument; null takes pairs
    (input, target)."""

    target: BatchParts | None = None
    """What the loss compares the output with: a key, or a list or mapping of keys."""


_BLOCKS_HINT = "write auto, a pattern of names, a class, or a list of these"


def _parse_compile_blocks(value: Any) -> tuple[str, ...] | Literal["auto"] | None:
    if value is None:
        return None
    if value == "auto":
        return "auto"
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise expected("blocks to compile", _BLOCKS_HINT)
    for index, name in enumerate(names):
        if not isinstance(name, str) or not name:
            text = f"expected a pattern of names or a class, got {name!r:.40}"
            raise problem(text, _BLOCKS_HINT, at=(index,) if names is value else ())
    return tuple(names)


class Compile(Options):
    """`torch.compile` of the model, before DDP wraps it."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """What torch optimises for; `reduce-overhead` and `max-autotune` use CUDA graphs on a GPU."""

    blocks: Annotated[
        tuple[str, ...] | Literal["auto"] | None, CustomValidator(_parse_compile_blocks, "blocks")
    ] = None
    """The modules that are compiled, by patterns of their names or by their class; `auto` finds those that
    repeat. null compiles the whole model."""

    dynamic: bool = False
    """One kernel for all sizes of batches; false compiles once more for each size."""

    fullgraph: bool = False
    """What cannot be compiled is an error, not run as it is."""


def _parse_compile(value: Any) -> Compile | None:
    if value is None or isinstance(value, bool):
        return Compile() if value else None
    if not isinstance(value, dict):
        raise expected("whether to compile the model", "write true, false, or {mode: …, blocks: …}")
    return validate(Compile, value)


_BucketCap = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
_DEFERRED = ConfigDict(defer_build=True)
_ONE_BUCKET_CAP = TypeAdapter(_BucketCap, config=_DEFERRED)
_BUCKET_CAPS = TypeAdapter(Annotated[tuple[_BucketCap, ...], Field(min_length=1)], config=_DEFERRED)


def _parse_bucket_cap(value: Any) -> float | tuple[float, ...]:
    if isinstance(value, list | tuple):
        return _BUCKET_CAPS.validate_python(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise expected("a number or a list of numbers")
    return _ONE_BUCKET_CAP.validate_python(value)


class Ddp(Options):
    """What DistributedDataParallel is built with."""

    bucket_cap_mb: Annotated[float | tuple[float, ...], CustomValidator(_parse_bucket_cap, "bucket_cap")] = (
        25.0
    )
    """Size in MiB at which a bucket is full. A list has one size for each bucket, in the order in which
    backward fills them; the last counts for all that follow."""

    gradient_as_bucket_view: bool = True
    """Gradients are views into the buckets, which saves a copy of all gradients."""

    static_graph: bool = False
    """The same parameters take part in each step; DDP then prepares less."""

    find_unused_parameters: bool = False
    """Look in each step for parameters that take no part; needed where some take none, slower otherwise."""

    @property
    def bucket_caps_bytes(self) -> list[int]:
        """The size at which each gradient bucket is full; the last counts for all that follow."""
        caps = self.bucket_cap_mb if isinstance(self.bucket_cap_mb, tuple) else (self.bucket_cap_mb,)
        return [int(cap * 2**20) for cap in caps]

    @property
    def largest_cap_bytes(self) -> int:
        """The largest of these sizes, for what has no order of gradients: parameters and buffers."""
        return max(self.bucket_caps_bytes)


def _in_order(steps: tuple[int, ...]) -> tuple[int, ...]:
    if steps[0] > steps[1]:
        raise problem("the last step is before the first", "expected [first, last]")
    return steps


StepRange = Annotated[PositiveInts, Field(min_length=2, max_length=2), AfterValidator(_in_order)]


class Timings(Options):
    """What is recorded."""

    every: PositiveInt = 1
    """Record every n-th step."""

    fidelity_every: NonNegativeInt = 0
    """Compare each bucket of every n-th step with the exact mean gradient; 0 never does."""

    grad_norm_every: NonNegativeInt = 10
    """Measure the norm of all gradients in every n-th step; 0 never does. `clip_norm` knows it in each."""

    gradients: bool = False
    """Record when each parameter's gradient was complete, and which one completed its bucket."""

    profile: StepRange | None = None
    """`[first, last]`: the steps that torch's profiler records, on all ranks; null does not use it."""

    straggler_window: Annotated[int, Field(ge=2, le=10_000)] = 20
    """Steps in which ranks synchronise, over which is judged whether one is late."""

    straggler_over: Annotated[float, Field(gt=0, lt=100)] = 0.1
    """A rank is late if the others wait for it for more than this share of a step."""


class Audit(Options):
    """Whether parameters are compared between ranks."""

    every: NonNegativeInt = 0
    """Compare at every n-th step, and end the run on drift that `sync` does not allow; 0 never does."""


class Checkpoint(Options):
    """When the whole state of a run is kept, so that `ddprun resume` can continue from it. One is also
    taken at the run's end and when it is interrupted.
    """

    every: NonNegativeInt = 500
    """Steps of the run from one checkpoint to the next; 0 takes none before the end."""

    keep: NonNegativeInt = 3
    """How many are kept, the newest; 0 takes none at all."""


def _parse_nnodes(value: Any) -> int | str:
    """A number of hosts, or the smallest and the largest."""
    if isinstance(value, str) and (found := _HOST_RANGE.fullmatch(value)):
        least, most = map(int, found.groups())
        if 1 <= least <= most:
            return value
        raise problem(f'"{value}" is not a range of hosts', "MIN is at least 1, and MAX at least MIN")
    if isinstance(value, bool) or not isinstance(value, int):
        raise expected("a number of hosts or a range", 'write 2, or "1:2"')
    if value < 1:
        raise problem(f"must be greater than 0, got {value}")
    return value


class Launch(Options):
    """Where the ranks run. The launcher's environment and flags go before these."""

    nproc_per_node: PositiveInt | None = None
    """Ranks per host; null is one for each GPU, or two on a host without."""

    nnodes: Annotated[int | str, CustomValidator(_parse_nnodes, "nnodes")] = 1
    """Hosts: a number, or "MIN:MAX" for a run that continues when hosts leave or join."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is cuda where torch sees a GPU, else cpu."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto` is nccl where each rank of a host has a GPU of its own, else gloo."""

    timeout_s: PositiveFloat = 600.0
    """Seconds that a collective may take before the run fails."""

    max_restarts: NonNegativeInt = 0
    """How often the ranks are restarted after a failure, from the newest checkpoint."""

    @property
    def host_range(self) -> tuple[int, int]:
        """The smallest and the largest number of hosts."""
        if isinstance(self.nnodes, int):
            return self.nnodes, self.nnodes
        least, _, most = self.nnodes.partition(":")
        return int(least), int(most)


class BufferReductionOptions(Options):
    """How buffers are made equal, for a time that goes by a name."""

    reduce: BufferReduction = "broadcast"
    """`broadcast`: all ranks take those of rank 0. `mean`: all ranks take their mean."""


class BufferPeriod(Options):
    """Buffers are made equal after every n-th step."""

    every: PositiveInt
    """Steps from one time to the next."""

    reduce: BufferReduction = "broadcast"
    """`broadcast`: all ranks take those of rank 0. `mean`: all ranks take their mean."""


BUFFER_TIMES: dict[str, type[NoOptions] | type[BufferReductionOptions]] = {
    "auto": BufferReductionOptions,
    "every_forward": BufferReductionOptions,
    "before_evaluate": BufferReductionOptions,
    "never": NoOptions,
}
"""Times that go by a name, and what each takes. `{every: N, reduce: …}` is the other form."""


def parse_buffers(value: Any) -> BufferSettings:
    """Read a time's name, `{name: {reduce: …}}` or `{every: N, reduce: …}`."""
    name: Any = value
    options: Any = None
    make_error: Callable[..., ValidationError] = problem
    if not isinstance(value, str):
        if not isinstance(value, dict) or not value:
            raise expected("a time for buffers", _TIMES_ALLOWED)
        times = [key for key in value if key in BUFFER_TIMES or key == "every"]
        if len(times) > 1:
            text = f'expected one time for buffers, got "{times[0]}" and "{times[1]}"'
            raise problem(text, "keep one", at=times[1], on_key=True)
        if times == ["every"]:
            period = validate(BufferPeriod, value)
            return BufferSettings("every", period.every, period.reduce)
        if len(value) > 1 and times:
            stray = next(key for key in value if key not in BUFFER_TIMES)
            hint = f'indent reduce further, under "{times[0]}"' if stray == "reduce" else _TIMES_ALLOWED
            raise problem(f'"{stray}" is not allowed next to "{times[0]}"', hint, at=stray, on_key=True)
        name, options = next(iter(value.items()))
        make_error = functools.partial(problem, at=name, on_key=True)
    if name in ("every", "reduce"):
        hints = {"every": "{every: N}", "reduce": "{auto: {reduce: mean}} or {every: N, reduce: mean}"}
        raise make_error(f'"{name}" alone does not say when buffers are sent', f"write {hints[name]}")
    if name not in BUFFER_TIMES:
        near = suggest(name, [*BUFFER_TIMES, "every"])
        raise make_error(f'unknown time "{name}" for buffers', _TIMES_ALLOWED, near)
    settings = validate(BUFFER_TIMES[name], {} if options is None else options, name, owner=name)
    reduction = settings.reduce if isinstance(settings, BufferReductionOptions) else "broadcast"
    return BufferSettings(name, None, reduction)


BuffersField = Annotated[BufferSettings, CustomValidator(parse_buffers, "buffers")]


@dataclass(frozen=True)
class StepStageSettings:
    """The settings of one train or forward stage: its own, and the pipeline's for what it does not name."""

    steps: int | None
    epochs: int | None
    hooks: tuple[Choice, ...]
    sync: Choice
    buffers: BufferSettings
    accumulate: int
    """1 in a forward stage."""

    optimizer: Choice
    clip_norm: float | None
    clip_value: float | None
    on_nan: Literal["continue", "stop"]
    schedule: Choice | None
    warmup_steps: int
    mutate: Choice | None
    data: Choice | None
    """None: what the pipeline's `data` gives for training."""

    update: Choice | None
    """None in a train stage, which updates by gradients, and in a forward stage that updates nothing."""

    has_backward: bool
    """The stage has backward passes."""

    @cached_property
    def plan(self) -> SyncPlan:
        """What ranks exchange."""
        changes_weights = self.has_backward or self.update is not None or self.mutate is not None
        policy = self.sync.settings
        assert isinstance(policy, SyncPolicy)
        return policy.plan(StageFacts(self.has_backward, changes_weights))

    @property
    def updates_weights(self) -> bool:
        """The stage's steps update the weights, by gradients or by its `update`."""
        return self.has_backward or self.update is not None

    @property
    def hook_specs(self) -> list[Any]:
        """The hooks as a file would have them."""
        return [hook.to_plain_data() for hook in self.hooks]

    @property
    def uses_noop(self) -> bool:
        """The `noop` hook gives each rank its own back, so ranks drift apart."""
        return any(hook.name == "noop" for hook in self.hooks)

    @property
    def gradient_averaging(self) -> GradientScope:
        """Among which ranks backward averages gradients."""
        return self.plan.gradients


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


class StageEvaluation(Options):
    """The held-out data is measured while a stage takes its steps, which changes no bit of training."""

    every: PositiveInt
    """Steps of the stage from one evaluation to the next; the last comes at the stage's end."""

    metrics: Metrics = ()
    """What to measure besides the loss."""


class MonitoredMetric(Options):
    """A metric by which evaluations are compared."""

    metric: str
    """`loss`, or one of the metrics of the stage's `evaluate`."""

    mode: Literal["min", "max"] | None = None
    """Which values are better; null is min for loss and perplexity, else max."""

    def improves(self, value: float, best: float | None, by: float = 0.0) -> bool:
        """Whether a value is better than the best so far (None: there is none), by more than this."""
        if not math.isfinite(value) or best is None:
            return math.isfinite(value)
        mode = self.mode or ("min" if self.metric in ("loss", "perplexity") else "max")
        return value < best - by if mode == "min" else value > best + by


class KeepBest(MonitoredMetric):
    """The weights of the best evaluation stay in the run's folder, as `best.safetensors`."""


class EarlyStop(MonitoredMetric):
    """The stage ends when evaluations get no better."""

    patience: PositiveInt
    """So many evaluations in a row without improvement end the stage."""

    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """A value that is better by no more than this is no improvement."""


BEST_FILE = "best.safetensors"
"""Where `keep_best` writes, in the run's folder."""

_RESERVED_METRIC_NAMES = frozenset(
    ("event", "level", "time", "monotonic_us", "rank", "stage", "step", "loss", "self", "method_name")
)  # what the event `evaluated` has besides metrics, and the names of structlog's own arguments


def metric_names(metrics: Sequence[Choice]) -> list[str]:
    """What metrics are called: by the last part of a dotted name; by all of it where the last part is taken
    by another metric or by a field of the event.
    """
    last = [choice.name.rpartition(".")[2] for choice in metrics]
    often = Counter(last)
    return [
        choice.name if short in _RESERVED_METRIC_NAMES or often[short] > 1 else short
        for choice, short in zip(metrics, last, strict=True)
    ]


class StepStage(Stage):
    """Base of the stages that take steps. Their keys apply to this stage only."""

    name: ClassVar[str] = "step"

    steps: PositiveInt | None = None
    """Optimizer steps; in a forward stage, forward passes."""

    epochs: PositiveInt | None = None
    """Passes over the training data."""

    data: WholeData | None = None
    """What this stage reads, used whole; null is what `data` above gives for training."""

    sync: SyncChoice = Field("every_step", validate_default=True)
    """As `sync` above."""

    hooks: HookStack = ()
    """As `hooks` above."""

    buffers: BuffersField = Field("auto", validate_default=True)
    """As `buffers` above."""

    optimizer: Annotated[Choice | None, choice_validator("optimizer")] = None
    """Other settings of the optimizer above, whose state stays."""

    schedule: ScheduleChoice | None = None
    """As `schedule` above."""

    warmup_steps: NonNegativeInt = 0
    """As `warmup_steps` above."""

    clip_norm: PositiveFloat | None = None
    """As `clip_norm` above."""

    clip_value: PositiveFloat | None = None
    """As `clip_value` above."""

    on_nan: Literal["continue", "stop"] = "stop"
    """As `on_nan` above."""

    mutate: MutateChoice | None = None
    """Change each rank's weights, at the stage's start and after each synchronisation but the last."""

    evaluate: StageEvaluation | None = None
    """Measure the held-out data after every n-th step."""

    keep_best: KeepBest | None = None
    """Keep the weights of the best evaluation."""

    stop: EarlyStop | None = None
    """End the stage when evaluations get no better."""

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Self:
        if self.steps is None and self.epochs is None:
            text = f"a {self.name} stage needs a length"
            raise problem(text, "write steps: N or epochs: N", on_key=True)
        if self.steps is not None and self.epochs is not None:
            text = "steps and epochs both say how long the stage is"
            raise problem(text, "keep one", at="epochs", on_key=True)
        return self

    def effective_settings(self, pipeline: "Pipeline") -> StepStageSettings:
        """The settings of this stage; those that it does not name are the pipeline's."""
        trains = isinstance(self, TrainStage)
        settings: dict[str, Any] = {
            key: getattr(self if key in self.model_fields_set else pipeline, key) for key in OVERRIDABLE_KEYS
        }
        if not trains:
            settings["accumulate"] = 1
        return StepStageSettings(
            steps=self.steps,
            epochs=self.epochs,
            mutate=self.mutate,
            data=self.data,
            update=self.update if isinstance(self, ForwardStage) else None,
            has_backward=trains,
            **settings,
        )

    def key_path(self, key: str) -> str:
        """Where a setting of this stage stands in the file: in the stage, or above."""
        return f"{self.path}.{key}" if key in self.model_fields_set else key


class TrainStage(StepStage):
    """Train for a number of steps or epochs. The other keys apply to this stage only."""

    name: ClassVar[str] = "train"
    misplaced_key_hints = MappingProxyType({"update": "write it in a forward stage"})

    accumulate: PositiveInt = 1
    """As `accumulate` above."""


class ForwardStage(StepStage):
    """Forward passes only, for a number of steps or epochs; `update` trains without gradients."""

    name: ClassVar[str] = "forward"
    misplaced_key_hints = MappingProxyType(
        {"accumulate": "remove it: without a backward pass nothing accumulates"}
    )

    update: UpdateChoice | None = None
    """What changes the weights in each step; null changes nothing."""


OVERRIDABLE_KEYS = (
    *("accumulate", "sync", "hooks", "buffers", "optimizer", "schedule", "warmup_steps", "clip_norm"),
    *("clip_value", "on_nan"),
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


class EvaluateStage(Stage):
    """Measure the loss, and the metrics named, on the held-out data."""

    name: ClassVar[str] = "evaluate"

    data: WholeData | None = None
    """What to measure on, used whole; null is what `data` above holds out."""

    metrics: Metrics = ()
    """What to measure besides the loss."""


class SaveStage(Stage):
    """Write the model's weights to the run's folder."""

    name: ClassVar[str] = "save"

    to: Annotated[str, _SAFETENSORS_CONSTRAINT] = "model.safetensors"
    """A file, relative to the run's folder; the one way in which a pipeline may write outside of it."""

    only: Literal["trainable"] | None = None
    """`trainable` leaves out buffers and the parameters that are frozen; null saves all."""


STAGES: dict[str, type[Stage]] = {
    stage.name: stage
    for stage in (TrainStage, ForwardStage, AverageStage, BroadcastStage, EvaluateStage, SaveStage)
}


def parse_stage(value: Any) -> Stage:
    if isinstance(value, str):
        if value not in STAGES:
            raise unknown_name("stage", value, STAGES)
        return validate(STAGES[value], {}, owner=value)
    if not isinstance(value, dict) or not value:
        raise expected("a stage", allowed_values(STAGES))
    if len(value) > 1:
        first, second, *_ = value
        hint = "write each stage as a list item of its own"
        keys = STAGES[first].model_fields if first in STAGES else {}
        others = list(value.items())[1:]
        # `evaluate` is a stage, and with a period a key of others.
        if all(
            key in keys and (key not in STAGES or (isinstance(item, dict) and "every" in item))
            for key, item in others
        ):
            hint = f'indent {", ".join(key for key, _ in others)} further, under "{first}"'
        raise problem(f'expected one stage, got "{first}" and "{second}"', hint, at=second, on_key=True)
    ((name, settings),) = value.items()
    if name not in STAGES:
        raise unknown_name("stage", name, STAGES, at=name, on_key=True)
    return validate(STAGES[name], {} if settings is None else settings, name, owner=name)


def _number_stages(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    for index, stage in enumerate(stages):
        stage._index = index
    return stages


Stages = Annotated[
    tuple[Annotated[Stage, CustomValidator(parse_stage, "stage")], ...],
    Field(strict=False, min_length=1),
    AfterValidator(_number_stages),
]


class Pipeline(Options):
    """A whole pipeline file."""

    misplaced_key_hints = MappingProxyType(
        {
            "mutate": "write it in a train or forward stage",
            "update": "write it in a forward stage",
            "steps": "write it in a stage",
            "epochs": "write it in a stage",
        }
    )

    name: Annotated[str, Field(max_length=200), _NAME_CONSTRAINT] = "pipeline"
    """Name of the run's folder; the file's own name if left out."""

    seed: NonNegativeInt = 0
    """Seed of weights, shuffling and dropout."""

    model: ModelChoice
    """What is trained."""

    init: Annotated[Init, CustomValidator(_parse_init, "init")] | None = None
    """A file of weights with which the model starts; null is as the model makes them."""

    freeze: Patterns = ()
    """Parameters that are not trained, by patterns of their names."""

    data: Annotated[
        Choice | DataPair, CustomValidator(_parse_data, "data_or_pair", CHOICE_KINDS["data"].allowed_names)
    ]
    """What it is trained on; a built-in brings its own held-out part."""

    loader: Loader = Field({}, validate_default=True)
    """How samples reach a rank."""

    batch: Batch = Field({}, validate_default=True)
    """Which parts of a batch the model and the loss get."""

    weight_by: Annotated[Choice, choice_validator("weight")] | None = None
    """What a batch's mean loss counts in means over batches, micro-steps and ranks; null is samples, and in
    evaluate stages the targets of a cross-entropy."""

    loss: LossChoice = Field("cross_entropy", validate_default=True)
    """A torch loss, a dotted function of (output, target), or `model` if the model returns its own."""

    optimizer: OptimizerChoice
    """A torch optimizer, or a dotted name."""

    groups: ParameterGroups = ()
    """Parameters, by patterns of their names, with options of the optimizer of their own; the first that
    matches counts."""

    schedule: AnySchedule | None = None
    """A torch schedule, stepped once per optimizer step; a length that is left out is the stage's steps. With
    `over: run` beside it, one schedule and one warm-up span all stages."""

    warmup_steps: NonNegativeInt = 0
    """Optimizer steps in which the learning rate rises to its full value."""

    clip_norm: PositiveFloat | None = None
    """Largest norm of all gradients together; null does not clip."""

    clip_value: PositiveFloat | None = None
    """Largest absolute value of a gradient, clipped before the norm is; null does not clip."""

    ema: FractionFloat | None = None
    """Decay of an exponential moving average of the weights, which is evaluated and saved; null has none."""

    on_nan: Literal["continue", "stop"] = "stop"
    """What happens when weights are no longer finite: the run fails, or continues."""

    precision: Literal["fp32", "bf16", "fp16", "pure_bf16", "pure_fp16"] = "fp32"
    """bf16 and fp16 are autocast; with pure_ the model itself is half."""

    deterministic: bool = False
    """Use only algorithms that repeat bit for bit; an operation that has none is an error."""

    compile: Annotated[Compile, CustomValidator(_parse_compile, "compile")] | None = None
    """Compile the model with `torch.compile`: true, or how; null and false run it as it is."""

    ddp: Ddp = Field({}, validate_default=True)
    """What DistributedDataParallel is built with."""

    accumulate: PositiveInt = 1
    """Micro-steps per optimizer step; only the last one synchronises."""

    sync: SyncChoice = Field("every_step", validate_default=True)
    """When ranks synchronise."""

    hooks: HookStack = ()
    """How gradients and changes of parameters travel, in the order in which they leave the rank; none is
    plain all-reduce."""

    buffers: BuffersField = Field("auto", validate_default=True)
    """When ranks make their buffers equal, such as BatchNorm's running statistics, and how."""

    stages: Stages = Field(default=[{"train": {"epochs": 1}}], validate_default=True)
    """What is done, in order."""

    launch: Launch = Field({}, validate_default=True)
    """Where the ranks run."""

    checkpoint: Checkpoint = Field({}, validate_default=True)
    """When the whole state of the run is kept."""

    timings: Timings = Field({}, validate_default=True)
    """What is recorded."""

    audit: Audit = Field({}, validate_default=True)
    """Whether parameters are compared between ranks."""

    track: Trackers = ()
    """Where else curves and metrics go, from rank 0; `ddprun catalog tracker` lists them."""

    def train_stages(self) -> list[TrainStage]:
        """The stages that train, in order."""
        return [stage for stage in self.stages if isinstance(stage, TrainStage)]

    def step_stages(self) -> list[TrainStage | ForwardStage]:
        """The stages that take steps, in order."""
        return [stage for stage in self.stages if isinstance(stage, (TrainStage, ForwardStage))]

    def averages_after(self, stage: Stage) -> bool:
        """Whether parameters are averaged at the end of a stage that lets ranks differ.

        They are not if the next stage makes them equal itself, or lets ranks differ as well.
        """
        following = next(iter(self.stages[stage.index + 1 :]), None)
        if isinstance(following, StepStage):
            return not following.effective_settings(self).plan.keeps_apart
        return not isinstance(following, AverageStage | BroadcastStage)

    def train_data(self) -> Choice:
        """What train stages read."""
        return self.data.train if isinstance(self.data, DataPair) else self.data


def pipeline_class(keys: Iterable[str] = ()) -> type[Pipeline]:
    """`Pipeline` with a key for each cluster backend, by its name: for the installed ones only if one of the
    file's `keys` may be one of theirs.

    A backend is imported only if its key is in the file. Without the key, the field is None.
    """
    return _with_clusters(not {*Pipeline.model_fields, *CLUSTERS.built_in()}.issuperset(keys))


@functools.cache
def _with_clusters(installed: bool) -> type[Pipeline]:
    fields: dict[str, Any] = {}
    for name in CLUSTERS.built_in():
        section = functools.partial(CLUSTERS.options_model, name)
        parse = CustomValidator(functools.partial(_parse_built_in_cluster, name), {}, section=section)
        fields[name] = (Annotated[Any, parse], None)
    for name in CLUSTERS.installed() if installed else ():
        if name.isidentifier():
            parse = CustomValidator(functools.partial(_parse_installed_cluster, name), {})
            fields[name] = (Annotated[Any, parse], Field(default=None, exclude=True))
    return create_model("Pipeline", __base__=Pipeline, __module__=__name__, **fields)


def _parse_built_in_cluster(name: str, value: Any) -> BaseModel:
    return validate(CLUSTERS.options_model(name), value)


def _parse_installed_cluster(name: str, value: Any) -> BaseModel:
    model = installed_options_model(CLUSTERS, name, functools.partial(problem, on_key=True))
    return validate(model, value)
