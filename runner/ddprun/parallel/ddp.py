"""DistributedDataParallel around a model: the one place that knows it."""

import inspect
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddprun.config import Ddp, LoadedPipeline, PipelineError
from ddprun_hooks.buckets import BucketLayout, view_as_real
from ddprun_hooks.comm.groups import RankGroup
from ddprun_hooks.comm.trace import BucketTrace
from ddprun_hooks.comm_queue import CommQueue
from ddprun_hooks.dispatcher import BucketDispatcher
from ddprun_hooks.stack import Stack

_ADVICE = (
    (
        "training graph has changed in this iteration",
        "ddp.static_graph",
        "the model takes another way through its parameters than in its first step",
        "remove static_graph, and write find_unused_parameters: true if a step may leave some out",
    ),
    (
        "mark a variable ready only once",
        "ddp",
        "a backward pass has completed a gradient twice, as reentrant checkpointing does",
        "write ddp: {static_graph: true}, or checkpoint with use_reentrant=False",
    ),
    (
        "does not require grad and does not have a grad_fn",
        "model",
        "the loss has no gradient: the model or the loss turns gradients off",
        "look for no_grad, set_grad_enabled(False), inference_mode and detach",
    ),
)  # what torch says of a backward pass, the key that it is about, what is wrong, and what to do


def as_backward_error(loaded: LoadedPipeline, error: BaseException) -> PipelineError | None:
    """A backward pass of ddprun's own that torch refuses, as a PipelineError; None: another error."""
    names = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    caller = [name for name in names if not name.startswith("torch.")][-1:]
    if isinstance(error, RuntimeError) and caller and caller[0].startswith("ddprun."):
        for sign, key, problem, hint in _ADVICE:
            if sign in str(error):
                return loaded.error(key, problem, hint)
    return None


class DdpReplica:
    """This rank's copy of the model under DDP, with the dispatcher as its communication hook.

    Backward passes through `ddp` average gradients over the ranks of `begin_stage`, bucket by bucket, by the
    hooks of that stage. The gradients are of those parameters that require them when the replica is made. The
    model's parameters and buffers are the same on all ranks already.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Ddp,
        device: torch.device,
        queue: CommQueue,
        stack: Stack,
        first_bucket: int = 0,
    ) -> None:
        self.model = model
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        # `buffers` in the file says when buffers are sent, never DDP. torch 2.13 has renamed the option.
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {buffers: False, **settings.model_dump()}
        if isinstance(caps := options["bucket_cap_mb"], tuple):
            options |= {"bucket_cap_mb": None, "bucket_cap_mb_list": list(caps)}
        device_ids = [device] if device.type == "cuda" else None
        self.ddp = DistributedDataParallel(model, device_ids=device_ids, init_sync=False, **options)
        self.dispatcher = BucketDispatcher(self.ddp, queue, stack, first_bucket)
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # as DDP itself reads it
        named = model.named_parameters()
        self._params = {name: one for name, one in named if one.requires_grad and name not in ignored}
        self.settings = settings

    def begin_stage(self, stack: Stack, group: RankGroup) -> str:
        """Use these hooks and ranks for gradients from now on; gives what must be the same on all ranks."""
        self.dispatcher.stack, self.dispatcher.group = stack, group
        if self.settings.find_unused_parameters and not self.settings.static_graph:
            # Passes of earlier stages have marked parameters as used here, too, even those outside this DDP.
            self.ddp.reducer._reset_state()
        return self.dispatcher.agreement_description

    def accumulating(self, wanted: bool) -> AbstractContextManager[None]:
        """Inside, if `wanted`, passes add to the gradients without an exchange."""
        return self.ddp.no_sync() if wanted else nullcontext()

    def params_without_gradient(self) -> dict[str, Tensor]:
        """Parameters, by name, that a backward pass should have given a gradient, and has not."""
        return {name: param for name, param in self._params.items() if param.grad is None}

    def backward(
        self, loss: Tensor, traces: list[BucketTrace[Any]], *, exchange: bool
    ) -> Mapping[str, Tensor]:
        """A backward pass of a `loss` of shape (), with each bucket's trace for `traces`. If not `exchange`,
        the forward pass ran under `ddp.no_sync()`. Gives parameters without a gradient: DDP waits for them.
        """
        self.dispatcher.traces = traces
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            # DDP passes on no more than the text of what a hook or a collective raised.
            cause = self.dispatcher.error
            if cause is not None and cause is not error:
                raise cause from None
            raise
        unsent = self.dispatcher.unsent_params if exchange else ()
        waiting = {name: param for name, param in self._params.items() if name in unsent} if unsent else {}
        return {name: param for name, param in waiting.items() if param.grad is None} or waiting


def predict_bucket_layout(
    params_by_completion: Mapping[str, Tensor], caps_bytes: Sequence[int]
) -> tuple[BucketLayout, ...]:
    """The gradient buckets that DDP will rebuild, computed without DDP: `bucket_layouts` once fixed.

    `params_by_completion` are in the order in which backward completes their gradients. `caps_bytes`: the
    size at which each bucket is full; the last counts for all that follow.
    """
    named = [(name, view_as_real(param)) for name, param in params_by_completion.items()]
    tensors = [tensor for _, tensor in named]
    buckets, _ = dist._compute_bucket_assignment_by_size(
        tensors, list(caps_bytes), [False] * len(tensors), list(range(len(tensors)))
    )
    return tuple(
        BucketLayout.from_tensors(index, tensors[bucket[0]].dtype, [named[one] for one in bucket])
        for index, bucket in enumerate(buckets)
    )


def sparse_parameters(model: nn.Module) -> list[Tensor]:
    """Weights of `Embedding(sparse=True)`: DDP puts each in a bucket of its own."""
    embeddings = (one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag))
    return [embedding.weight for embedding in embeddings if embedding.sparse]
