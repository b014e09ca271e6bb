"""`ObserveCallback`: what a Trainer of transformers trains, observed."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ddprun.observer.run import ObservedRun, observe
from ddprun.observer.step_marker import EagerHook

try:
    from transformers import TrainerCallback, TrainerState, TrainingArguments
    from transformers.trainer_utils import has_length
except ModuleNotFoundError as error:
    message = "ddprun.integrations.transformers needs transformers: pip install 'ddprun[transformers]'"
    raise ModuleNotFoundError(message, name=error.name) from error


class ObserveCallback(TrainerCallback):
    """Observes each `train` of a Trainer. Options, and errors as it begins, are those of `ddprun.observe`."""

    run: ObservedRun
    """The run of the latest `train`, once training has begun."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._wrappers = weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[torch.nn.Module]]()
        self._shares = 1  # how many losses, one for each rank and forward pass, add up to the step's
        register_module_module_registration_hook(
            self._record_ddp_wrapper
        )  # a callback is given the model inside

    def _record_ddp_wrapper(self, wrapper: torch.nn.Module, name: str, model: torch.nn.Module | None) -> None:
        if isinstance(wrapper, DistributedDataParallel) and model is not None:
            self._wrappers[model] = weakref.ref(wrapper)  # in place of an earlier Trainer's

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **given: Any) -> None:
        """The model is in DDP by now."""
        if hasattr(self, "run"):
            self.on_train_end()  # of a `train` that an exception has ended
        inner, optimizer = given["model"], given["optimizer"]
        model: Any = self._wrappers.get(inner, lambda: inner)()
        self.run = observe(model, optimizer, scaler=getattr(optimizer, "scaler", None), **self._options)
        self._hook = model.register_forward_hook(EagerHook(self._note_loss), with_kwargs=True)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **given: Any) -> None:
        """The last step of an epoch may have fewer forward passes."""
        passes, loader = args.gradient_accumulation_steps, given["train_dataloader"]
        if has_length(loader):
            passes = min(passes, round((1 - (state.epoch or 0) % 1) * len(loader)))
        self._shares = passes * (args.world_size if args.average_tokens_across_devices else 1)

    def _note_loss(self, _: torch.nn.Module, inputs: Any, options: Mapping[str, Any], output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else None
        divided = options.get("num_items_in_batch") is not None  # by the number of all tokens of the step
        if loss is not None and divided and torch.is_grad_enabled():
            self.run.note_loss(loss * self._shares)

    def on_train_end(self, *_: Any, **given: Any) -> None:
        """Close the run."""
        self._hook.remove()
        self.run.close()
