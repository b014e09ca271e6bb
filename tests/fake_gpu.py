"""A GPU that is none: streams with a time line each, over tensors in host memory."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from ddprun_hooks.comm.gpu import GpuStreams
from ddprun_hooks.comm.trace import now_us


class FakeStream:
    """Notes what it was told."""

    def __init__(self, log: list[tuple[str, ...]], name: str, priority: int = 0) -> None:
        self.log, self.name, self.priority = log, name, priority

    def wait_event(self, event: "FakeEvent") -> None:
        self.log.append((self.name, "waits for", event.stream))

    def wait_stream(self, other: "FakeStream") -> None:
        self.log.append((self.name, "waits for", other.name))


class FakeEvent:
    """An event that is over at once, at the device's time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self.us, self.stream, self.read = clock, 0.0, "", 0

    def record(self, stream: FakeStream) -> None:
        self.us, self.stream = self._clock(), stream.name

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def elapsed_time(self, other: "FakeEvent") -> float:
        other.read += 1
        return (other.us - self.us) / 1000


class FakeGpu(GpuStreams):
    """`clock` gives the device's time, in microseconds."""

    def __init__(self, clock: Callable[[], float] = lambda: float(now_us())) -> None:
        super().__init__(torch.device("cpu"))
        self.log: list[tuple[str, ...]] = []
        self.events_made = self.pinned_bytes = 0
        self.streams: list[FakeStream] = []
        self._clock, self._here = clock, threading.local()
        self.compute = FakeStream(self.log, "compute")

    def new_stream(self, *, urgent: bool = False) -> Any:
        self.streams.append(FakeStream(self.log, f"stream {len(self.streams)}", -1 if urgent else 0))
        return self.streams[-1]

    def current_stream(self) -> Any:
        return getattr(self._here, "stream", self.compute)

    @contextmanager
    def use_stream(self, stream: Any, current: Any = None) -> Iterator[None]:
        before = self.current_stream()
        assert current in (None, before)
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        self.log.append((stream.name, "uses", str(tensor.numel())))

    def _new_event(self) -> Any:
        self.events_made += 1
        return FakeEvent(self._clock)

    def device_guard(self) -> AbstractContextManager[None]:
        return nullcontext()

    def new_future(self) -> Future[Tensor]:
        return Future()

    def allocate_pinned(self, nbytes: int) -> Tensor:
        self.pinned_bytes += nbytes
        return torch.zeros(nbytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        return
