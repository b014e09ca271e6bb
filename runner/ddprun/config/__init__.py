"""What a pipeline file may say: `load` gives the checked `Pipeline`. Imports no torch, and no user code."""

from ddprun.config.choices import Choice, metric_name
from ddprun.config.faults import PipelineError, PipelineFault
from ddprun.config.load import LoadedPipeline, LoadedSettings, load, load_trackers
from ddprun.config.schema import Pipeline
from ddprun.config.sections import Compile, DataPair, Ddp, Launch, Loader
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
)
from ddprun.config.torch_signatures import length_option_to_fill, tensor_options
from ddprun.sync.plan import BufferSettings
