"""Lanes: how the coroutines of many buckets travel at once without ever changing their order between ranks.

The rule: *a bucket may issue its k-th collective among a team of ranks only when every earlier bucket of the
lane has issued its k-th among that team or has finished*, and the k-th collectives of a team travel on a
process group of their own. Then each group sees the same collectives in the same order on every rank of the
team, however the ranks' threads are scheduled, and however many collectives a rank has with other teams in
between. Issuing the next leg "when the last one is done" breaks this, and Gloo then sums the wrong tensors
without an error.

A lane in host memory (`HostLane`) is driven by whatever thread has news: the backward pass that brings a
bucket, or the thread of the collective that has finished. On a GPU (`StreamLane`) the stream keeps the order,
so a coroutine is run through at once.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ddprun_hooks.channel import Channel, Collective
from ddprun_hooks.errors import ExchangeError
from ddprun_hooks.flight import Flight, Leg, Slice, dtype_name, now_us
from ddprun_hooks.payload import Payload
from ddprun_hooks.stack import Stack
from ddprun_hooks.team import SharedWork, Team, nbytes
from ddprun_hooks.uncounted import noting

Route = Generator[Collective, Tensor | None, Tensor]


class HostLane:
    """Drives payloads in host memory; collectives overlap with the caller and with each other.

    Args:
        world: the ranks that exchange, with a group for each round.
    """

    def __init__(self, world: Team) -> None:
        self.world = world
        self.error: BaseException | None = None
        """What broke the lane. A broken lane fails every payload, so that no caller waits for ever."""

        self._lock = threading.Lock()  # guards the three below; never held while anything else is called
        self._news: deque[Callable[[], None]] = deque()
        self._driving = False
        self._under_way: list[_Journey] = []  # unfinished, in the order in which they were sent
        self._training_thread = 0

    def send(
        self, payload: Payload, stack: Stack, flights: list[Any], team: Team | None = None
    ) -> Future[Tensor]:
        """Start `payload` on its way; the future holds the mean over ranks.

        Args:
            payload: its tensor's memory receives the mean.
            stack: the hooks to go through.
            flights: takes the record of this journey, at once; it is complete when the future is.
            team: the ranks that exchange; None: all of the lane's.
        """
        entered = now_us()
        self._training_thread = threading.get_ident()
        flight: Flight[int] = new_flight(payload, stack, entered)
        flights.append(flight)
        journey = _Journey(payload, stack, team or self.world, flight)
        self._tell(lambda: self._set_out(journey))
        flight.handed_over = now_us()
        return journey.future

    def _tell(self, news: Callable[[], None]) -> None:
        """Have `news` handled, here or by the thread that is driving already.

        `Future.add_done_callback` calls back at once when the work is done, on the very thread that is
        driving: it must find the lock free, and must not drive a second time.
        """
        with self._lock:
            self._news.append(news)
            if self._driving:
                return
            self._driving = True
        while True:
            with self._lock:
                if not self._news:
                    self._driving = False
                    return
                news = self._news.popleft()
            try:
                news()
            except BaseException as error:
                self._break(error)

    def _set_out(self, journey: "_Journey") -> None:
        self._under_way.append(journey)
        self._go_on(journey, None)

    def _go_on(self, journey: "_Journey", result: Tensor | None) -> None:
        """Run a journey's hooks up to their next collective or to the end."""
        if journey.future.done():
            return
        if self.error is not None:
            self._break(self.error)
            return
        start = now_us()
        try:
            wanted = next_collective(journey.route, result, journey.stack, journey.flight)
        except StopIteration as stop:
            self._finish(journey, cast(Tensor, stop.value), start)
        except BaseException as error:  # a hook may raise anything, and nobody may be left waiting
            self._break(error)
        else:
            journey.note_work(start, "encode", self._on_training_thread())
            journey.wanted = wanted
            self._issue_in_order()

    def _issue_in_order(self) -> None:
        """Issue every collective whose turn it is."""
        before: _Journey | None = None
        for journey in list(self._under_way):
            wanted = journey.wanted
            if wanted is not None:
                team = wanted.team.name
                if before is None or before.issued[team] > journey.issued[team]:
                    self._issue(journey, wanted)
            before = journey
            if self.error is not None:
                return

    def _issue(self, journey: "_Journey", wanted: Collective) -> None:
        journey.wanted = None
        issued, team = journey.issued, wanted.team.name
        leg = new_leg(wanted, issued[team], now_us())
        journey.flight.legs.append(leg)
        ticket = wanted.team.line(wanted, issued[team]).issue(wanted.op, journey.payload)
        try:
            work = launch(wanted, issued[team], journey.stack)
            issued[team] += 1
            done = work.get_future()
        except BaseException as error:
            self._break(error)
            return

        def arrived(future: Future[Any]) -> None:
            leg.done = now_us()
            try:
                future.value()
            except BaseException as error:
                failure = error
                ticket.broke()
                self._tell(lambda: self._break(failure))
            else:
                ticket.done()
                self._tell(lambda: self._go_on(journey, wanted.output))

        done.add_done_callback(arrived)

    def _finish(self, journey: "_Journey", mean: Tensor, start: int) -> None:
        try:
            put_back(mean, journey.payload, journey.stack)
        except ExchangeError as error:
            self._break(error)
            return
        journey.note_work(start, "decode", self._on_training_thread())
        journey.flight.done = now_us()
        self._under_way.remove(journey)
        journey.future.set_result(journey.payload.tensor)
        self._issue_in_order()

    def _break(self, error: BaseException) -> None:
        """Fail everything that is under way: a future that is never set would hang its waiter for ever."""
        if self.error is None:
            self.error = error
        broken, self._under_way = self._under_way, []
        for journey in broken:
            journey.route.close()
            fail(journey.future, self.error)

    def _on_training_thread(self) -> bool:
        return threading.get_ident() == self._training_thread


