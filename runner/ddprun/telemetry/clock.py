"""Clocks: marks that cost next to nothing in a step and become microseconds afterwards.

The recorder and the dispatcher take marks while a step runs (`recorder.py`); `steps.resolve` reads them once
the step is over. `GradientTimes` takes more of them in backward, if the pipeline asks for that.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddprun_hooks.comm.trace import BucketTrace, now_us


class Clock(Protocol):
    """Takes marks on the training thread's time line and turns them into microseconds later."""

    lag: int
    """How many steps after its own end a step's marks can be read without waiting for the current step."""

    def mark(self) -> Any:
        """Note this moment."""

    def us(self, mark: Any) -> int:
        """A mark in microseconds of this rank's monotonic clock."""

    def times(self, marks: list[Any]) -> list[int]:
        """Many marks in microseconds."""

    def read(self, traces: Sequence[BucketTrace[Any]]) -> Sequence[BucketTrace[int]]:
        """Traces of buckets that have landed, their marks in microseconds."""

    def in_hooks_us(self, trace: BucketTrace[Any]) -> int:
        """How long hooks ran on the training thread while a bucket was sent; it may not have landed yet."""

    def rebase(self, mark: Any) -> None:
        """Measure later marks from this one, which has been read."""

    def synchronize(self) -> None:
        """Wait until the device has done all that was given to it."""

    def on_host(self, number: Tensor) -> Any:
        """A copy of a number, shape (), that can be read as soon as the step's last mark can."""

    def numbers(self, on_host: list[Any]) -> list[float]:
        """Read what `on_host` returned."""


class HostClock:
    """Marks on the CPU: the monotonic clock itself."""

    lag = 0

    mark = staticmethod(time.monotonic_ns)
    """Nanoseconds of the monotonic clock: no code of our own runs in the step."""

    def us(self, mark: int) -> int:
        """Whole microseconds, as `now_us` gives them."""
        return mark // 1000

    def times(self, marks: list[int]) -> list[int]:
        """Whole microseconds."""
        return [mark // 1000 for mark in marks]

    def read(self, traces: Sequence[BucketTrace[int]]) -> Sequence[BucketTrace[int]]:
        """The traces themselves."""
        return traces

    def in_hooks_us(self, trace: BucketTrace[int]) -> int:
        """From the hook's call to its return."""
        assert trace.handed_over is not None, "a bucket that was sent has been handed over"
        return trace.handed_over - trace.ready

    def rebase(self, mark: int) -> None:
        """Nothing to do: every mark is absolute."""

    def synchronize(self) -> None:
        """Nothing to do: every operation has ended when it returns."""

    def on_host(self, number: Tensor) -> float:
        """Read at once: steps were shorter than when the tensors were kept for a while."""
        return float(number.item())

    def numbers(self, on_host: list[float]) -> list[float]:
        """The numbers themselves."""
        return on_host


class StreamClock:
    """Marks on a GPU's stream: CUDA events, so that nothing in the step waits for the device.

    An event is placed in time by its distance from the last base event. `cudaEventElapsedTime` gives
    milliseconds as a 32-bit float, so the base moves along with the steps that are resolved; `tie` ties it to
    the host's clock anew.

    Args:
        device: the GPU whose current stream the training thread works on.
    """

    lag = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.tie()

    def tie(self) -> None:
        """Tie the device's time to the host's: waits for the device once."""
        self._base = self.mark()
        self._base.synchronize()
        self._base_us = float(now_us())

    def mark(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def us(self, mark: torch.cuda.Event) -> int:
        """Waits until the device has passed the event."""
        return round(self._exact(mark))

    def times(self, marks: list[torch.cuda.Event]) -> list[int]:
        """Waits until the device has passed the last event."""
        return [self.us(mark) for mark in marks]

    def read(self, traces: Sequence[BucketTrace[torch.cuda.Event]]) -> Sequence[BucketTrace[int]]:
        """Waits until the device has passed the last event."""
        return [trace.mapped(self.us) for trace in traces]

    def in_hooks_us(self, trace: BucketTrace[torch.cuda.Event]) -> int:
        """None of the device's: hooks work on a stream of their own."""
        return 0

    def rebase(self, mark: torch.cuda.Event) -> None:
        """Measure later events from this one."""
        self._base_us = self._exact(mark)
        self._base = mark

    def synchronize(self) -> None:
        """Synchronize the device."""
        torch.cuda.synchronize(self._device)

    def on_host(self, number: Tensor) -> Tensor:
        """A copy in page-locked memory; `.item()` would wait for all that is queued behind the number."""
        return torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)

    def numbers(self, on_host: list[Tensor]) -> list[float]:
        """All at once."""
        numbers: list[float] = torch.stack(on_host).tolist() if on_host else []
        return numbers

    def _exact(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return self._base_us + 1000.0 * float(self._base.elapsed_time(mark))


def clock_for(device: torch.device) -> HostClock | StreamClock:
    """The clock that sees what `device` does."""
    return StreamClock(device) if device.type == "cuda" else HostClock()


class GradientTimes:
    """Marks when backward has accumulated each parameter's gradient: which one a bucket waited for.

    DDP counts a parameter as ready right after that, and sends its bucket with the last one
    (https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_post_accumulate_grad_hook.html).

    Args:
        model: whose parameters.
        mark: of the recorder's clock.
    """

    def __init__(self, model: nn.Module, mark: Callable[[], Any]) -> None:
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
        self._marks[name] = self._mark()
