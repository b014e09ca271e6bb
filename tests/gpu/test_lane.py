"""What a rank does on its GPU: streams, waits, copies, clocks. One process over NCCL, or ranks over Gloo."""

import os
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddprun_hooks
from ddprun.engine.objective import Precision
from ddprun.telemetry.clock import StreamClock
from ddprun_hooks import Communicator, Payload
from ddprun_hooks.comm.control_channel import open_control_channel
from ddprun_hooks.comm.gpu import CopyStream, GpuStreams, PinnedStaging
from ddprun_hooks.comm.groups import RankPlacement
from ddprun_hooks.comm.trace import now_us
from ddprun_hooks.comm_context import CommContext
from ddprun_hooks.comm_queue import GpuCommQueue
from ddprun_hooks.registry import AnyHook, make_stack
from ddprun_hooks.stack import Stack
from ddprun_hooks.testing import PARAMS, contribution
from tests.gpu.conftest import Figure
from tests.hooks.test_stacks import CASTS, EXACT, LOSSY
from tests.ranks import as_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
TIMEOUT = timedelta(seconds=60)
SEVERAL = ("shared_memory", "hosts")  # which one rank over NCCL cannot have
STACKS = [specs for specs in [*EXACT, *LOSSY, *CASTS] if not any(one in str(specs) for one in SEVERAL)]


def sleep(cycles: int) -> None:
    """Keep the device busy."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def open_lane(specs: Any, backend: str = "nccl") -> tuple[CommContext, Stack, torch.device]:
    """The queues of this rank, on the first GPU."""
    device = torch.device("cuda", 0)
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(backend)
    ranks = dist.get_world_size()
    stack = make_stack(specs)
    exchange = CommContext.open(
        control=open_control_channel(TIMEOUT),
        device=device,
        backend=backend,
        placement=RankPlacement(dist.get_rank(), ("here",) * ranks, (ranks,) * ranks),
        gradients=stack.requirements,
        timeout=TIMEOUT,
    )
    return exchange, stack, device


def without_waiting(all_specs: list[Any]) -> list[str]:
    """Names of stacks that waited for the device, or gave nothing."""
    wrong = []
    for specs in all_specs:
        exchange, stack, device = open_lane(specs)
        tensors = [contribution(0, step, 1).to(device) for step in range(4)]
        results = []
        for step, tensor in enumerate(tensors):
            if step == 2:  # communicators and libraries have been loaded
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            try:
                stack.begin_step()
                payload = Payload(tensor, PARAMS, "gradient", 0)
                results.append(exchange.gradient_queue.send(payload, stack, []).wait())
                stack.rollback() if step == 1 else stack.commit()
            except RuntimeError as error:
                wrong.append(f"{specs}: {error}")
            finally:
                if step == 3:
                    torch.cuda.set_sync_debug_mode("default")
        torch.cuda.set_sync_debug_mode("default")
        if not all(float(one.abs().sum()) > 0 for one in results) or len(results) != 4:
            wrong.append(f"{specs}: nothing came back")
    return wrong


def test_no_hook_waits_for_the_gpu() -> None:
    """Torch raises where anything would. All stacks over NCCL, in one process."""
    assert as_processes(1, without_waiting, STACKS, timeout_s=110) == [[]]


class Slow(ddprun_hooks.Hook):
    """Encodes for a while on the device."""

    def __init__(self, cycles: int) -> None:
        self.cycles = cycles

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        sleep(self.cycles)
        return await comm.reduce(payload.tensor)


def cycles_of(ms: float) -> int:
    """So many cycles of the device take that long."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    sleep(500_000_000)  # a quarter of a second, in which the device's clock comes to its full rate
    start.record()
    sleep(100_000_000)
    end.record()
    end.synchronize()
    return round(ms / float(start.elapsed_time(end)) * 100_000_000)