class _Journey:
    """One payload under way in a `HostLane`."""

    __slots__ = ("flight", "future", "issued", "payload", "route", "stack", "wanted")

    def __init__(self, payload: Payload, stack: Stack, world: Team, flight: Flight[int]) -> None:
        self.payload = payload
        self.stack = stack
        self.flight = flight
        self.route = route_of(payload, stack, world)
        self.future: Future[Tensor] = Future()
        self.issued: Counter[str] = Counter()  # collectives issued so far, by team
        self.wanted: Collective | None = None  # asked for, not yet issued

    def note_work(self, start: int, phase: str, on_training_thread: bool) -> None:
        self.flight.slices.append(Slice(start, now_us(), phase, on_training_thread))


class StreamLane:
    """Drives payloads on a GPU: each coroutine is run through at once on a communication stream.

    The stream keeps collectives in order, so one process group serves every round. With NCCL nothing here
    waits on the host; with Gloo (several ranks on one GPU) each collective does.

    Args:
        world: the ranks that exchange; only its first group is used.
        device: the GPU of this rank.
    """

    def __init__(self, world: Team, device: torch.device) -> None:
        self.world = world
        self.error: BaseException | None = None
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(
        self, payload: Payload, stack: Stack, flights: list[Any], team: Team | None = None
    ) -> Future[Tensor]:
        """As `HostLane.send`; the future is set at once and carries the stream's events."""
        flight: Flight[torch.cuda.Event] = new_flight(
            payload, stack, self._mark(torch.cuda.current_stream(self._device))
        )
        flights.append(flight)
        future: Future[Tensor] = Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            payload.tensor.record_stream(self._stream)
            try:
                if self.error is not None:
                    raise self.error
                self._run(payload, stack, flight, team or self.world)
            except BaseException as error:
                self.error = self.error or error
                fail(future, self.error)
            else:
                flight.done = self._mark(self._stream)
                future.set_result(payload.tensor)
        flight.handed_over = flight.ready
        return future

    def _run(self, payload: Payload, stack: Stack, flight: Flight[torch.cuda.Event], team: Team) -> None:
        route = route_of(payload, stack, team)
        result: Tensor | None = None
        start = self._mark(self._stream)
        while True:
            try:
                wanted = next_collective(route, result, stack, flight)
            except StopIteration as stop:
                put_back(cast(Tensor, stop.value), payload, stack)
                flight.slices.append(Slice(start, self._mark(self._stream), "decode", False))
                return
            launched = self._mark(self._stream)
            flight.slices.append(Slice(start, launched, "encode", False))
            leg = new_leg(wanted, 0, launched)
            flight.legs.append(leg)
            ticket = wanted.team.line(wanted, 0).issue(wanted.op, payload)
            launch(wanted, 0, stack).wait()
            leg.done = start = self._mark(self._stream)
            ticket.done_when(start.query)  # with NCCL, `wait` waits on the stream alone
            result = wanted.output

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


