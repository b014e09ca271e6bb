"""What is special about NVIDIA GPUs, in one place: streams, events, and copies between host and device."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.futures import Future

_BLOCK_BYTES = 64 << 20
_ALIGNMENT_BYTES = 64  # where a tensor begins in a block, in bytes


class StreamTimestamp:
    """A moment on a stream: a CUDA event, or once that was read its time."""

    __slots__ = ("_event", "_gpu", "us")

    def __init__(self, event: torch.cuda.Event, gpu: "GpuStreams") -> None:
        self._event: torch.cuda.Event | None = event
        self._gpu = gpu  # whose event it is
        self.us: int | None = None  # microseconds of this rank's monotonic clock, once it was read

    @property
    def event(self) -> torch.cuda.Event:
        """The event; only while the timestamp was not read."""
        assert self._event is not None, "the timestamp was read"
        return self._event

    def has_passed(self) -> bool:
        """Whether the device has passed it: on any thread, without waiting, and once read without asking."""
        event = self._event
        if event is None:
            return True
        with self._gpu.device_guard():
            return bool(event.query())  # type: ignore[no-untyped-call]

    def resolve_time(self, us: int) -> None:
        """Note when it was; its event serves another one."""
        event, self.us, self._event = self.event, us, None
        self._gpu.return_event(event)


class GpuStreams:
    """One GPU, as this rank uses it. Events are used again: making one costs more than recording it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events: list[torch.cuda.Event] = []  # shared by threads; taken and given in one operation each

    def new_stream(self, *, urgent: bool = False) -> torch.cuda.Stream:
        """A new stream; what an `urgent` one has ready runs before the kernels of others that wait."""
        stream: torch.cuda.Stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            self.device, priority=-1 if urgent else 0
        )
        return stream

    def current_stream(self) -> torch.cuda.Stream:
        """The stream on which the calling thread works."""
        return torch.cuda.current_stream(self.device.index)  # torch takes twice as long to read a device

    @contextmanager
    def use_stream(
        self, stream: torch.cuda.Stream, current: torch.cuda.Stream | None = None
    ) -> Iterator[None]:
        """Inside, the calling thread works on `stream`. `current`: the one before, where it is known."""
        before = current or self.current_stream()
        torch.cuda.set_stream(stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(before)

    def record_stream(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that a stream uses another one's tensor, whose memory stays until it is done."""
        tensor.record_stream(stream)

    def record_timestamp(self, stream: torch.cuda.Stream | None = None) -> StreamTimestamp:
        """Note this moment of a stream; None: of the current one."""
        event = self.take_event()
        event.record(stream or self.current_stream())
        return StreamTimestamp(event, self)

    def take_event(self) -> torch.cuda.Event:
        """An event with a time, not recorded yet."""
        try:
            return self._events.pop()
        except IndexError:
            return self._new_event()

    def _new_event(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return event

    def return_event(self, event: torch.cuda.Event) -> None:
        """Keep an event that nobody needs any more for the next one who takes one."""
        self._events.append(event)

    def device_guard(self) -> AbstractContextManager[None]:
        """Inside, the calling thread asks this GPU; else it would make a large context on the first one."""
        context: AbstractContextManager[None] = torch.cuda.device(self.device)
        return context

    def new_future(self) -> Future[Tensor]:
        """A future to be completed on the current stream, for which its waiter's own stream then waits."""
        return Future(devices=[self.device])

    def allocate_pinned(self, nbytes: int) -> Tensor:
        """Page-locked host memory, to and from which a GPU copies while it computes: uint8, (nbytes,)."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def copy_scalar_to_host(number: Tensor) -> Tensor:
    """A copy of a number, shape (), in pinned memory, valid once the current stream has come so far."""
    return torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)


class DeferredScalar:
    """A number, shape (), that is read later; a GPU then has to have come as far as when this was made."""

    def __init__(self, number: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copy = copy_scalar_to_host(number) if number.is_cuda else number.clone()
        if number.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(number.device))

    def read(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return float(self._copy)


class CopyStream:
    """Copies from the host to a GPU on a stream of their own, beside what it computes."""

    def __init__(self, gpu: GpuStreams) -> None:
        self._gpu, self._stream = gpu, gpu.new_stream()
        self._moved: list[Tensor] = []

    def copy_to_gpu(self, tensor: Tensor) -> Tensor:
        """Start to copy a tensor, unless it is there; `block_current_stream` comes before it is used."""
        with self._gpu.use_stream(self._stream):
            moved = tensor.to(self._gpu.device, non_blocking=True)
        if moved is not tensor:
            self._moved.append(moved)
        return moved

    def block_current_stream(self) -> None:
        """Have the current stream wait for all copies that were started."""
        if self._moved:
            current = self._gpu.current_stream()
            current.wait_stream(self._stream)
            for moved in self._moved:
                self._gpu.record_stream(moved, current)
            self._moved.clear()


class PinnedStaging:
    """Pinned memory through which tensors reach the host; kept, for pinning takes longer than copying."""

    def __init__(self, gpu: GpuStreams) -> None:
        self._gpu, self._stream, self._done = gpu, gpu.new_stream(), gpu.take_event()
        self._in_use_lock = threading.Lock()
        self._blocks: list[Tensor] = []
        self._next_free: tuple[int, int] = 0, 0  # block, and offset in it, from which on there is room

    def try_acquire(self) -> bool:
        """Start to copy; False: what was copied before is still in use."""
        if not self._in_use_lock.acquire(blocking=False):
            return False
        self._next_free = 0, 0
        self._stream.wait_stream(self._gpu.current_stream())
        return True

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy in host memory of the same shape and dtype, complete after `wait`."""
        source = tensor.detach()
        target = self._allocate(source.numel() * source.element_size()).view(source.dtype).view(source.shape)
        with self._gpu.use_stream(self._stream):
            target.copy_(source, non_blocking=True)
        return target

    def block_current_stream(self) -> None:
        """All copies were started; later work of the current stream, which may overwrite, waits for them."""
        self._done.record(self._stream)
        self._gpu.current_stream().wait_event(self._done)

    def wait(self) -> None:
        """Wait for the copies; on any thread."""
        with self._gpu.device_guard():
            self._done.synchronize()

    def release(self) -> None:
        """The copies are not needed any more: their memory serves the next ones."""
        self._in_use_lock.release()

    def _allocate(self, nbytes: int) -> Tensor:
        """The next `nbytes` of the blocks, of which there are as many as were ever needed."""
        block, start = self._next_free
        while block < len(self._blocks) and start + nbytes > self._blocks[block].numel():
            block, start = block + 1, 0
        if block == len(self._blocks):
            self._blocks.append(self._gpu.allocate_pinned(max(nbytes, _BLOCK_BYTES)))
        self._next_free = block, -(-(start + nbytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return self._blocks[block][start : start + nbytes]
