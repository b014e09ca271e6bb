"""Queues: how the coroutines of many buckets run at once without ever changing their order between ranks.

All ranks send the same buckets in the same order: DDP's layout is frozen before step 1, and what a sync
policy sends depends on the step alone. From there on the rule is: *a bucket may issue its k-th collective
among a group of ranks only when every earlier bucket of the queue has issued its k-th among that group or has
finished*, and the k-th collectives of a group travel on a process group of their own. Then each process group
sees the same collectives in the same order on every rank, however the ranks' threads are scheduled, and
however many collectives a rank has with other groups in between. Issuing the next collective "when the last
one is done" breaks this, and Gloo then sums the wrong tensors without an error.

A queue in host memory (`HostCommQueue`) is driven by whatever thread has an event: the backward pass that
brings a bucket, or the thread of the collective that has finished. A gradient bucket that needs one
collective is sent without an event: the backward pass that brings it issues the collective itself, so buckets
issue theirs in the order in which they are brought. On a GPU (`GpuCommQueue`) streams keep the order, so a
coroutine runs to its end at once.
"""

import atexit
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ddprun_hooks.comm.collective_observer import CollectiveHandle
from ddprun_hooks.comm.gpu import GpuStreams, StreamTimestamp
from ddprun_hooks.comm.groups import CollectiveRequest, RankGroup
from ddprun_hooks.comm.trace import BucketTrace, CollectiveTrace, HookSpan, now_us
from ddprun_hooks.errors import ExchangeError, fail_future
from ddprun_hooks.payload import Payload, dtype_name
from ddprun_hooks.stack import Stack, StackRun

_STREAM_COUNT = 4  # of a queue on a GPU: as many buckets are under way beside each other

_EMPTY_STACK = Stack([])

_CompletionCallback = Callable[[Future[Any]], Tensor | BaseException]