def overlapping() -> tuple[float, list[float], bool]:
    """Milliseconds that four buckets take, what each is encoded for, and whether their values are right."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    exchange, stack, device = open_lane([Slow(cycles_of(50))])
    clock = StreamClock(GpuStreams(device))
    for _ in range(2):  # the first one makes communicators
        traces: list[Any] = []
        tensors = [torch.zeros(1 << 16, device=device) for _ in range(4)]
        sleep(cycles_of(20))
        for index, tensor in enumerate(tensors):
            tensor.fill_(index + 1.0)  # behind the sleep: a queue that does not wait for it sends zeros
        payloads = [Payload(tensor, (), "gradient", index) for index, tensor in enumerate(tensors)]
        futures = [exchange.gradient_queue.send(payload, stack, traces) for payload in payloads]
        results = [future.wait() for future in futures]
        torch.cuda.synchronize()
    read = clock.read_traces(traces)
    took = max(trace.done or 0 for trace in read) - min(trace.ready for trace in read)
    spans = [span for trace in read for span in trace.spans if span.phase == "encode"]
    encoded = [(span.done - span.start) / 1000 for span in spans]
    right = all(bool((one == index + 1.0).all()) for index, one in enumerate(results))
    return took / 1000, encoded, right


def test_buckets_are_encoded_beside_each_other(figure: Figure) -> None:
    """On one stream four buckets of 50 ms took 200; and each waits for what fills it."""
    ((took_ms, encoded_ms, right),) = as_processes(1, overlapping)
    figure("4 buckets of 50 ms", f"{took_ms:.0f} ms")
    assert right
    assert len(encoded_ms) == 4
    assert min(encoded_ms) > 40
    assert took_ms < 150


def registered() -> tuple[bool, str, bool, float]:
    torch.cuda.set_device(0)
    dist.init_process_group()  # no backend: gloo and nccl, each for its device
    net = nn.Linear(64, 8).cuda()
    model = DistributedDataParallel(net, device_ids=[0])
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    handle = ddprun_hooks.register(model, ["fp16"], scaler=scaler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    waited = 0.0
    for step in range(5):
        loss = scaler.scale(model(torch.ones(4, 64, device="cuda")).square().mean())
        torch.cuda.synchronize()
        sleep(cycles_of(1) * 100)  # what a scale that is asked for in backward would wait for
        start = time.monotonic()
        loss.backward()
        waited = time.monotonic() - start if step == 4 else 0.0
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    queue = handle._queue
    group: Any = queue.world.process_groups[0]
    backend = str(group._get_backend(torch.device("cuda", 0)).name())
    finite = all(bool(torch.isfinite(param).all()) for param in net.parameters())
    return isinstance(queue, GpuCommQueue), backend, finite, waited


def test_register_takes_nccl_and_does_not_wait_in_backward(figure: Figure) -> None:
    """After `init_process_group()` without a backend; with a GradScaler."""
    ((on_streams, backend, finite, waited_s),) = as_processes(1, registered)
    figure("host time of a backward pass while the GPU has 100 ms of work", f"{1000 * waited_s:.1f} ms")
    assert on_streams
    assert backend == "nccl"
    assert finite
    assert waited_s < 0.05


def drift(seconds: float) -> tuple[list[float], list[int]]:
    clock, errors, times = StreamClock(GpuStreams(torch.device("cuda", 0))), [], []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.cuda.synchronize()
        mark, before = clock.mark(), now_us()
        torch.cuda.synchronize()
        times.append(clock.mark_to_us(mark))
        errors.append(times[-1] - (before + now_us()) / 2)
        time.sleep(0.05)
        if len(times) % 10 == 0:
            early, before = clock.mark(), now_us()
            torch.cuda.synchronize()
            clock.reanchor()  # a mark may be read from a base that is later
            times.append(clock.mark_to_us(early))
            errors.append(times[-1] - before)
    return errors, times


def test_the_devices_clock_is_tied_to_the_hosts(figure: Figure) -> None:
    """For 20 seconds; and time never runs backwards."""
    ((errors, times),) = as_processes(1, drift, 20.0)
    middle = sorted(errors)[len(errors) // 2]
    figure("error", f"{middle:.0f} µs, at most {max(map(abs, errors)):.0f}")
    assert len(times) > 200
    assert times == sorted(times)
    assert abs(middle) < 200


def waiting_streams(connections: int) -> float:
    """Milliseconds of the host for time to set the clock anew, while many streams wait for the device."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(connections)
    gpu = GpuStreams(torch.device("cuda", 0))
    clock, streams = StreamClock(gpu), [gpu.new_stream(urgent=True) for _ in range(20)]
    cycles = cycles_of(300)
    torch.cuda.synchronize()
    sleep(cycles)
    filled = gpu.record_timestamp()
    for stream in streams:
        stream.wait_event(filled.event)
        gpu.record_timestamp(stream)
    start = time.monotonic()
    clock.reanchor()
    return 1000 * (time.monotonic() - start)


@pytest.mark.parametrize("connections", [8, 32])
def test_the_clock_does_not_wait_behind_streams_that_wait(figure: Figure, connections: int) -> None:
    """As many as the queues of a run have; the device is busy for 300 ms. 8 is CUDA's default, 32 ours."""
    ((took_ms),) = as_processes(1, waiting_streams, connections)
    figure("time to set the clock anew", f"{took_ms:.1f} ms")
    assert took_ms < 50 or connections == 8


def staged() -> tuple[float, float, bool]:
    gpu = GpuStreams(torch.device("cuda", 0))
    staging, stalls, same = PinnedStaging(gpu), [], True
    weights = [torch.full((64 << 20,), float(index), device="cuda") for index in range(8)]  # 2 GiB
    for _ in range(2):  # the first one page-locks memory
        torch.cuda.synchronize()
        start = time.monotonic()
        assert staging.try_acquire()
        copied = [staging.copy(tensor) for tensor in weights]
        staging.block_current_stream()
        for tensor in weights:
            tensor.add_(100.0)  # the next step
        stalls.append(time.monotonic() - start)
        staging.wait()
        same = same and all(
            bool((one == float(tensor[0]) - 100.0).all()) for one, tensor in zip(copied, weights, strict=True)
        )
        staging.release()
    return stalls[0], stalls[1], same


