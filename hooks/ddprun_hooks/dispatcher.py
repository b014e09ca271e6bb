"""The one communication hook that DDP ever sees; stages switch the stack behind it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddprun_hooks.errors import ExchangeError
from ddprun_hooks.flight import Flight, dtype_name
from ddprun_hooks.lane import Lane, fail
from ddprun_hooks.payload import ParamSlice, Payload
from ddprun_hooks.stack import Stack


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Which parameters' gradients lie where in one bucket."""

    index: int
    dtype: str
    numel: int
    params: tuple[ParamSlice, ...]


class Dispatcher:
    """Carries DDP's gradient buckets through a stack that can be changed between steps.

    DDP takes a communication hook once in a model's life
    (https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html); this is the one it gets.

    Args:
        model: the wrapped model; no hook may be registered yet.
        lane: where gradient buckets travel.
        stack: the hooks to start with.
    """

    def __init__(self, model: DistributedDataParallel, lane: Lane, stack: Stack) -> None:
        self.stack = stack
        self.scale: Tensor | None = None
        """Loss scale to divide gradients by before the stack sees them (GradScaler); shape (), or None."""

        self.flights: list[Flight[Any]] | None = None
        """Takes the record of each bucket's journey; None: nobody wants them."""

        self._lane = lane
        self._names: Mapping[int, str] = {id(param): name for name, param in model.module.named_parameters()}
        self._layout: dict[int, BucketLayout] = {}
        self._frozen = False
        self._share = 1.0 / lane.world.size
        model.register_comm_hook(None, self._on_bucket)

    @property
    def layout(self) -> tuple[BucketLayout, ...]:
        """The buckets, in the order in which backward fills them; empty before they are known."""
        return tuple(self._layout[index] for index in sorted(self._layout))

    @property
    def error(self) -> BaseException | None:
        """What broke the exchange, as it was raised; DDP itself passes on no more than its text."""
        return self._lane.error

    @contextmanager
    def learning_layout(self) -> Iterator[None]:
        """Inside, backward passes exchange nothing and the last one's buckets become the layout."""
        self._frozen = False
        try:
            yield
        finally:
            self._frozen = True

    # DDP looks at this signature: a parameter named `bucket`, and annotations that are types, not strings.
    def _on_bucket(
        self,
        state: object,
        bucket: dist.GradBucket,
    ) -> torch.futures.Future[Tensor]:
        buffer, index = bucket.buffer(), bucket.index()
        if not self._frozen:
            self._learn(bucket)
            return _already(buffer)
        layout = self._layout.get(index)
        if layout is None or buffer.numel() != layout.numel:
            error = ExchangeError(
                f"bucket {index} has {buffer.numel()} elements, but the layout frozen before step 1 says "
                f"{layout.numel if layout else 'that there is none'}: DDP has rebuilt its buckets in mid-run"
            )
            self._lane.error = self._lane.error or error
            return _failed(error)
        buffer.mul_(self._share)
        if self.scale is not None:
            buffer.div_(self.scale)
        flights = self.flights if self.flights is not None else []
        return self._lane.send(Payload(buffer, layout.params, "gradient", index), self.stack, flights)

    def _learn(self, bucket: dist.GradBucket) -> None:
        index, offset, params = bucket.index(), 0, []
        if index == 0:
            self._layout = {}
        for param in bucket.parameters():
            params.append(ParamSlice(self._names[id(param)], tuple(param.shape), offset, param.numel()))
            offset += param.numel()
        buffer = bucket.buffer()
        self._layout[index] = BucketLayout(index, dtype_name(buffer.dtype), buffer.numel(), tuple(params))


def _already(tensor: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[tensor.device] if tensor.device.type == "cuda" else None
    )
    future.set_result(tensor)
    return future


def _failed(error: Exception) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    fail(future, error)
    return future
