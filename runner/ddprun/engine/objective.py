"""From a batch to a loss, in its precision; and the passes before step 1: what buffers do, DDP's buckets."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddprun.config import Loaded, PipelineError
from ddprun.engine import seeding
from ddprun.engine.data import Feed
from ddprun.parallel.ddp import DdpReplica
from ddprun.sync.buffers import BufferUse, counters_of, probe

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Scaler(torch.amp.GradScaler):
    """A GradScaler for gradients that are unscaled already.

    Torch's own divides by the loss scale after the reduction. Here the dispatcher has done it before the
    first hook saw the gradient, so that what travels and what error feedback keeps are true gradients; what
    is left to do is to look for non-finite values, skip the step, and move the scale. The reduction spreads a
    non-finite value to every rank, so all of them skip the same step.
    """

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, torch.ones_like(inv_scale), found_inf, True)


class Precision:
    """One of the five kinds of `precision`.

    `fp32`; `bf16` and `fp16`: autocast, weights stay fp32; `pure_bf16` and `pure_fp16`: weights, gradients
    and optimizer state are half themselves. Both kinds of fp16 scale the loss.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.pure = name.startswith("pure_")
        # A half-precision loss passes its own scale on as a gradient, and fp16 ends below torch's 2^16.
        first_scale = 2.0**15 if self.pure else 2.0**16
        self.scaler = Scaler(device.type, first_scale) if name in ("fp16", "pure_fp16") else None
        self._half = _HALF.get(name.removeprefix("pure_"))

    @property
    def parameter_dtype(self) -> torch.dtype | None:
        """What the model's floating-point parameters become; None leaves them as they are."""
        return self._half if self.pure else None

    def computing(self) -> AbstractContextManager[None]:
        """Around forward and loss."""
        if self._half is None or self.pure:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._half)

    def admit(self, content: Any) -> Any:
        """Move a batch (tensors in tuples, lists and mappings) to the device, floats in the model's type."""
        if isinstance(content, Tensor):
            moved = content.to(self.device, non_blocking=True)
            return moved.to(self._half) if self.pure and moved.is_floating_point() else moved
        if isinstance(content, dict):
            return {key: self.admit(value) for key, value in content.items()}
        if isinstance(content, tuple | list):
            return [self.admit(value) for value in content]
        return content

    def loss_scale(self) -> Tensor | None:
        """The factor on the loss of this step, shape (); None where nothing is scaled."""
        if self.scaler is None:
            return None
        scale: Tensor = self.scaler.scale(torch.ones((), device=self.device))
        return scale

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide gradients that no hook has seen by the loss scale."""
        scale = self.loss_scale()
        if scale is not None:
            for param in parameters:
                if param.grad is not None:
                    param.grad.div_(scale)

    def check_gradients(self, optimizer: Optimizer) -> None:
        """Look for non-finite gradients before anything (clipping) would hide them."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Take the optimizer's step; False if it was skipped because a gradient is not finite."""
        if self.scaler is None:
            optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return bool(self.scaler.get_scale() >= before)

    def state_dict(self) -> dict[str, Any]:
        """State of the loss scale."""
        return {} if self.scaler is None else dict(self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring back what `state_dict` gave."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


class Outcome(NamedTuple):
    """What one forward pass gave."""

    loss: Tensor  # shape ()
    output: Any  # what the model returned; None where the model returns its loss
    target: Any


class Objective:
    """Calls the model on a batch and makes the loss.

    A batch of (input, target) calls `model(input)` and `loss(output, target)`; with `loss: model` it calls
    `model(input, target)`, and a batch that is a mapping becomes the model's keyword arguments.
    """

    def __init__(self, loaded: Loaded, loss: Callable[[Any, Any], Tensor] | None) -> None:
        self._loaded, self._loss = loaded, loss
        options = loaded.pipeline.loss.options
        self.summed = options.get("reduction") == "sum"  # the loss is a sum over samples, not a mean
        ignored = getattr(loss, "ignore_index", options.get("ignore_index"))
        # Targets of this value do not count; None: all do.
        self.ignore_index = ignored if isinstance(ignored, int) else None

    def __call__(self, model: nn.Module, content: Any) -> Outcome:
        """Forward and loss; raises a PipelineError if batches, model and loss do not fit together."""
        if isinstance(content, Mapping):
            if self._loss is not None:
                raise self._refused(
                    "data", "its batches are mappings, which have no target for a loss", "write loss: model"
                )
            return Outcome(self._own_loss(model(**content)), None, None)
        if not isinstance(content, list | tuple) or len(content) != 2:
            several = isinstance(content, list | tuple)
            shown = f"tuples of {len(content)}" if several else type(content).__name__
            raise self._refused(
                "data",
                f"its samples are {shown}",
                "a sample is a pair (input, target), or a mapping of the model's keyword arguments",
            )
        given, target = content
        if self._loss is None:
            return Outcome(self._own_loss(model(given, target)), None, None)
        output = model(given)
        loss = self._loss(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise self._refused("loss", f"gives {shape}", "one number is wanted: the mean over the batch")
        return Outcome(loss.reshape(()), output, target)

    def weight_of_mean(self, outcome: Outcome, samples: int) -> Tensor | int:
        """What the loss of a batch of so many samples counts in a mean over batches: of a cross-entropy, how
        many targets count, each by its class's weight; of another loss, its samples.
        """
        loss, target = self._loss, outcome.target
        if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or not isinstance(target, Tensor):
            return samples
        if target.is_floating_point():  # probabilities of classes, which lie on dimension 1
            return target.numel() // target.shape[min(1, target.dim() - 1)]
        counts = target != loss.ignore_index
        return counts.sum() if loss.weight is None else loss.weight[target[counts]].sum()

    def unused(self, names: Sequence[str], of: str) -> PipelineError:
        """An error for parameters that took no part in a loss, where DDP waits for all gradients."""
        key = "ddp.find_unused_parameters"
        false = "is false" if self._loaded.has(key) else "is false, its default"
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return self._refused(
            key,
            f"{false}, but {shown} took no part in {of}, so ranks would wait for their gradients forever",
            "write ddp: {find_unused_parameters: true}, or leave them out of the model, or freeze them "
            "(requires_grad_(False))",
        )

    def _own_loss(self, returned: Any) -> Tensor:
        loss = returned
        if isinstance(returned, Mapping):
            loss = returned.get("loss")
        elif not isinstance(returned, Tensor):
            loss = getattr(returned, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise self._refused(
                "loss",
                f"the model returned {type(returned).__name__} without a loss of one number",
                "with loss: model it returns the loss, or an object or mapping that has `loss`",
            )
        return loss.reshape(())

    def _refused(self, path: str, problem: str, allowed: str) -> PipelineError:
        return self._loaded.error(path, problem, allowed)


def find_buffer_use(
    model: nn.Module, objective: Objective, precision: Precision, feed: Feed, *, automatic: bool
) -> BufferUse:
    """What training does with the model's buffers, as far as this rank can see in passes on its first batch.

    Not `automatic`: every buffer but a counter counts as changing, without any pass.
    """
    named = dict(model.named_buffers())
    if not automatic or not named:
        counters = counters_of(model)
        return BufferUse(tuple(name for name in named if name not in counters), (), counters)
    with seeding.generators_kept(precision.device):
        content = precision.admit(feed.first_batch())
        same_draws = seeding.SameDraws(precision.device)
        model.train()

        def forward() -> Tensor:
            with same_draws(), precision.computing():
                return objective(model, content).loss

        return probe(model, forward)


def freeze_layout(
    replica: DdpReplica, objective: Objective, precision: Precision, feed: Feed, barrier: Callable[[], None]
) -> None:
    """Have DDP fix its buckets, by passes on this rank's first batch; raises a PipelineError if parameters
    take no part in the loss.
    """
    with seeding.generators_kept(precision.device):
        content = precision.admit(feed.first_batch())

        def loss() -> Tensor:
            with precision.computing():
                return objective(replica.ddp, content).loss

        replica.freeze_layout(
            loss,
            unused=lambda names: objective.unused(names, "the loss of a rank's first batch"),
            barrier=barrier,
        )
