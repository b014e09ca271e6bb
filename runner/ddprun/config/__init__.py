"""What a pipeline file may say. Nothing here imports torch, nor anything that a pipeline names.

`load(path, overrides)` gives a `LoadedPipeline` with the checked `Pipeline`, or raises a `PipelineError`.
"""

from ddprun.config.choices import Choice, RunSchedule
from ddprun.config.faults import Fault, PipelineError
from ddprun.config.load import LoadedPipeline, load
from ddprun.config.schema import Pipeline
from ddprun.config.sections import Compile, DataPair, Ddp, Launch, Loader
from ddprun.config.signatures import length_option, tensor_options
from ddprun.config.stages import (
    BEST_FILE,
    AverageStage,
    BroadcastStage,
    EarlyStop,
    EvaluateStage,
    ForwardStage,
    KeepBest,
    SaveStage,
    Stage,
    StepStage,
    StepStageSettings,
    TrainStage,
    metric_names,
)
from ddprun.sync.plan import BufferSettings

__all__ = [
    "BEST_FILE",
    "AverageStage",
    "BroadcastStage",
    "BufferSettings",
    "Choice",
    "Compile",
    "DataPair",
    "Ddp",
    "EarlyStop",
    "EvaluateStage",
    "Fault",
    "ForwardStage",
    "KeepBest",
    "Launch",
    "LoadedPipeline",
    "Loader",
    "Pipeline",
    "PipelineError",
    "RunSchedule",
    "SaveStage",
    "Stage",
    "StepStage",
    "StepStageSettings",
    "TrainStage",
    "length_option",
    "load",
    "metric_names",
    "tensor_options",
]
