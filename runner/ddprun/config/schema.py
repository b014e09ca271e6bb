"""What a pipeline file may say: all of its keys, a docstring with the unit under each."""

import functools
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model

from ddprun.config import sections
from ddprun.config.choices import (
    Choice,
    choice_validator,
    parse_optimizer,
    parse_schedule,
    trusted_options_model,
)
from ddprun.config.stages import (
    AverageStage,
    BroadcastStage,
    ForwardStage,
    Stage,
    Stages,
    StepStage,
    StepStageSettings,
    TrainStage,
)
from ddprun.config.validation_errors import validate
from ddprun.options import (
    CustomValidator,
    FractionFloat,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    pattern_constraint,
    problem,
)
from ddprun.plugins import CLUSTERS

_NAME_CONSTRAINT = pattern_constraint(
    r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", 'letters, digits, ".", "_" and "-" only, not "." first'
)


class Pipeline(Options):
    """A whole pipeline file."""

    name: Annotated[str, Field(max_length=200), _NAME_CONSTRAINT] = "pipeline"
    """Name of the run's folder; the file's own name if left out."""

    seed: NonNegativeInt = 0
    """Seed of weights, shuffling and dropout."""

    model: Annotated[Choice, choice_validator("model")]
    """What is trained."""

    init: sections.InitField | None = None
    """A file of weights to start from; null keeps the weights that the model is created with."""

    freeze: sections.NamePatterns = ()
    """Parameters that are not trained: patterns of their names."""

    data: sections.DataField
    """What the model is trained on; a built-in data set has a held-out part of its own."""

    loader: sections.Loader = Field({}, validate_default=True)
    """How samples reach a rank."""

    batch: sections.BatchFields = Field({}, validate_default=True)
    """Which parts of a batch the model and the loss get."""

    weight_by: Annotated[Choice, choice_validator("weight")] | None = None
    """The weight of a batch's mean loss in means over batches, micro-steps and ranks; null counts samples,
    and in evaluate stages the targets of a cross-entropy."""

    loss: Annotated[Choice, choice_validator("loss")] = Field("cross_entropy", validate_default=True)
    """A torch loss, the import path of a function of (output, target), or `model` if the model returns its
    own."""

    optimizer: Annotated[Choice, choice_validator("optimizer", parse_optimizer, "any_optimizer")]
    """A torch optimizer, or an import path."""

    groups: sections.ParameterGroups = ()
    """Parameter groups: patterns of names, and optimizer options for these parameters; the first group
    that matches counts."""

    schedule: Annotated[Choice, choice_validator("schedule", parse_schedule, "any_schedule")] | None = None
    """A torch schedule, stepped once per optimizer step; a length that is left out is the stage's steps. With
    `over: run` beside it, one schedule and one warm-up span all stages; with `metric` beside it, it is
    stepped by that metric after each evaluation of its stage."""

    warmup_steps: NonNegativeInt = 0
    """Optimizer steps in which the learning rate rises to its full value."""

    clip_norm: PositiveFloat | None = None
    """Largest allowed norm of all gradients together; null does not clip."""

    clip_value: PositiveFloat | None = None
    """Largest allowed absolute value of a gradient, clipped before the norm is; null does not clip."""

    ema: FractionFloat | None = None
    """Decay of an exponential moving average of the weights, which is evaluated and saved; null is none."""

    on_nan: Literal["continue", "stop"] = "stop"
    """What happens when weights are no longer finite: the run fails, or continues."""

    precision: Literal["fp32", "bf16", "fp16", "pure_bf16", "pure_fp16"] = "fp32"
    """bf16 and fp16 are autocast; with pure_ the model's own parameters are 16-bit."""

    channels_last: bool = False
    """Keep weights and batches of images (4 dimensions) in torch's `channels_last` memory format, in which
    convolutions may be faster."""

    sync_batchnorm: bool = False
    """Have BatchNorm normalise over the batches of all ranks (`torch.nn.SyncBatchNorm`), on GPUs only."""

    deterministic: bool = False
    """Use only deterministic algorithms; an operation that has none is an error."""

    compile: sections.CompileField | None = None
    """Compile the model with `torch.compile`: true, or how; null and false do not compile it."""

    ddp: sections.Ddp = Field({}, validate_default=True)
    """Options of DistributedDataParallel."""

    accumulate: PositiveInt = 1
    """Micro-steps per optimizer step; only the last one synchronises."""

    sync: sections.SyncChoice = Field("every_step", validate_default=True)
    """When ranks synchronise."""

    hooks: sections.HookStack = ()
    """How gradients and changes of parameters are sent: hooks, in the order in which they are applied; an
    empty list is plain all-reduce."""

    buffers: sections.BuffersField = Field("auto", validate_default=True)
    """When and how ranks make their buffers equal, such as BatchNorm's running statistics."""

    stages: Stages = Field(default=[{"train": {"epochs": 1}}], validate_default=True)
    """What is done, in order."""

    launch: sections.Launch = Field({}, validate_default=True)
    """Where the ranks run."""

    checkpoint: sections.Checkpoint = Field({}, validate_default=True)
    """When the whole state of the run is saved."""

    timings: sections.Timings = Field({}, validate_default=True)
    """What is recorded."""

    audit: sections.Audit = Field({}, validate_default=True)
    """Whether parameters are compared between ranks."""

    track: sections.TrackerList = ()
    """Where else rank 0 sends curves and metrics; `ddprun catalog tracker` lists them."""

    def train_stages(self) -> list[TrainStage]:
        return [stage for stage in self.stages if isinstance(stage, TrainStage)]

    def stages_with_steps(self) -> list[TrainStage | ForwardStage]:
        return [stage for stage in self.stages if isinstance(stage, (TrainStage, ForwardStage))]

    def stages_and_settings(self) -> list[tuple[TrainStage | ForwardStage, StepStageSettings]]:
        """The stages with steps, each with the settings that hold in it."""
        return [(stage, stage.effective_settings(self)) for stage in self.stages_with_steps()]

    def frozen_patterns(self) -> dict[str, tuple[str, ...]]:
        """What each stage freezes that updates weights, by the place where it stands."""
        of_stages = self.stages_and_settings()
        found = {stage.key_path("freeze"): one.freeze for stage, one in of_stages if one.updates_weights}
        return found or {"freeze": self.freeze}

    @property
    def has_batch_weights(self) -> bool:
        """Whether the file says what a batch's mean loss counts, and that is not its samples."""
        return self.weight_by is not None and self.weight_by.name != "samples"

    @property
    def has_automatic_buffers(self) -> bool:
        """Whether, in some stage, `buffers` goes by what training does with them."""
        of_stages = [settings.buffers for _, settings in self.stages_and_settings()]
        return any(setting.when == "auto" for setting in (self.buffers, *of_stages))

    def averages_at_end_of(self, stage: Stage) -> bool:
        """Whether parameters are averaged at the end of a stage that lets ranks differ: not if the next stage
        makes them equal itself, or lets ranks differ as well and freezes the same.
        """
        following = next(iter(self.stages[stage.index + 1 :]), None)
        if isinstance(following, StepStage):
            settings = following.effective_settings(self)
            own = stage.effective_settings(self) if isinstance(stage, StepStage) else settings
            return not settings.plan.keeps_apart or settings.freeze != own.freeze
        return not isinstance(following, AverageStage | BroadcastStage)

    def train_data(self) -> Choice:
        return self.data.train if isinstance(self.data, sections.DataPair) else self.data


def pipeline_with_cluster_keys(keys: Iterable[str] = ()) -> type[Pipeline]:
    """`Pipeline` with a key for each cluster backend, None where the file lacks it; for installed ones, if
    one of the file's `keys` may be theirs. An installed backend is imported only if its key is in the file.
    """
    return _with_clusters(not {*Pipeline.model_fields, *CLUSTERS.built_in_names()}.issuperset(keys))


@functools.cache
def _with_clusters(installed: bool) -> type[Pipeline]:
    fields: dict[str, Any] = {}
    for name in CLUSTERS.names() if installed else CLUSTERS.built_in_names():
        kind: Any = CLUSTERS.options_model(name) if name in CLUSTERS.built_in_names() else Any
        parse = CustomValidator(functools.partial(_parse_cluster, name), {})
        fields[name] = (Annotated[kind | None, parse], Field(default=None, exclude=True))
    return create_model("Pipeline", __base__=Pipeline, __module__=__name__, **fields)


def _parse_cluster(name: str, value: Any) -> BaseModel:
    return validate(trusted_options_model(CLUSTERS, name, functools.partial(problem, on_key=True)), value)
