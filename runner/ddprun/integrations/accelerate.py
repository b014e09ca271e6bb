"""`observe`: what `Accelerator.prepare` has made, observed."""

from typing import Any

from torch.optim import Optimizer

from ddprun.observer.run import ObservedRun
from ddprun.observer.run import observe as observe_model

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    message = "ddprun.integrations.accelerate needs Accelerate: pip install 'ddprun[accelerate]'"
    raise ModuleNotFoundError(message, name=error.name) from error


def observe(accelerator: Accelerator, model: Any, *optimizers: Optimizer, **options: Any) -> ObservedRun:
    """Observe a model and its optimizers, as returned by `accelerator.prepare`, with the scaler of the
    `accelerator`. Options and errors are those of `ddprun.observe`.
    """
    return observe_model(model, optimizers or None, scaler=accelerator.scaler, **options)