def test_a_checkpoint_is_copied_while_the_host_goes_on(figure: Figure) -> None:
    """And the next step does not overwrite what is still being copied."""
    ((first, second, same),) = as_processes(1, staged)
    figure("host stalled by 2 GiB", f"{1000 * first:.0f} ms, then {1000 * second:.1f} ms")
    assert same
    assert second < 0.05


def inputs() -> tuple[bool, bool, bool]:
    gpu = GpuStreams(torch.device("cuda", 0))
    copies = CopyStream(gpu)
    given = torch.arange(1 << 20, dtype=torch.float32).pin_memory()
    copies.copy_to_gpu(given)
    copies.block_current_stream()
    torch.cuda.synchronize()
    sleep(cycles_of(300))
    moved = copies.copy_to_gpu(given)
    copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(copies._stream)
    computed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    computed.record()
    copies.block_current_stream()
    copied.synchronize()
    early = not computed.query()
    doubled = moved * 2
    return early, moved.is_cuda, torch.equal(doubled.cpu(), given * 2)


def test_inputs_are_copied_while_the_gpu_computes() -> None:
    assert as_processes(1, inputs) == [(True, True, True)]


def scaled_steps(kind: str) -> tuple[list[int], list[bool]]:
    """Waits in each step of loss scaling, and whether it was taken."""
    param = torch.zeros(1 << 16, device="cuda", requires_grad=True)
    fused = kind == "fused"
    optimizer = torch.optim.Adam([param], lr=0.1, fused=fused)
    precision, waits, taken = Precision("fp16", torch.device("cuda", 0)), list[int](), list[bool]()
    for step in range(5):
        precision.loss_scale()
        param.grad = torch.full_like(param, float("inf") if step == 3 else 1.0)
        precision.note_nonfinite_gradients(optimizer)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            taken.append(precision.step(optimizer))
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(one.message) for one in found))
    return waits, taken


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_loss_scaling_waits_once_a_step(kind: str) -> None:
    ((waits, taken),) = as_processes(1, scaled_steps, kind)
    assert taken == [True, True, True, False, True]
    assert waits[1:] == [1, 1, 1, 1]


def event_costs() -> dict[str, float]:
    gpu = GpuStreams(torch.device("cuda", 0))
    clock = StreamClock(gpu)

    def each(act: Callable[[], Any], count: int = 2000) -> float:
        act()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            act()
        return (time.perf_counter() - start) / count * 1e6

    new = each(lambda: torch.cuda.Event(enable_timing=True).record())  # type: ignore[no-untyped-call]
    pooled = each(lambda: clock.mark_to_us(clock.mark()))
    marks = [clock.mark() for _ in range(2000)]
    torch.cuda.synchronize()
    times = iter(marks)
    read = each(lambda: clock.mark_to_us(next(times)), 1999)
    again = each(partial(clock.mark_to_us, marks[0]))
    return {"new and recorded": new, "recorded, waited for, read": pooled, "read": read, "read again": again}


def test_marks_are_cheap(figure: Figure) -> None:
    ((costs),) = as_processes(1, event_costs)
    for what, us in costs.items():
        figure(f"event {what}", f"{us:.1f} µs")
    assert costs["read again"] < costs["read"]
    assert costs["read"] < 20


def skipped(value: float) -> tuple[list[bool], Tensor, bool]:
    """Three steps, the second with a value that one rank alone has; which were taken, and the residual."""
    specs: AnyHook = "int8"
    exchange, stack, device = open_lane([specs], "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    taken, before = [], torch.zeros(0)
    for step in range(3):
        tensor = contribution(rank, step, ranks).to(device)
        if step == 1 and rank == 1:
            tensor[5] = value
        stack.begin_step()
        mean = exchange.gradient_queue.send(Payload(tensor, PARAMS, "gradient", 0), stack, []).wait()
        taken.append(bool(torch.isfinite(mean).all()))
        residual = stack.state_dict()["int8"]["gradient/first.weight"]["residual"]
        if taken[-1]:
            stack.commit()
            before = residual.cpu() if step == 0 else before
        else:
            stack.rollback()
            residual = stack.state_dict()["int8"]["gradient/first.weight"]["residual"]
            same = torch.equal(residual.cpu(), before)
    return taken, residual.cpu(), same


def test_all_ranks_skip_the_step_that_overflows_on_one() -> None:
    """And what the hooks keep is as before it."""
    for taken, residual, same in as_processes(2, skipped, float("inf")):
        assert taken == [True, False, True]
        assert same
        assert bool(torch.isfinite(residual).all())
        assert float(residual.abs().sum()) > 0
