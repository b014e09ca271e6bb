"""From a batch to a loss; and what passes before the first step find out: what buffers do, DDP's buckets."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ddprun.config import Loaded, PipelineError
from ddprun.engine import seeding
from ddprun.engine.data import Feed
from ddprun.engine.precision import Precision
from ddprun.parallel.ddp import DdpReplica
from ddprun.sync.buffers import BufferUse, counters_of, probe


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
        """Forward and loss.

        Raises:
            PipelineError: batches, model and loss do not fit together.
        """
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
    """Have DDP fix its buckets, by passes on this rank's first batch.

    Raises:
        PipelineError: some parameters take no part in the loss.
    """
    with seeding.generators_kept(precision.device):
        content = precision.admit(feed.first_batch())

        def loss() -> Tensor:
            with precision.computing():
                return objective(replica.ddp, content).loss

        replica.freeze_layout(
            loss,
            unused=lambda names: objective.unused(names, "the loss of a rank's first batch"),
            meet=barrier,
        )
