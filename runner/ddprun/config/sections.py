"""The sections of a pipeline file: one model for each, a docstring with the unit under each key."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, model_validator

from ddprun.config.built_in_options import BatchKey, NonEmptyString, OneOrMoreStrings, parse_batch_key
from ddprun.config.choices import Choice, choice_validator, parse_choice, parse_metric
from ddprun.config.validation_errors import validate
from ddprun.options import (
    CustomValidator,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    PositiveInts,
    expected,
    pattern_constraint,
    problem,
)
from ddprun.sync.plan import BufferSettings
from ddprun_hooks.config.trust import read_trust_policy

_HOST_RANGE = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")
_HostRange = Annotated[str, Field(pattern=r"^0*[1-9][0-9]*:0*[1-9][0-9]*$")]
SAFETENSORS_CONSTRAINT = pattern_constraint(
    r"^[^\x00-\x1f\x7f]*\.safetensors$", 'a file name that ends in ".safetensors", without control characters'
)

SyncChoice = Annotated[Choice, choice_validator("sync")]
HookStack = Annotated[tuple[Annotated[Choice, choice_validator("hook")], ...], Field(strict=False)]
TrackerList = Annotated[tuple[Annotated[Choice, choice_validator("tracker")], ...], Field(strict=False)]
AnyMetric = Annotated[Choice, choice_validator("metric", parse_metric, "any_metric")]
Metrics = Annotated[tuple[AnyMetric, ...], Field(strict=False)]


def _parse_data_without_held_out(value: Any) -> Choice:
    """Data that is used whole: nothing of it is held out, and asking for that is a fault."""
    choice = parse_choice("data", value)
    if choice.settings is None or "held_out" not in choice.options:
        return choice
    given = value[choice.name] if isinstance(value, dict) else None
    nothing = 0 if choice.name == "synthetic" else None
    if given and given.get("held_out"):
        text = "held_out has no effect where train and evaluate are given separately: each is used whole"
        raise problem(text, "remove it", at=(choice.name, "held_out"), on_key=True)
    settings = choice.settings.model_copy(update={"held_out": nothing})
    return Choice("data", choice.name, {**choice.options, "held_out": nothing}, "built-in", settings)


DataWithoutHeldOut = Annotated[Choice, CustomValidator(_parse_data_without_held_out, "data")]


class DataPair(Options):
    """Training and evaluation data given separately; each is used whole."""

    train: DataWithoutHeldOut
    """What train stages read."""

    evaluate: DataWithoutHeldOut | None = None
    """What evaluate stages read."""


def _parse_data(value: Any) -> Choice | DataPair:
    if isinstance(value, dict) and ("train" in value or "evaluate" in value):
        return validate(DataPair, value)
    return parse_choice("data", value)


DataField = Annotated[Annotated[Choice, choice_validator("data")] | DataPair, CustomValidator(_parse_data)]
NamePatterns = Annotated[tuple[NonEmptyString, ...], Field(strict=False)]


class Init(Options):
    """The weights to start from."""

    file: Annotated[str, SAFETENSORS_CONSTRAINT]
    """A safetensors file, relative to the pipeline's folder."""

    missing: NamePatterns = ()
    """Weights that the file may lack, or hold in another shape: they keep their initial values."""

    unexpected: NamePatterns = ()
    """Weights that the file may hold in addition to the model's."""


def _parse_init(value: Any) -> Init:
    if not isinstance(value, str | dict):
        raise expected("a file, or {file: …, missing: […], unexpected: […]}")
    return validate(Init, {"file": value} if isinstance(value, str) else value)


InitField = Annotated[Init, CustomValidator(_parse_init, str | Init)]