class HostCommQueue:
    """Drives payloads in host memory among the ranks of `world`, on whichever thread has an event;
    collectives overlap with the caller and with each other.
    """

    def __init__(self, world: RankGroup) -> None:
        self.world = world
        # What broke the queue. A broken queue fails every payload, so that no caller waits for ever.
        self.error: BaseException | None = None
        self._lock = threading.Lock()  # guards the two below; never held while anything else is called
        self._events: deque[tuple[_BucketInFlight, Tensor | BaseException | None]] = deque()
        self._driving = False
        self._in_flight: list[_BucketInFlight] = []  # unfinished, in the order in which they were sent
        self._training_thread = 0

    def send(
        self, payload: Payload, stack: Stack, traces: list[Any], group: RankGroup | None = None
    ) -> Future[Tensor]:
        """Send `payload` through a stack, over all ranks of the queue or those of `group`.

        The future holds the mean over ranks, in the payload's own memory. `traces` takes the payload's trace
        at once; it is complete when the future is.
        """
        entered = now_us()
        self._training_thread = threading.get_ident()
        group = group or self.world
        trace: BucketTrace[int] = new_trace(payload, stack, entered, among_all=group.size == self.world.size)
        traces.append(trace)
        bucket = _BucketInFlight(payload, stack, trace, stack.run(payload, group))
        with self._lock:
            alone = not (self._driving or self._events or self._in_flight)
        if alone and stack.max_collectives == 1 and payload.kind == "gradient":
            future = self._send_without_event(bucket)
        else:
            future = bucket.future = Future()
            self._post_and_drain_events(bucket, None)
        trace.handed_over = now_us()
        return future

    def start_all_reduce(self, payload: Payload, traces: list[Any]) -> "AllReduceInFlight":
        """Start to sum a gradient bucket over all ranks, without hooks; nothing else may be in the queue.

        Its trace is made after the start, in few calls: Python code that runs once in a step costs several
        times what it costs in a loop.
        """
        group, ready = self.world, now_us()
        request = CollectiveRequest(group, "all_reduce", payload.tensor, payload.tensor)
        pending = group.sequence(request, 0).record_issued(request.op, payload)
        with pending:
            work: Any = group.launch(request, 0)
        pending.set_completion_check(work.is_completed)

        def note_end(arrived: Future[Any]) -> int:
            now = now_us()
            with pending:
                arrived.value()  # raises what it has failed with
            return now

        done = work.get_future().then(await_callback_at_exit(note_end))
        collective = new_collective_trace(request, 0, ready)
        trace: BucketTrace[int] = new_trace(payload, _EMPTY_STACK, ready)
        trace.collectives.append(collective)
        traces.append(trace)
        trace.handed_over = now_us()
        return AllReduceInFlight(work, done, trace, collective, pending)

    def _send_without_event(self, bucket: "_BucketInFlight") -> Future[Tensor]:
        """Send a bucket of one collective, if no earlier bucket has collectives left to issue.

        What is left of its hooks runs in `then`: the collective's thread needs Python for nothing after it.
        One that sets a future itself wakes the training thread, and has to get Python's lock back from that
        only to return. An error reaches the waiter as text alone, which is all that DDP passes on anyway.
        """
        try:
            if self.error is not None:
                raise self.error
            collective = self._run_to_next_collective(bucket, None)
            if collective is None:
                future = Future[Tensor]()
                future.set_result(bucket.payload.tensor)
                return future
            done, complete = self._start_collective(bucket, collective)
        except BaseException as error:  # a hook may raise anything
            self.error, future = self.error or error, Future()
            fail_future(future, self.error)
            bucket.close()
            return future

        def finish(arrived: Future[Any]) -> Tensor:
            try:
                result = complete(arrived)
                if isinstance(result, BaseException):
                    raise result
                more = self._run_to_next_collective(bucket, result)
                if more is not None:
                    check_rounds(more, 1, 1, bucket.stack)
            except BaseException as error:
                self.error = self.error or error
                raise
            return bucket.payload.tensor

        return done.then(await_callback_at_exit(finish))

    def _post_and_drain_events(
        self, bucket: "_BucketInFlight", result: Tensor | BaseException | None
    ) -> None:
        """Handle an event of a bucket: it enters (None), or its collective's result or failure. If another
        thread is handling events, leave it to that one.

        `Future.add_done_callback` calls back at once when the work is done, on the very thread that is
        driving: it must find the lock free, and must not drive a second time.
        """
        with self._lock:
            self._events.append((bucket, result))
            if self._driving:
                return
            self._driving = True
        while True:
            with self._lock:
                if not self._events:
                    self._driving = False
                    return
                bucket, result = self._events.popleft()
            try:
                if isinstance(result, BaseException):
                    raise result
                self._on_event(bucket, result)
            except BaseException as error:  # a hook may raise anything
                self._fail_all(error)

    def _on_event(self, bucket: "_BucketInFlight", result: Tensor | None) -> None:
        """Let a bucket enter (None) or go on with its collective's result."""
        if result is None:
            self._in_flight.append(bucket)
        elif bucket.future.done():
            return
        if self.error is not None:
            raise self.error
        bucket.requested_collective = self._run_to_next_collective(bucket, result)
        if bucket.requested_collective is None:
            self._in_flight.remove(bucket)
            bucket.future.set_result(bucket.payload.tensor)
        self._issue_in_order()

    def _run_to_next_collective(
        self, bucket: "_BucketInFlight", result: Tensor | None
    ) -> CollectiveRequest | None:
        """Run a bucket's hooks to their next collective, or (None) to the end: the mean is in the payload."""
        start, trace = now_us(), bucket.trace
        collective = run_to_next_collective(bucket.run, result, bucket.payload, bucket.stack)
        if bucket.stack.names:  # plain all-reduce works on the wire alone
            on_training_thread = threading.get_ident() == self._training_thread
            phase = "encode" if collective is not None else "decode"
            trace.spans.append(HookSpan(start, now_us(), phase, on_training_thread))
        if collective is None:
            trace.done = now_us()
        return collective

    def _issue_in_order(self) -> None:
        """Issue every collective that the rule allows. It is enough to ask the unfinished bucket just before:
        that one issued its k-th only after the one before it had, and so on to the first.
        """
        before: _BucketInFlight | None = None
        for bucket in list(self._in_flight):
            collective = bucket.requested_collective
            if collective is not None:
                group = collective.group.name
                if before is None or before.issued_by_group[group] > bucket.issued_by_group[group]:
                    bucket.requested_collective = None
                    done, complete = self._start_collective(bucket, collective)
                    done.add_done_callback(
                        await_callback_at_exit(partial(self._on_collective_done, bucket, complete))
                    )
            before = bucket
            if self.error is not None:
                return

    def _on_collective_done(
        self, bucket: "_BucketInFlight", complete: "_CompletionCallback", future: Future[Any]
    ) -> None:
        self._post_and_drain_events(bucket, complete(future))

    def _start_collective(
        self, bucket: "_BucketInFlight", collective: CollectiveRequest
    ) -> tuple[Future[Any], "_CompletionCallback"]:
        """Start a collective; gives its future, and what notes its end and says what has come of it."""
        group, round_index = collective.group, bucket.issued_by_group[collective.group.name]
        available = group.shm_groups if collective.via_shared_memory else group.process_groups
        check_rounds(collective, round_index, len(available), bucket.stack)
        collective_trace = new_collective_trace(collective, round_index, now_us())
        bucket.trace.collectives.append(collective_trace)
        pending = group.sequence(collective, round_index).record_issued(collective.op, bucket.payload)
        with pending:
            work = group.launch(collective, round_index)
        bucket.issued_by_group[group.name] += 1

        def complete(future: Future[Any]) -> Tensor | BaseException:
            collective_trace.done = now_us()
            try:
                future.value()
            except BaseException as error:
                pending.mark_failed()
                return error
            pending.mark_done()
            return collective.output

        return work if isinstance(work, Future) else work.get_future(), complete

    def _fail_all(self, error: BaseException) -> None:
        """Fail everything in flight: a future that is never set would hang its waiter for ever."""
        self.error = self.error or error
        broken, self._in_flight = self._in_flight, []
        for bucket in broken:
            fail_future(bucket.future, self.error)
            bucket.close()


