"""What a pipeline file may say. Nothing here imports torch, nor anything that a pipeline names.

`load(path, overrides)` gives a `Loaded` with the checked `Pipeline`, or raises a `PipelineError`.
"""

from ddprun.config.choices import Choice, RunSchedule
from ddprun.config.faults import Fault, PipelineError
from ddprun.config.load import Loaded, load
from ddprun.config.schema import (
    BEST_FILE,
    Audit,
    AverageStage,
    BroadcastStage,
    Compile,
    DataPair,
    Ddp,
    EarlyStop,
    Evaluate,
    Forward,
    KeepBest,
    Launch,
    Loader,
    Pipeline,
    Save,
    Stage,
    StepStage,
    Timings,
    Train,
    TrainSettings,
    metric_names,
)
from ddprun.config.signatures import length_option, tensor_options
from ddprun.sync.plan import Buffers

__all__ = [
    "BEST_FILE",
    "Audit",
    "AverageStage",
    "BroadcastStage",
    "Buffers",
    "Choice",
    "Compile",
    "DataPair",
    "Ddp",
    "EarlyStop",
    "Evaluate",
    "Fault",
    "Forward",
    "KeepBest",
    "Launch",
    "Loaded",
    "Loader",
    "Pipeline",
    "PipelineError",
    "RunSchedule",
    "Save",
    "Stage",
    "StepStage",
    "Timings",
    "Train",
    "TrainSettings",
    "length_option",
    "load",
    "metric_names",
    "tensor_options",
]
