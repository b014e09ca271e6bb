"""Clocks: marks that cost next to nothing in a step and become microseconds afterwards.

The recorder and the dispatcher take marks while a step runs (`recorder.py`); `steps.resolve` reads them once
the step is over. `GradientTimes` takes more of them in backward, if the pipeline asks for that.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddprun_hooks.comm.trace import BucketTrace, now_us


class Clock:
    """Takes marks on the training thread's time line and turns them into microseconds later.

    This one is the CPU's: a mark is the monotonic clock itself.
    """

    lag = 0
    """How many steps after its own end a step's marks can be read without waiting for the current step."""

    mark: Callable[[], Any] = staticmethod(time.monotonic_ns)
    """Notes this moment: nanoseconds of the monotonic clock. No code of our own runs in the step."""

    def us(self, mark: Any) -> int:
        """A mark in whole microseconds of this rank's monotonic clock, as `now_us` gives them."""
        microseconds: int = mark // 1000
        return microseconds

    def times(self, marks: list[Any]) -> list[int]:
        """Many marks in microseconds."""
        return [mark // 1000 for mark in marks]

    def read(self, traces: Sequence[BucketTrace[Any]]) -> Sequence[BucketTrace[int]]:
        """Traces of buckets that have landed, their marks in microseconds."""
        return traces

    def in_hooks_us(self, trace: BucketTrace[Any]) -> int:
        """How long hooks ran on the training thread while a bucket was sent; it may not have landed yet."""
        assert trace.handed_over is not None, "a bucket that was sent has been handed over"
        in_hooks: int = trace.handed_over - trace.ready
        return in_hooks

    def rebase(self, mark: Any) -> None:
        """Measure later marks from this one, which has been read."""

    def synchronize(self) -> None:
        """Wait until the device has done all that was given to it."""

    def on_host(self, number: Tensor) -> Any:
        """A copy of a number, shape (), that can be read as soon as the step's last mark can."""
        return float(number.item())  # at once: steps were shorter than when the tensors were kept for a while

    def numbers(self, on_host: list[Any]) -> list[float]:
        """Read what `on_host` returned."""
        return on_host


class StreamClock(Clock):
    """Marks on a GPU's stream, which the training thread works on: CUDA events, so that nothing in the step
    waits for the device.

    An event is placed in time by its distance from the last base event. `cudaEventElapsedTime` gives
    milliseconds as a 32-bit float, so the base moves along with the steps that are resolved; `tie` ties it to
    the host's clock anew. Reading a mark waits until the device has passed it.
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
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def us(self, mark: torch.cuda.Event) -> int:
        return round(self._exact(mark))

    def times(self, marks: list[torch.cuda.Event]) -> list[int]:
        return [self.us(mark) for mark in marks]

    def read(self, traces: Sequence[BucketTrace[torch.cuda.Event]]) -> Sequence[BucketTrace[int]]:
        return [trace.mapped(self.us) for trace in traces]

    def in_hooks_us(self, trace: BucketTrace[torch.cuda.Event]) -> int:
        return 0  # of the device: hooks work on a stream of their own

    def rebase(self, mark: torch.cuda.Event) -> None:
        self._base_us = self._exact(mark)
        self._base = mark

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def on_host(self, number: Tensor) -> Tensor:
        # In page-locked memory; `.item()` would wait for all that is queued behind the number.
        return torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)

    def numbers(self, on_host: list[Tensor]) -> list[float]:
        numbers: list[float] = torch.stack(on_host).tolist() if on_host else []
        return numbers

    def _exact(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return self._base_us + 1000.0 * float(self._base.elapsed_time(mark))


def clock_for(device: torch.device) -> Clock:
    """The clock that sees what `device` does."""
    return StreamClock(device) if device.type == "cuda" else Clock()


class GradientTimes:
    """Marks when backward has accumulated each parameter's gradient: which one a bucket waited for.

    DDP counts a parameter as ready right after that, and sends its bucket with the last one
    (https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_post_accumulate_grad_hook.html).
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