class ParameterGroup(Options):
    """Parameters with options of their own."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"minProperties": 2})

    match: OneOrMoreStrings
    """Patterns of the parameters' names."""

    optimizer: Literal["first", "others"] | None = Field(default=None, exclude=True)
    """Which of two optimizers updates them, whatever their shape: the first, or the one of `others`."""

    @model_validator(mode="after")
    def _has_options(self) -> Self:
        if not (self.options or self.optimizer):
            hint = "write {match: pattern, weight_decay: 0}"
            raise problem("a group needs options of its own", hint, at="match")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The optimizer's, as far as they are other ones than those of all parameters."""
        return self.model_extra or {}


ParameterGroups = Annotated[tuple[ParameterGroup, ...], Field(strict=False)]


class BalanceReplay(Options):
    """The shares of an earlier run, at the same steps."""

    replay: str
    """The run's folder, relative to the pipeline's."""


_BalanceWeights = Annotated[dict[str, PositiveFloat], Field(min_length=1)]
_BALANCE_WEIGHTS = TypeAdapter(_BalanceWeights, config=ConfigDict(strict=True, allow_inf_nan=False))


def _parse_balance(value: Any) -> Any:
    if value is None or value == "speed":
        return value
    if not isinstance(value, dict) or not value:
        raise expected("how ranks share samples", "write speed, {host or rank: weight}, or {replay: folder}")
    return validate(BalanceReplay, value) if "replay" in value else _BALANCE_WEIGHTS.validate_python(value)


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

    global_batch: PositiveInt | None = None
    """Samples per optimizer step over all ranks, whatever their number; `batch_size` is then the maximum per
    rank and micro-step. null is `batch_size` x ranks x `accumulate`."""

    balance: Annotated[
        Literal["speed"] | _BalanceWeights | BalanceReplay | None, CustomValidator(_parse_balance)
    ] = None
    """The ranks' shares of each micro-batch or round: `speed` measures and adjusts them, a mapping of hosts
    or ranks has fixed weights, `{replay: folder}` takes those of an earlier run. null is equal shares."""

    max_share: Annotated[float, Field(ge=1)] = 2.0
    """With `balance: speed`, the most samples of a rank in a micro-batch, as a multiple of `batch_size`."""

    sharded: bool = False
    """The data set gives each rank samples of its own, and is used as it is."""

    collate: Annotated[Choice, choice_validator("collate")] | None = None
    """Makes a batch from a list of samples; null is torch's `default_collate`."""

    evaluate_collate: Annotated[Choice, choice_validator("collate")] | None = None
    """Makes a batch of held-out samples; null is `collate`."""

    sampler: Annotated[Choice, choice_validator("sampler")] | None = None
    """Yields the indices of an epoch, for all ranks together, in place of `shuffle`."""

    @model_validator(mode="before")
    @classmethod
    def _default_shuffle_for_sampler(cls, value: Any) -> Any:
        """A sampler decides the order, so that `shuffle` is false where the file does not say it."""
        named = isinstance(value, dict) and value.get("sampler") is not None
        return {"shuffle": False, **value} if named else value


def _parse_batch_keys(value: Any) -> Any:
    """Read a key, a list of keys, or a mapping of keys by the argument that each becomes."""
    if isinstance(value, dict):
        if wrong := next((name for name in value if not name.isidentifier()), None):
            text = f'"{wrong}" is not an argument name'
            raise problem(text, "write argument: key", at=wrong, on_key=True)
        return {name: parse_batch_key(key, name) for name, key in value.items()}
    if isinstance(value, list | tuple):
        return tuple(parse_batch_key(key, index) for index, key in enumerate(value))
    return parse_batch_key(value)


_BatchKeys = BatchKey | tuple[BatchKey, ...] | dict[str, BatchKey]
BatchParts = Annotated[Any, CustomValidator(_parse_batch_keys, _BatchKeys)]


class BatchFields(Options):
    """Which parts of a batch the model and the loss get."""

    inputs: BatchParts | None = None
    """The model's arguments: a key, a list of keys, or a mapping of keys by argument; null takes pairs
    (input, target)."""

    target: BatchParts | None = None
    """What the loss compares the output with: a key, or a list or mapping of keys."""

    transform: Annotated[Choice, choice_validator("transform")] | None = None
    """Changes each batch of training on the device, before the model gets it, such as mixup."""


