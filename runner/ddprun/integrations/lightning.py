"""`ObserveCallback`: what a Lightning Trainer trains, observed."""

from typing import Any

from ddprun.observer.run import ObservedRun, observe

try:
    from lightning import Callback, LightningModule, Trainer
except ModuleNotFoundError as error:
    message = "ddprun.integrations.lightning needs Lightning: pip install 'ddprun[lightning]'"
    raise ModuleNotFoundError(message, name=error.name) from error


class ObserveCallback(Callback):
    """Observes each `fit` of a Trainer. Options, and errors when it begins, are those of `ddprun.observe`."""

    run: ObservedRun | None = None
    """The run of the latest `fit`; None until training begins."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The model is in DDP by now."""
        model, scaler = trainer.strategy.model, getattr(trainer.precision_plugin, "scaler", None)
        self.run = observe(model, trainer.optimizers, scaler=scaler, **self._options)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the run."""
        assert self.run is not None
        self.run.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the run as failed."""
        if self.run is not None:
            self.run.__exit__(type(exception), exception)