Lane = HostLane | StreamLane


def new_flight(payload: Payload, stack: Stack, ready: Any) -> Flight[Any]:
    """The record of a journey that is about to start."""
    tensor = payload.tensor
    return Flight(
        kind=payload.kind,
        bucket=payload.bucket,
        hooks=stack.names,
        dtype=dtype_name(tensor.dtype),
        numel=tensor.numel(),
        bytes=nbytes(tensor),
        params=payload.params,
        ready=ready,
        findings=payload.findings,
    )


def new_leg(wanted: Collective, round_index: int, start: Any) -> Leg[Any]:
    """The record of a collective that is about to start."""
    team = wanted.team
    return Leg(
        op=wanted.op,
        group=f"{team.name}.{round_index}",
        dtype=dtype_name(wanted.tensor.dtype),
        bytes=nbytes(wanted.tensor if wanted.op == "reduce_scatter" else wanted.output),
        wire_bytes=team.wire_bytes(wanted),
        between_hosts_bytes=team.between_hosts_bytes(wanted),
        start=start,
    )


def launch(wanted: Collective, round_index: int, stack: Stack) -> dist.Work | SharedWork:
    """Start a collective on its team.

    Raises:
        ExchangeError: the stack asks for more rounds than it declared.
    """
    team = wanted.team
    available = len(team.arenas if wanted.shared else team.groups)
    if round_index >= available:
        raise ExchangeError(
            f"hooks {list(stack.names)} asked for collective {round_index + 1} of one payload, but process "
            f'groups were made for {available} (of the ranks "{team.name}"): set `rounds` on the class of '
            "the hook to the most it needs"
        )
    return team.launch(wanted, round_index)


def route_of(payload: Payload, stack: Stack, world: Team) -> Route:
    """The coroutine of one payload, seen as what it is: a generator of collectives."""
    return cast(Route, stack.run(payload, Channel(world)))


def next_collective(route: Route, result: Tensor | None, stack: Stack, flight: Flight[Any]) -> Collective:
    """Run a payload's hooks up to their next collective.

    Args:
        route: of the payload.
        result: of the collective before.
        stack: the hooks.
        flight: takes note of collectives that hooks issue by themselves.

    Raises:
        StopIteration: they are through; its value is the mean.
        ExchangeError: a hook awaits something that is no collective.
    """
    if stack.foreign:
        wanted = noting(partial(route.send, result), stack.foreign, flight.uncounted)
    else:
        wanted = route.send(result)
    if not isinstance(wanted, Collective):
        names = ", ".join(name for name, _ in stack.foreign)
        raise ExchangeError(
            f'hook "{names}" awaits {type(wanted).__name__}, which is no collective; '
            "a hook awaits link.hand_on and the collectives of link.world only"
        )
    return wanted


def put_back(mean: Tensor, payload: Payload, stack: Stack) -> None:
    """Write what the hooks made into the payload's own memory.

    Raises:
        ExchangeError: another shape or dtype than the payload's. DDP itself would take it without a word.
    """
    target, what = payload.tensor, f"bucket {payload.bucket}"
    if not isinstance(mean, Tensor):
        raise ExchangeError(
            f"hooks {list(stack.names)} returned {type(mean).__name__} for {what}, not a tensor"
        )
    if mean.shape != target.shape or mean.dtype != target.dtype:
        raise ExchangeError(
            f"hooks {list(stack.names)} returned {tuple(mean.shape)} of {mean.dtype} for {what}, "
            f"which is {tuple(target.shape)} of {target.dtype}"
        )
    if mean.data_ptr() != target.data_ptr():
        target.copy_(mean)


def fail(future: Future[Tensor], error: BaseException) -> None:
    """Give a future's waiter `error`."""
    exception = error if isinstance(error, Exception) else RuntimeError(repr(error))
    future.set_exception(exception)  # type: ignore[arg-type]  # torch's stub wants the future's own type here