class Compile(Options):
    """`torch.compile` of the model, before DDP wraps it."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """What torch optimises for; `reduce-overhead` and `max-autotune` use CUDA graphs on a GPU."""

    blocks: OneOrMoreStrings | None = None
    """The modules that are compiled, by patterns of their names or by their class; `auto` finds those that
    repeat. null compiles the whole model."""

    dynamic: bool = False
    """Compile once for all batch sizes; false compiles again for each size."""

    fullgraph: bool = False
    """A graph break is an error; false leaves code that cannot be compiled uncompiled."""


def _parse_compile(value: Any) -> Compile | None:
    if value is None or isinstance(value, bool):
        return Compile() if value else None
    if not isinstance(value, dict):
        raise expected("whether to compile the model", "write true, false, or {mode: …, blocks: …}")
    return validate(Compile, value)


CompileField = Annotated[Compile, CustomValidator(_parse_compile, bool | Compile)]


_BucketCap = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
_BucketCaps = Annotated[tuple[_BucketCap, ...], Field(min_length=1)]
_DEFERRED_BUILD = ConfigDict(defer_build=True)
_ONE_BUCKET_CAP = TypeAdapter(_BucketCap, config=_DEFERRED_BUILD)
_BUCKET_CAPS = TypeAdapter(_BucketCaps, config=_DEFERRED_BUILD)


def _parse_bucket_cap(value: Any) -> float | tuple[float, ...]:
    if isinstance(value, list | tuple):
        return _BUCKET_CAPS.validate_python(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise expected("a number or a list of numbers")
    return _ONE_BUCKET_CAP.validate_python(value)


class Ddp(Options):
    """Options of DistributedDataParallel."""

    bucket_cap_mb: Annotated[_BucketCap | _BucketCaps, CustomValidator(_parse_bucket_cap)] = 25.0
    """Size in MiB at which a bucket is full. A list has one size for each bucket, in the order in which
    backward fills them; the last one applies to all that follow."""

    gradient_as_bucket_view: bool = True
    """Gradients are views into the buckets, which saves a copy of all gradients."""

    static_graph: bool = False
    """The same parameters take part in every step, which saves DDP some work."""

    find_unused_parameters: bool = False
    """Look in each step for parameters that take no part. Needed if there are any; costs time otherwise."""

    @property
    def bucket_caps_bytes(self) -> list[int]:
        """The size at which each gradient bucket is full; the last counts for all that follow."""
        caps = self.bucket_cap_mb if isinstance(self.bucket_cap_mb, tuple) else (self.bucket_cap_mb,)
        return [int(cap * 2**20) for cap in caps]

    @property
    def largest_cap_bytes(self) -> int:
        """The largest of these sizes, for what has no order of gradients: parameters and buffers."""
        return max(self.bucket_caps_bytes)


def _check_step_range(steps: tuple[int, ...]) -> tuple[int, ...]:
    if steps[0] > steps[1]:
        raise problem("the last step is before the first", "expected [first, last]")
    return steps


StepRange = Annotated[PositiveInts, Field(min_length=2, max_length=2), AfterValidator(_check_step_range)]


class Timings(Options):
    """What is recorded."""

    every: PositiveInt = 1
    """Record every n-th step."""

    fidelity_every: NonNegativeInt = 0
    """Compare each bucket of every n-th step with the exact mean gradient; 0 never does."""

    grad_norm_every: NonNegativeInt = 50
    """Measure the norm of all gradients in every n-th step; 0 never does. With `clip_norm`, and without
    `clip_value`, every step has it."""

    gradients: bool = False
    """Record when each parameter's gradient was complete, and which one completed its bucket."""

    profile: StepRange | None = None
    """`[first, last]`: the steps that torch's profiler records, on all ranks; null does not use it."""

    straggler_window: Annotated[int, Field(ge=2, le=10_000)] = 20
    """Synchronising steps over which ddprun judges whether a rank is late."""

    straggler_over: Annotated[float, Field(gt=0, lt=100)] = 0.1
    """A rank is late if the others wait for it for more than this share of a step."""