_CallbackT = TypeVar("_CallbackT", bound=Callable[..., Any])
_callbacks_to_await = set[weakref.ref[Any]]()  # that a future has not let go of
_EXIT_WAIT_S = 1.0  # for collectives that never end


def await_callback_at_exit(callback: _CallbackT) -> _CallbackT:
    """Give `callback` back; at exit, wait up to a second until nothing refers to it any more."""
    _callbacks_to_await.add(weakref.ref(callback, _callbacks_to_await.discard))
    return callback


@atexit.register
def _wait_for_callbacks() -> None:
    """Let Gloo's threads drop what they have called back: they take the GIL for it after the caller has gone
    on, and a C++ thread that asks for the GIL while the interpreter ends aborts the process.
    """
    end = time.monotonic() + _EXIT_WAIT_S
    while _callbacks_to_await and time.monotonic() < end:
        time.sleep(1e-3)


@dataclass(slots=True, eq=False)
class _BucketInFlight:
    payload: Payload
    stack: Stack
    trace: BucketTrace[int]
    run: StackRun
    future: Future[Tensor] = field(init=False)  # of one that is not sent at once
    issued_by_group: dict[str, int] = field(
        default_factory=partial(defaultdict, int)
    )  # collectives so far, by group
    requested_collective: CollectiveRequest | None = None  # asked for, not yet issued

    def close(self) -> None:
        """End the hooks where they are."""
        with suppress(BaseException):  # a hook's `finally` may raise anything, or await
            self.run.close()


class AllReduceInFlight(NamedTuple):
    """An all-reduce that `HostCommQueue.start_all_reduce` has started."""

    work: dist.Work
    done_us: Future[int]
    trace: BucketTrace[int]
    collective: CollectiveTrace[int]
    collective_handle: CollectiveHandle

    def complete_trace(self) -> None:
        """Write down when it was over; waits until it is."""
        self.collective.done = self.trace.done = self.done_us.wait()
        self.collective_handle.mark_done()


class GpuCommQueue:
    """Drives payloads on a GPU: each coroutine runs to its end at once, and only starts work on streams.

    A bucket has one of a few streams of high priority, always the same one. So the encoding of a bucket runs
    beside the collectives and the decoding of those before it, and what a hook keeps is used in the order of
    one stream. Collectives of a process group run in the order in which they were started; those of different
    rounds are on different groups where NCCL keeps an order between groups (`CommContext.open`). With
    NCCL nothing here waits on the host; with Gloo (several ranks on one GPU) each collective does.
    """

    def __init__(self, world: RankGroup, gpu: GpuStreams) -> None:
        self.world = world
        self.error: BaseException | None = None
        self.detailed_timing = True  # timestamps of hooks and collectives; else only ready and done
        self._gpu = gpu
        self._streams = [gpu.new_stream(urgent=True) for _ in range(_STREAM_COUNT)]

    def send(
        self, payload: Payload, stack: Stack, traces: list[Any], group: RankGroup | None = None
    ) -> Future[Tensor]:
        """As `HostCommQueue.send`; the future is set at once and carries the stream's events."""
        gpu, stream = self._gpu, self._streams[payload.bucket % _STREAM_COUNT]
        current = gpu.current_stream()
        ready = gpu.record_timestamp(current)
        group = group or self.world
        among_all = group.size == self.world.size
        trace: BucketTrace[StreamTimestamp] = new_trace(payload, stack, ready, among_all=among_all)
        trace.handed_over = ready
        traces.append(trace)
        future = gpu.new_future()
        stream.wait_event(ready.event)
        with gpu.use_stream(stream, current):
            gpu.record_stream(payload.tensor, stream)
            try:
                if self.error is not None:
                    raise self.error
                self._run(payload, stack, trace, group, stream)
            except BaseException as error:
                self.error = self.error or error
                fail_future(future, self.error)
            else:
                future.set_result(payload.tensor)
        return future

    def _run(
        self,
        payload: Payload,
        stack: Stack,
        trace: BucketTrace[StreamTimestamp],
        group: RankGroup,
        stream: torch.cuda.Stream,
    ) -> None:
        gpu, detailed, issued = self._gpu, self.detailed_timing, Counter[str]()
        with_spans = detailed and bool(stack.names)
        run = stack.run(payload, group)
        result: Tensor | None = None
        start = gpu.record_timestamp(stream) if with_spans else trace.ready
        pending_collectives: list[CollectiveHandle] = []
        while (collective := run_to_next_collective(run, result, payload, stack)) is not None:
            of_round, process_groups = issued[collective.group.name], collective.group.process_groups
            check_rounds(collective, of_round, len(process_groups), stack)
            round_index = process_groups.index(process_groups[of_round])  # the first that shares its group
            issued[collective.group.name] += 1
            launched = gpu.record_timestamp(stream) if detailed else start
            if with_spans:
                trace.spans.append(HookSpan(start, launched, "encode", False))
            trace.collectives.append(new_collective_trace(collective, round_index, launched))
            pending = collective.group.sequence(collective, round_index).record_issued(collective.op, payload)
            with pending:
                collective.group.launch(collective, round_index).wait()  # with NCCL, the stream alone waits
            if with_spans:
                trace.collectives[-1].done = start = gpu.record_timestamp(stream)
                pending.set_completion_check(start.has_passed)
            else:
                pending_collectives.append(pending)
            result = collective.output
        done = trace.done = gpu.record_timestamp(stream)
        if with_spans:
            trace.spans.append(HookSpan(start, done, "decode", False))
        for collective_trace in trace.collectives:
            collective_trace.done = collective_trace.done or done
        for pending in pending_collectives:
            pending.set_completion_check(done.has_passed)


