"""DDP communication hooks of torch's own form, `hook(state, bucket)`, as hooks of a stack.

See https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ddprun_hooks.errors import ExchangeError
from ddprun_hooks.hook import Hook

if TYPE_CHECKING:
    from ddprun_hooks.comm.communicator import Communicator
    from ddprun_hooks.payload import Payload

_ALLOWED_USE = (
    "an adapted DDP communication hook may call dist.all_reduce(…, async_op=True), chain with then(), and "
    "use index, buffer, set_buffer and gradients of its bucket; torch's for PowerSGD, quantisation and "
    "post-local SGD do more"
)


class DdpCommHook(Hook):
    """A DDP communication hook. Its all-reduces are sent like those of any other hook: in one order on all
    ranks, with their times and bytes recorded.

    Args:
        hook: as `register_comm_hook` takes it. Its first argument is a process group, as torch's own default
            hooks take it. It calls `dist.all_reduce` with `async_op=True` on that group, and chains what
            follows with `then`.
        rounds: the largest number of all-reduces that one bucket needs.
    """

    role = "reducer"

    def __init__(self, hook: Callable[[Any, Any], Future[Tensor]], rounds: int = 1) -> None:
        self.hook, self.rounds = hook, rounds

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        payload.tensor.mul_(comm.size)  # such a hook divides by itself
        group = _QueueingGroup(comm.rank, comm.size)
        try:
            mean = self.hook(group, _GradBucketStandIn(payload))
        except ExchangeError:
            raise
        except Exception as error:  # such as what `_GradBucketStandIn` or the group does not have
            raise ExchangeError(f"the hook fails: {type(error).__name__}: {error}; {_ALLOWED_USE}") from error
        while group.requests and not mean.done():
            tensor, future = group.requests.popleft()
            total = await comm.all_reduce(tensor)
            future.set_result([total])
        if not mean.done():
            raise ExchangeError(f"the hook waits for something other than its process group: {_ALLOWED_USE}")
        result: Any = mean.value()
        if group.requests:
            raise ExchangeError(f"the hook's result does not wait for all of its all-reduces: {_ALLOWED_USE}")
        return result.to(payload.tensor.dtype) if isinstance(result, Tensor) else result  # as DDP casts it


class _GradBucketStandIn:
    """What such a hook sees of `dist.GradBucket`."""

    def __init__(self, payload: Payload) -> None:
        self._payload, self._buffer = payload, payload.tensor

    def index(self) -> int:
        return self._payload.bucket

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        return [param.of(self._buffer).view(param.shape) for param in self._payload.params]


class _QueueingGroup(dist.ProcessGroup):
    """Keeps the all-reduces that it is asked for, each with the future of its result."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub names a store, too
        self.requests: deque[tuple[Tensor, Future[list[Tensor]]]] = deque()

    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[Tensor], options: Any = None
    ) -> dist.Work:
        if options is not None and options.reduceOp != dist.ReduceOp.SUM:
            raise ExchangeError(f"a sum only: {_ALLOWED_USE}")
        (tensor,) = tensors
        future = _ChainOnlyFuture()
        self.requests.append((tensor, future))
        return _FutureOnlyWork(future)


class _FutureOnlyWork(dist.Work):
    def __init__(self, future: Future[list[Tensor]]) -> None:
        super().__init__()
        self._future = future

    def get_future(self) -> Future[list[Tensor]]:
        return self._future

    def wait(self, timeout: object = None) -> bool:
        raise ExchangeError(f"the hook waits for an all-reduce: {_ALLOWED_USE}")


class _ChainOnlyFuture(Future[list[Tensor]]):
    def wait(self) -> list[Tensor]:
        raise ExchangeError(f"the hook waits for an all-reduce: {_ALLOWED_USE}")
