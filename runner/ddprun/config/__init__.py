"""What a pipeline file may say. Nothing here imports torch, nor anything that a pipeline names.

`load(path, overrides)` gives a `Loaded` with the checked `Pipeline`, or raises a `PipelineError`.
"""

from ddprun.config.choices import Choice
from ddprun.config.faults import Fault, PipelineError
from ddprun.config.load import Loaded, load
from ddprun.config.schema import (
    Audit,
    AverageStage,
    BroadcastStage,
    DataPair,
    Ddp,
    Evaluate,
    Forward,
    Launch,
    Loader,
    Pipeline,
    Save,
    Stage,
    StepStage,
    Timings,
    Train,
    TrainSettings,
)
from ddprun.config.signatures import length_option, tensor_options
from ddprun.sync.plan import Buffers

__all__ = [
    "Audit",
    "AverageStage",
    "BroadcastStage",
    "Buffers",
    "Choice",
    "DataPair",
    "Ddp",
    "Evaluate",
    "Fault",
    "Forward",
    "Launch",
    "Loaded",
    "Loader",
    "Pipeline",
    "PipelineError",
    "Save",
    "Stage",
    "StepStage",
    "Timings",
    "Train",
    "TrainSettings",
    "length_option",
    "load",
    "tensor_options",
]