class Audit(Options):
    """Whether parameters, and buffers that `buffers: auto` does not send, are compared between ranks."""

    every: NonNegativeInt = 0
    """Compare at every n-th step of a stage, and record how far apart ranks are; 0 only looks for drift that
    `sync` does not allow: after the first step, at a stage's end, before weights are saved or measured."""

    on_drift: Literal["stop", "continue"] = "stop"
    """What happens on drift that `sync` does not allow: `stop` ends the run, `continue` reports it once."""


class Checkpoint(Options):
    """When the whole state of a run is saved, so that `ddprun resume` can continue from it. One is also
    taken at the run's end and when it is interrupted.
    """

    every: NonNegativeInt = 500
    """Steps of the run from one checkpoint to the next; 0 takes none before the end."""

    memory_every: NonNegativeInt = 0
    """The most steps that a failure repeats: ranks take a checkpoint in shared memory every
    `memory_every // 2` steps (at least 1), and wait for the previous one first; 0 takes none."""

    keep: NonNegativeInt = 3
    """How many of the newest are kept on disk; 0 takes none, not even in memory."""

    on_changed_data: Literal["continue", "stop"] = "stop"
    """What a resumed run does in the middle of an epoch whose data has changed."""


def _parse_nnodes(value: Any) -> int | str:
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


def _parse_module_name(value: Any) -> str:
    if not isinstance(value, str) or not all(part.isidentifier() for part in value.split(".")):
        raise expected("the name of a module", "write it as `import` takes it, such as torchvision.models")
    trust = read_trust_policy()
    if reason := trust.why_not_importable(value):
        raise problem(f'"{value}" may not be imported: {reason}', trust.allowed_message())
    return value


ModuleNames = Annotated[tuple[Annotated[str, CustomValidator(_parse_module_name)], ...], Field(strict=False)]


class Launch(Options):
    """Where the ranks run. The launcher's environment and flags take precedence."""

    nproc_per_node: PositiveInt | None = None
    """Ranks per host; null is one for each GPU, or two on a host without GPUs."""

    nnodes: Annotated[PositiveInt | _HostRange, CustomValidator(_parse_nnodes)] = 1
    """Hosts: a number, or "MIN:MAX" for a run that continues when hosts leave or join."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is cuda where torch sees a GPU, else cpu."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto` is nccl where each rank of a host has a GPU of its own, else gloo."""

    timeout_s: PositiveFloat = 600.0
    """Seconds that a collective may take before the run fails."""

    max_restarts: NonNegativeInt = 0
    """How many times the ranks are restarted after a failure, from the newest checkpoint."""

    preload: ModuleNames | None = ()
    """Modules to import once per host, before its ranks are forked; torch is always imported. null: ranks
    are not forked."""

    @property
    def host_range(self) -> tuple[int, int]:
        """The smallest and the largest number of hosts."""
        if isinstance(self.nnodes, int):
            return self.nnodes, self.nnodes
        least, _, most = self.nnodes.partition(":")
        return int(least), int(most)


def parse_buffers(value: Any) -> BufferSettings:
    if not isinstance(value, str | dict):
        raise expected("a time for buffers", "such as auto, never or {every: N}")
    return validate(BufferSettings, {"when": value} if isinstance(value, str) else value)


_BuffersInFile = Literal["auto", "every_forward", "before_evaluate", "never"] | BufferSettings
BuffersField = Annotated[BufferSettings, CustomValidator(parse_buffers, _BuffersInFile)]
