"""What a pipeline file may say: one model for each part, a docstring with the unit under each key."""

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ddprun.config import patterns
from ddprun.config.buffers import Buffers, BuffersField
from ddprun.config.choices import Choice, choose
from ddprun.config.containers import Docker, Kubernetes
from ddprun.config.fields import (
    HookStack,
    LossChoice,
    ModelChoice,
    OptimizerChoice,
    ScheduleChoice,
    SyncChoice,
    Trackers,
    Validated,
)
from ddprun.config.launch import Launch
from ddprun.config.options import NonNegativeInt, Options, PositiveFloat, PositiveInt, Sizes
from ddprun.config.problems import problem, validate, within
from ddprun.config.slurm import Slurm
from ddprun.config.stages import (
    OVERRIDABLE,
    STAGES,
    AverageStage,
    BroadcastStage,
    Evaluate,
    Forward,
    Save,
    Stage,
    Stages,
    StepStage,
    Train,
    TrainSettings,
)

__all__ = [
    "OVERRIDABLE",
    "STAGES",
    "Audit",
    "AverageStage",
    "BroadcastStage",
    "Buffers",
    "Checkpoint",
    "DataPair",
    "Ddp",
    "Evaluate",
    "Forward",
    "Launch",
    "Loader",
    "Pipeline",
    "Save",
    "Slurm",
    "Stage",
    "StepStage",
    "Timings",
    "Train",
    "TrainSettings",
]


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


WholeData = Annotated[Choice, Validated(_whole, "data")]


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

    sharded: bool = False
    """The data set gives each rank samples of its own, and is taken as it is."""


class Ddp(Options):
    """What DistributedDataParallel is built with."""

    bucket_cap_mb: Annotated[float, Field(ge=1)] = 25.0
    """Largest size of a bucket in MiB, of gradients and of parameters, at least 1: DDP's first bucket is
    1 MiB and must not be the largest."""

    gradient_as_bucket_view: bool = True
    """Gradients are views into the buckets, which saves a copy of all gradients."""

    static_graph: bool = False
    """The same parameters take part in each step; DDP then prepares less."""

    find_unused_parameters: bool = False
    """Look in each step for parameters that take no part; needed where some take none, slower otherwise."""


def _in_order(steps: tuple[int, ...]) -> tuple[int, ...]:
    if steps[0] > steps[1]:
        raise problem("the last step is before the first", "expected [first, last]")
    return steps


Stretch = Annotated[Sizes, Field(min_length=2, max_length=2), AfterValidator(_in_order)]


class Timings(Options):
    """What is recorded."""

    every: PositiveInt = 1
    """Record every n-th step."""

    fidelity_every: NonNegativeInt = 0
    """Compare each bucket of every n-th step with the exact mean gradient; 0 never does."""

    gradients: bool = False
    """Record when each parameter's gradient was complete, and which one completed its bucket."""

    profile: Stretch | None = None
    """`[first, last]`: the steps that torch's profiler looks at, on all ranks; null does not use it."""

    straggler_window: Annotated[int, Field(ge=2, le=10_000)] = 20
    """Steps in which ranks synchronise, over which is judged whether one is late."""

    straggler_over: Annotated[float, Field(gt=0, lt=100)] = 0.1
    """A rank is late if the others wait for it for more than this share of a step."""


class Audit(Options):
    """Whether parameters are compared between ranks."""

    every: NonNegativeInt = 0
    """Compare at every n-th step, and end the run on drift that `sync` does not allow; 0 never does."""


class Checkpoint(Options):
    """When the whole state of a run is kept, so that `ddprun resume` can go on from it. One is taken at the
    run's end and when it is interrupted, too.
    """

    every: NonNegativeInt = 500
    """Steps of the run from one checkpoint to the next; 0 takes none before the end."""

    keep: NonNegativeInt = 3
    """How many are kept, the newest; 0 takes none at all."""


class Pipeline(Options):
    """A whole pipeline file."""

    elsewhere = MappingProxyType(
        {
            "mutate": "write it in a train or forward stage",
            "update": "write it in a forward stage",
            "steps": "write it in a stage",
            "epochs": "write it in a stage",
        }
    )

    name: Annotated[str, Field(pattern=patterns.NAME, max_length=200)] = "pipeline"
    """Name of the run's folder; the file's own name if left out."""

    seed: NonNegativeInt = 0
    """Seed of weights, shuffling and dropout."""

    model: ModelChoice
    """What is trained."""

    data: Annotated[Choice | DataPair, Validated(_read_data, "data_or_pair")]
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

    on_nan: Literal["continue", "stop"] = "stop"
    """What follows when weights are not finite any more: the run ends as failed, or goes on."""

    precision: Literal["fp32", "bf16", "fp16", "pure_bf16", "pure_fp16"] = "fp32"
    """bf16 and fp16 are autocast; with pure_ the model itself is half."""

    ddp: Ddp = Ddp()
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

    launch: Launch = Launch()
    """Where the ranks run."""

    slurm: Slurm = Slurm()
    """What `ddprun submit --to slurm` asks for."""

    docker: Docker = Docker()
    """What `ddprun submit --to docker` asks for."""

    kubernetes: Kubernetes = Kubernetes()
    """What `ddprun submit --to kubernetes` asks for."""

    checkpoint: Checkpoint = Checkpoint()
    """When the whole state of the run is kept."""

    timings: Timings = Timings()
    """What is recorded."""

    audit: Audit = Audit()
    """Whether parameters are compared between ranks."""

    track: Trackers = ()
    """Where else curves and metrics go, from rank 0: tensorboard, wandb, mlflow, prometheus."""

    def train_stages(self) -> list[Train]:
        """The stages that train, in order."""
        return [stage for stage in self.stages if isinstance(stage, Train)]

    def step_stages(self) -> list[Train | Forward]:
        """The stages that take steps, in order."""
        return [stage for stage in self.stages if isinstance(stage, (Train, Forward))]

    def train_data(self) -> Choice:
        """What train stages read."""
        return self.data.train if isinstance(self.data, DataPair) else self.data
