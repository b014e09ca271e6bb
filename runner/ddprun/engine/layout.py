"""What is found out about a model before its first step: DDP's bucket layout, and what its buffers do."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddprun.config import Ddp
from ddprun.engine import seeding
from ddprun.engine.data import Feed
from ddprun.engine.objective import Objective
from ddprun.engine.precision import Precision
from ddprun.sync.buffers import BufferUse, counters_of, probe
from ddprun_hooks.dispatcher import Dispatcher


def wrap(model: nn.Module, settings: Ddp, device: torch.device) -> DistributedDataParallel:
    """DDP around a model whose parameters and buffers are the same on all ranks already.

    DDP sends no buffers: when that is done is the pipeline's to say.
    """
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    # The older name is deprecated from torch 2.13 on.
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {buffers: False}
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        init_sync=False,
        bucket_cap_mb=settings.bucket_cap_mb,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        static_graph=settings.static_graph,
        find_unused_parameters=settings.find_unused_parameters,
        **options,
    )


def without_gradient(model: nn.Module) -> list[str]:
    """Parameters that a backward pass should have given a gradient, and has not; none that DDP ignores."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # as DDP itself reads it
    return [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and param.grad is None and name not in ignored
    ]


def look_at_buffers(
    model: nn.Module, objective: Objective, precision: Precision, feed: Feed, *, automatic: bool
) -> BufferUse:
    """What training does with the model's buffers, as far as this rank can see.

    Args:
        model: of this rank.
        objective: makes the loss of forward passes on the first batch.
        precision: of the run.
        feed: where the batch is from.
        automatic: look at their values; else every buffer but a counter counts as changing.
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
    ddp: DistributedDataParallel,
    dispatcher: Dispatcher,
    objective: Objective,
    precision: Precision,
    feed: Feed,
    *,
    static_graph: bool,
    meet: Callable[[], None],
) -> None:
    """Run backward passes that leave no trace until DDP's buckets are as they stay.

    DDP starts with one layout and rebuilds it after its first backward pass, with `static_graph` one pass
    later. Were step 1 to run in the first layout, a resumed run would sum its first step in another order
    than the unbroken run did, and end with other bits.
    """
    module = ddp.module
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with seeding.generators_kept(precision.device), dispatcher.learning_layout():
        content = precision.admit(feed.first_batch())
        module.train()
        for _ in range(3 if static_graph else 2):
            with precision.computing():
                loss = objective(ddp, content).loss
            loss.backward()  # type: ignore[no-untyped-call]
            unused = without_gradient(module)
            if unused and not (ddp.find_unused_parameters or static_graph):
                raise objective.unused(unused, "the loss of a rank's first batch")
            module.zero_grad(set_to_none=True)
            meet()  # the next pass begins with an exchange of DDP's own, of which no watch is told
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