CommQueue = HostCommQueue | GpuCommQueue


def new_trace(payload: Payload, stack: Stack, ready: Any, *, among_all: bool = True) -> BucketTrace[Any]:
    tensor = payload.tensor
    return BucketTrace(
        kind=payload.kind,
        bucket=payload.bucket,
        hooks=stack.names,
        dtype=dtype_name(tensor.dtype),
        numel=tensor.numel(),
        bytes=tensor.nbytes,
        params=payload.params,
        ready=ready,
        findings=payload.findings,
        among_all=among_all,
    )


def new_collective_trace(collective: CollectiveRequest, round_index: int, start: Any) -> CollectiveTrace[Any]:
    group = collective.group
    return CollectiveTrace(
        op=collective.op,
        group=f"{group.name}.{round_index}",
        dtype=dtype_name(collective.tensor.dtype),
        bytes=(collective.tensor if collective.op == "reduce_scatter" else collective.output).nbytes,
        wire_bytes=group.wire_bytes(collective),
        between_hosts_bytes=group.between_hosts_bytes(collective),
        start=start,
    )


def check_rounds(collective: CollectiveRequest, round_index: int, available: int, stack: Stack) -> None:
    """Raise ExchangeError if a stack asks for more collectives than it declared."""
    if round_index >= available:
        name = collective.group.name
        raise ExchangeError(
            f"hooks {list(stack.names)} ask for collective {round_index + 1} of one payload among the ranks "
            f'"{name}", but process groups were made for {available}: set `rounds` on the class of the hook '
            "to the most it needs"
        )


def run_to_next_collective(
    run: StackRun, result: Tensor | None, payload: Payload, stack: Stack
) -> CollectiveRequest | None:
    """Run a payload's hooks, with the result of their last collective, up to the next, or (None) to their
    end: the mean is in the payload's memory. Raises ExchangeError if a hook awaits anything else, or its mean
    has another shape or dtype.
    """
    try:
        awaited: object = run.send(result)
    except StopIteration as stop:
        _copy_mean_to_payload(cast(Tensor, stop.value), payload, stack)
        return None
    if not isinstance(awaited, CollectiveRequest):
        names = ", ".join(stack.custom_hooks)
        raise ExchangeError(
            f'hook "{names}" awaits {type(awaited).__name__}, which is not a collective; '
            "a hook awaits comm.reduce and the collectives of comm only"
        )
    return awaited


def _copy_mean_to_payload(mean: Tensor, payload: Payload, stack: Stack) -> None:
    target = payload.tensor
    if mean is target:
        return
    returned = f"hooks {list(stack.names)} returned"
    if not isinstance(mean, Tensor):
        raise ExchangeError(f"{returned} {type(mean).__name__} for bucket {payload.bucket}, not a tensor")
    if mean.shape != target.shape or mean.dtype != target.dtype:
        raise ExchangeError(
            f"{returned} {tuple(mean.shape)} of {mean.dtype} for bucket {payload.bucket}, which is "
            f"{tuple(target.shape)} of {target.dtype}"
        )
    if (mean.data_ptr(), mean.stride()) != (target.data_ptr(), target.stride()):
        target.copy_(mean)
