"""Clocks: marks that cost next to nothing in a step and become microseconds afterwards.

The recorder and the dispatcher take marks while a step runs (`recorder.py`); `resolve_step_marks` reads them
once the step is over. `GradientTimes` takes more of them in backward, if the pipeline asks for that.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddprun_hooks.comm.gpu import GpuStreams, StreamTimestamp, copy_scalar_to_host
from ddprun_hooks.comm.trace import BucketTrace, now_us

_MAX_DRIFT_RATE = 1e-3  # how much faster or slower than the device's the time of marks may run


class Clock:
    """Takes marks on the training thread's time line and turns them into microseconds later. This one is the
    CPU's: a mark is the monotonic clock itself.
    """

    lag_steps = 0
    """How many steps after its own end a step's marks can be read without waiting for the current step."""

    mark: Callable[[], Any] = staticmethod(time.monotonic_ns)
    """Notes this moment: nanoseconds of the monotonic clock. No code of our own runs in the step."""

    def mark_to_us(self, mark: Any) -> int:
        """A mark in whole microseconds of this rank's monotonic clock, as `now_us` gives them."""
        microseconds: int = mark // 1000
        return microseconds

    def marks_to_us(self, marks: list[Any]) -> list[int]:
        return [mark // 1000 for mark in marks]

    def read_traces(self, traces: Sequence[BucketTrace[Any]]) -> Sequence[BucketTrace[int]]:
        """Traces of buckets that have been waited for, their marks in microseconds."""
        return traces

    def training_thread_hook_us(self, trace: BucketTrace[Any]) -> int:
        """Time that hooks took on the training thread while this bucket, maybe still in flight, was sent."""
        assert trace.handed_over is not None, "a bucket that was sent has been handed over"
        in_hooks: int = trace.handed_over - trace.ready
        return in_hooks

    def reanchor(self) -> None:
        """Tie the device's clock to the host's again; on a CPU there is nothing to tie."""

    def synchronize(self) -> None:
        """Wait until the device has done all that was given to it."""

    def device_bytes(self) -> int | None:
        """Memory that torch's allocator holds on the device; None on a CPU."""
        return None

    def copy_to_host(self, number: Tensor) -> Any:
        """A copy of a number, shape (), that can be read as soon as the step's last mark can."""
        return float(number.item())  # at once: steps were shorter than when the tensors were kept for a while

    def read_numbers(self, copied: list[Any]) -> list[float]:
        """Read what `copy_to_host` returned."""
        return copied


class StreamClock(Clock):
    """Marks on a GPU's stream, which the training thread works on: CUDA events, so that nothing in the step
    waits for the device.

    An event is placed in time by its distance from a base event. `cudaEventElapsedTime` gives milliseconds
    as a 32-bit float, so the base moves along with the steps that are resolved. A base is recorded on a
    stream that does nothing else, between two looks at the host's clock: what the device's clock has drifted
    since the last base is taken back within a second, so that time never jumps. Reading a mark waits until
    the device has passed it; each is read once.
    """

    lag_steps = 2

    def __init__(self, gpu: GpuStreams) -> None:
        self._gpu, self._idle = gpu, gpu.new_stream()
        self._base, self._base_us = self._base_event()
        self._rate = 1.0  # microseconds of the host's clock for one of the device's

    def mark(self) -> StreamTimestamp:
        return self._gpu.record_timestamp()

    def mark_to_us(self, mark: StreamTimestamp | int) -> int:
        if isinstance(mark, int):
            return mark  # read ahead
        if mark.us is None:
            event = mark.event
            if not event.query():  # type: ignore[no-untyped-call]
                event.synchronize()  # it releases the GIL, and to get that back may take long
            mark.resolve_time(round(self._time_of(event)))
        assert mark.us is not None
        return mark.us

    def marks_to_us(self, marks: list[StreamTimestamp | int]) -> list[int]:
        return [self.mark_to_us(mark) for mark in marks]

    def read_traces(self, traces: Sequence[BucketTrace[Any]]) -> Sequence[BucketTrace[int]]:
        return [
            trace if isinstance(trace.ready, int) else trace.convert_times_to_us(self.mark_to_us)
            for trace in traces
        ]

    def training_thread_hook_us(self, trace: BucketTrace[Any]) -> int:
        return 0  # of the device: hooks work on streams of their own

    def reanchor(self) -> None:
        event, host_us = self._base_event()
        device_us = self._time_of(event)
        self._gpu.return_event(self._base)
        self._base, self._base_us = event, device_us
        drift_us = host_us - device_us
        self._rate = 1.0 + max(-_MAX_DRIFT_RATE, min(_MAX_DRIFT_RATE, drift_us / 1e6))

    def synchronize(self) -> None:
        self._gpu.synchronize()

    def device_bytes(self) -> int | None:
        return torch.cuda.memory_reserved(self._gpu.device)

    def copy_to_host(self, number: Tensor) -> Tensor:
        return copy_scalar_to_host(number)  # `.item()` would wait for all that is queued behind the number

    def read_numbers(self, copied: list[Tensor]) -> list[float]:
        numbers: list[float] = torch.stack(copied).tolist() if copied else []
        return numbers

    def _base_event(self) -> tuple[torch.cuda.Event, float]:
        """An event that is over, and the host's time of it."""
        event = self._gpu.take_event()
        before = now_us()
        event.record(self._idle)
        event.synchronize()
        return event, (before + now_us()) / 2

    def _time_of(self, event: torch.cuda.Event) -> float:
        return self._base_us + self._rate * 1000.0 * float(self._base.elapsed_time(event))


def clock_for(device: torch.device) -> Clock:
    """The clock that sees what `device` does."""
    return StreamClock(GpuStreams(device)) if device.type == "cuda" else Clock()


class GradientTimes:
    """Marks when backward has accumulated each parameter's gradient: which one a bucket waited for.

    DDP counts a parameter as ready right after that, and sends its bucket with the last one
    (https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_post_accumulate_grad_hook.html).
    """

    def __init__(self, model: nn.Module, mark: Callable[[], Any]) -> None:
        self.enabled = True  # of this step
        self._mark = mark
        self._marks: dict[str, Any] = {}
        for name, param in model.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(self._note, name))  # type: ignore[no-untyped-call]

    def take(self) -> dict[str, Any]:
        """The newest mark of each parameter that had one since the last call."""
        marks, self._marks = self._marks, {}
        return marks

    def _note(self, name: str, param: Tensor) -> None:
        if self.enabled:
            self._marks[name] = self._mark()
