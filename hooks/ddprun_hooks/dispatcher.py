"""The one communication hook that DDP ever sees; stages switch the stack behind it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddprun_hooks.buckets import BucketLayout, view_as_real
from ddprun_hooks.comm.groups import RankGroup
from ddprun_hooks.comm.trace import BucketTrace, compute_fidelity
from ddprun_hooks.comm_queue import CommQueue, await_callback_at_exit
from ddprun_hooks.errors import ExchangeError
from ddprun_hooks.payload import Payload, dtype_name
from ddprun_hooks.stack import Stack


class BucketDispatcher:
    """Carries DDP's gradient buckets on `queue` through a stack that can be changed between steps.

    DDP takes a communication hook once in a model's life
    (https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html); this is the one it gets. Its buckets are
    counted from `first_index`, so that no two DDPs of one model use the same number.
    """

    def __init__(
        self, model: DistributedDataParallel, queue: CommQueue, stack: Stack, first_index: int = 0
    ) -> None:
        self.stack, self._first_index = stack, first_index
        self.traces: list[BucketTrace[Any]] = []  # takes each bucket's
        # Called when a backward pass has sent its last bucket and is about to wait.
        self.on_last_bucket_sent: Callable[[], None] | None = None
        self._queue = queue
        self._names: Mapping[int, str] = {id(param): name for name, param in model.module.named_parameters()}
        self._layout: dict[int, BucketLayout] = {}
        # Until then backward passes exchange nothing, and the last one's buckets become the layout.
        self.layout_frozen = False
        self._loss_scale: Tensor | None = None
        self._undoable = False  # the stack has begun a step that it may roll back
        # In a step whose fidelity is measured, of each bucket: its trace; a copy of this rank's input, in
        # fp32 or wider, shape (numel,); and the tensor that will hold the hooks' mean, shape (numel,).
        self._fidelity_samples: list[tuple[BucketTrace[Any], Tensor, Tensor]] | None = None
        self._sent_buckets: set[int] = set()  # numbers, since the step began
        self.group: RankGroup = queue.world  # the ranks whose gradients are averaged

        self._gradients_are_views = model.gradient_as_bucket_view
        self._buckets: list[dist.GradBucket] = []  # of a backward pass that may leave parameters unused
        self._attach(model)

    def _attach(self, model: DistributedDataParallel) -> None:
        on_bucket = self._on_bucket_tracking_unused if model.find_unused_parameters else self._on_bucket
        model.register_comm_hook(None, on_bucket)

    @property
    def bucket_layouts(self) -> tuple[BucketLayout, ...]:
        """The buckets, in the order in which backward fills them; empty before they are known."""
        return tuple(self._layout[index] for index in sorted(self._layout))

    @property
    def params_by_bucket(self) -> dict[int, tuple[str, ...]]:
        """The names of each bucket's parameters, by its number, in that order."""
        return {bucket.index: tuple(param.name for param in bucket.params) for bucket in self.bucket_layouts}

    @property
    def agreement_description(self) -> str:
        """What must be equal on all ranks: the buckets, and the hooks with their options."""
        return repr((self.bucket_layouts, self.stack.description, self.group.size))

    @property
    def error(self) -> BaseException | None:
        """What broke the exchange, as it was raised; DDP itself passes on no more than its text."""
        return self._queue.error

    def begin_step(
        self, scale: Tensor | None = None, *, fidelity: bool = False, undoable: bool = False
    ) -> None:
        """Prepare for a step's backward pass. Gradients are divided by the loss `scale`, shape (), before the
        stack sees them. `fidelity`: keep inputs for `measure_fidelity`. `undoable`, and with a loss scale:
        `end_step` may roll the hooks' state back, and `restart_step` may be called.
        """
        self._loss_scale, self._undoable = scale, undoable or scale is not None
        self._sent_buckets.clear()
        self._fidelity_samples = [] if fidelity else None
        if self._undoable:
            self.stack.begin_step()

    def restart_step(self) -> None:
        """Prepare for another backward pass of the step, from the hooks' state before it."""
        self._sent_buckets.clear()
        self.stack.rollback()
        self.stack.begin_step()

    @property
    def unsent_params(self) -> tuple[str, ...]:
        """Parameters of the buckets that the last backward pass has not sent."""
        if len(self._sent_buckets) == len(self._layout):
            return ()
        left = (bucket for bucket in self.bucket_layouts if bucket.index not in self._sent_buckets)
        return tuple(param.name for bucket in left for param in bucket.params)

    def measure_fidelity(self, exact_sum: Callable[[Tensor], tuple[Tensor, int]]) -> None:
        """Compare each bucket of a backward pass, which `begin_step` began with `fidelity`, with the exact
        mean, into its trace; all ranks call it together. `exact_sum` is as `CommContext.exact_sum`.
        """
        samples, self._fidelity_samples = self._fidelity_samples or [], None
        for trace, own, mean in samples:
            residual_norm = self.stack.residual_norm(trace.kind, [param.name for param in trace.params])
            trace.fidelity = compute_fidelity(mean, *exact_sum(own), residual_norm)

    def end_step(self, *, applied: bool) -> None:
        """The optimizer has taken the step, or skipped it: then the hooks' state is rolled back."""
        if self._undoable:
            self.stack.commit() if applied else self.stack.rollback()

    # DDP looks at this signature: a parameter named `bucket`, and annotations that are types, not strings.
    def _on_bucket(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer, index = bucket.buffer(), bucket.index()
        if not self.layout_frozen:
            self._record_layout(bucket)
            return self._on_bucket_before_layout_frozen(bucket)
        layout = self._matching_layout(index, buffer)
        if layout is None:
            raise ExchangeError(
                f"bucket {self._first_index + index} is not as in the frozen layout: DDP has rebuilt its "
                "buckets in mid-run"
            )
        self._sent_buckets.add(layout.index)
        future = self._send_bucket(buffer, layout, self.stack)
        if self.on_last_bucket_sent is not None and bucket.is_last():
            self.on_last_bucket_sent()
        return future

    def _matching_layout(self, index: int, buffer: Tensor) -> BucketLayout | None:
        """What is known of a bucket; None: it is another one now."""
        layout = self._layout.get(index)
        if layout is None or (buffer.numel(), dtype_name(buffer.dtype)) != (layout.numel, layout.dtype):
            return None
        return layout

    # With `find_unused_parameters`, DDP leaves a parameter's gradient as it is if no rank has used it. What
    # hooks have sent for it, out of their residuals, goes back to them.

    def _on_bucket_tracking_unused(
        self, state: object, bucket: dist.GradBucket
    ) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            self._buckets.clear()
        self._buckets.append(bucket)
        if bucket.is_last():
            call_after_backward(self._note_gradient_versions)
        return self._on_bucket(state, bucket)

    def _note_gradient_versions(self) -> None:
        """Gradients are complete; DDP's own callback, which writes the means to them, comes next."""
        params = [param for bucket in self._buckets for param in bucket.parameters()]
        versions = [None if param.grad is None else param.grad._version for param in params]
        call_after_backward(partial(self._return_unused_means, versions))

    def _return_unused_means(self, versions_before: Sequence[int | None]) -> None:
        versions, means = iter(versions_before), dict[str, Tensor]()
        for bucket in self._buckets:
            slices = self._layout[bucket.index()].params
            for place, param in zip(slices, bucket.parameters(), strict=True):
                grad, version = param.grad, next(versions)
                if grad is not None and (self._gradients_are_views or grad._version != version):
                    continue  # the mean is in it
                mean = means[place.name] = place.of(bucket.buffer())
                if grad is not None:  # zeros, or of an earlier pass: that is in it
                    like = view_as_real(param)
                    mean.as_strided(like.size(), like.stride()).sub_(view_as_real(grad))
        if means:
            self._take_back(means)

    def _take_back(self, means: dict[str, Tensor]) -> None:
        self.stack.take_back("gradient", means)

    def _send_bucket(
        self, buffer: Tensor, layout: BucketLayout, stack: Stack
    ) -> torch.futures.Future[Tensor]:
        if not buffer.is_sparse:
            return self._send_dense(buffer, layout, stack)
        # One parameter of an Embedding(sparse=True): its rows are sent as dense ones.
        dense = self._send_dense(buffer.coalesce().to_dense().view(-1), layout, stack)
        return dense.then(await_callback_at_exit(partial(_as_sparse_rows, shape=buffer.shape)))

    def _send_dense(self, buffer: Tensor, layout: BucketLayout, stack: Stack) -> torch.futures.Future[Tensor]:
        buffer.mul_(1.0 / self.group.size)
        if self._loss_scale is not None:
            buffer.div_(self._loss_scale)
        own = None
        if self._fidelity_samples is not None:
            own = buffer.to(torch.promote_types(buffer.dtype, torch.float32), copy=True)
        payload = Payload(buffer, layout.params, "gradient", layout.index)
        future = self._queue.send(payload, stack, self.traces, self.group)
        if self._fidelity_samples is not None and own is not None:
            self._fidelity_samples.append((self.traces[-1], own, buffer))
        return future

    def _on_bucket_before_layout_frozen(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """While the layout is not known, exchange nothing: this rank keeps its own gradient."""
        buffer = bucket.buffer()
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        future.set_result(buffer)
        return future

    def _record_layout(self, bucket: dist.GradBucket) -> None:
        if bucket.index() == 0:
            self._layout = {}
        named_tensors = ((self._names[id(param)], view_as_real(param)) for param in bucket.parameters())
        self._layout[bucket.index()] = BucketLayout.from_tensors(
            self._first_index + bucket.index(), bucket.buffer().dtype, named_tensors
        )


def _as_sparse_rows(dense: torch.futures.Future[Tensor], shape: torch.Size) -> Tensor:
    """The rows of a mean that are not all zero, as a sparse tensor of this shape: what DDP waits for."""
    return dense.value().view(shape).to_sparse(1)


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call when the backward pass under way has ended, after what is to be called then already."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
