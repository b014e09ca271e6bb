"""What passes before the first step find out, without a trace: what buffers do, and DDP's bucket layout."""

from collections.abc import Callable

from torch import Tensor, nn

from ddprun.engine import seeding
from ddprun.engine.data import Feed
from ddprun.engine.objective import Objective
from ddprun.engine.precision import Precision
from ddprun.parallel.ddp import DdpReplica
from ddprun.sync.buffers import BufferUse, counters_of, probe


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
    replica: DdpReplica, objective: Objective, precision: Precision, feed: Feed, meet: Callable[[], None]
) -> None:
    """Have DDP settle on its buckets, with this rank's first batch.

    Args:
        replica: the model under DDP.
        objective: makes the loss.
        precision: of the run.
        feed: where the batch is from.
        meet: waits for all ranks.

    Raises:
        PipelineError: some parameters take no part in the loss.
    """
    with seeding.generators_kept(precision.device):
        content = precision.admit(feed.first_batch())

        def loss() -> Tensor:
            with precision.computing():
                return objective(replica.ddp, content).loss

        replica.freeze_layout(
            loss, unused=lambda names: objective.unused(names, "the loss of a rank's first batch"), meet=meet
        )
