"""The queue of a GPU, over Gloo and a GPU that is none: what it sends, and on which streams."""

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddprun_hooks import comm_context as exchange_module
from ddprun_hooks.comm.groups import GroupRequirement, RankGroup, RankPlacement
from ddprun_hooks.comm_context import CommContext
from ddprun_hooks.comm_queue import GpuCommQueue
from ddprun_hooks.errors import HookSetupError
from ddprun_hooks.payload import Payload
from ddprun_hooks.registry import make_stack
from ddprun_hooks.testing import Rank, bucket_slices, contribution, run_hooks
from tests.fake_gpu import FakeGpu
from tests.hooks.test_stacks import LOSSY, Specs

STEPS = 2
BUCKETS = (("first.weight", "first.bias"), ("conv.weight",), ("last.weight", "scale"))


def shares(c: Rank, step: int) -> list[Payload]:
    """This rank's payload of each bucket."""
    flat, start, payloads = contribution(c.rank, step, c.world_size), 0, []
    for index, names in enumerate(BUCKETS):
        params = bucket_slices(names)
        numel = sum(param.numel for param in params)
        payloads.append(Payload(flat[start : start + numel].clone(), params, "gradient", index))
        start += numel
    return payloads


def in_host_memory(c: Rank) -> list[Tensor]:
    return [
        c.send(one.tensor, one.params, one.bucket).clone() for step in range(STEPS) for one in shares(c, step)
    ]


def on_streams(
    c: Rank, detailed: bool = True, group: RankGroup | None = None
) -> tuple[list[Tensor], FakeGpu, list[Any]]:
    gpu, traces, results = FakeGpu(), list[Any](), []
    queue = GpuCommQueue(group or c.group, gpu)
    queue.detailed_timing = detailed
    for step in range(STEPS):
        futures = [queue.send(one, c.stack, traces) for one in shares(c, step)]
        results += [future.wait().clone() for future in futures]
    return results, gpu, traces


STACKS: list[Specs] = [["fp16"], *(specs for specs in LOSSY if "shared_memory" not in str(specs))]


@pytest.mark.parametrize("specs", STACKS, ids=str)
def test_streams_give_the_bits_of_host_memory(specs: Specs) -> None:
    """On all ranks, with a process group for each round."""
    hosts = ("a", "a", "b", "b")
    expected = run_hooks(specs, 4, in_host_memory, hosts)
    for rank, (results, _, traces) in enumerate(run_hooks(specs, 4, on_streams, hosts)):
        assert all(map(torch.equal, results, expected[rank]))
        assert all(trace.done is not None and trace.collectives for trace in traces)


def test_each_bucket_has_a_stream_and_each_round_a_group() -> None:
    """So that encoding runs beside the wire, and a second round is not behind the next bucket's first."""
    (_, gpu, traces), _ = run_hooks(["int8"], 2, on_streams)
    assert [stream.priority for stream in gpu.streams] == [-1] * 4
    used = [name for name, what, _ in gpu.log if what == "uses"]
    assert used == ["stream 0", "stream 1", "stream 2"] * STEPS, "a bucket keeps its stream"
    waits = [(name, of) for name, what, of in gpu.log if what == "waits for"]
    assert waits == [(name, "compute") for name in used], "and waits for no other bucket's"
    for trace in traces:
        assert [one.group for one in trace.collectives] == ["world.0", "world.1"]
        starts = [trace.collectives[0].start.event.us, trace.collectives[1].start.event.us]
        assert trace.ready.event.us <= starts[0] <= starts[1] <= trace.done.event.us
        assert trace.ready.event.stream == "compute"
        assert trace.done.event.stream == f"stream {trace.bucket}"


def test_rounds_may_share_a_process_group() -> None:
    """They are in order on its stream; records show the one group that there is."""

    def sharing(c: Rank) -> tuple[list[Tensor], FakeGpu, list[Any]]:
        return on_streams(c, group=replace(c.group, process_groups=[c.group.process_groups[0]] * 2))

    expected = run_hooks(["int8"], 2, in_host_memory)
    for rank, (results, _, traces) in enumerate(run_hooks(["int8"], 2, sharing)):
        assert all(map(torch.equal, results, expected[rank]))
        for trace in traces:
            assert [one.group for one in trace.collectives] == ["world.0", "world.0"]


def test_a_step_without_a_record_takes_two_marks_a_bucket() -> None:
    """And its collectives count as from ready to done; bytes are counted all the same."""
    (_, whole, traces), _ = run_hooks(["int8"], 2, on_streams)
    (_, short, few), _ = run_hooks(["int8"], 2, lambda c: on_streams(c, detailed=False))
    assert whole.events_made == 7 * len(traces)
    assert short.events_made == 2 * len(few)
    for trace, detailed in zip(few, traces, strict=True):
        assert trace.wire_bytes == detailed.wire_bytes > 0
        assert not trace.spans
        for collective in trace.collectives:
            assert (collective.start, collective.done) == (trace.ready, trace.done)


def test_plain_all_reduce_takes_no_marks_for_hooks() -> None:
    """Three a bucket: it was ready, the collective may start, it is done."""
    (_, gpu, traces), _ = run_hooks([], 2, on_streams)
    assert gpu.events_made == 3 * len(traces)
    for trace in traces:
        (collective,) = trace.collectives
        assert not trace.spans
        assert collective.done is trace.done
        assert trace.ready.event.us <= collective.start.event.us <= trace.done.event.us


def test_shared_memory_is_refused_on_a_gpu_before_a_group_is_made() -> None:
    """Also inside `hierarchical`: with `device: auto` the file cannot tell."""
    control: Any = None
    for requirement in (
        GroupRequirement("world", via_shared_memory=True),
        GroupRequirement("within", via_shared_memory=True),
    ):
        with pytest.raises(HookSetupError, match="shared_memory"):
            CommContext.open(
                control=control,
                device=torch.device("cuda", 0),
                backend="nccl",
                placement=RankPlacement(0, ("a", "a"), (2, 2)),
                gradients={requirement: 1},
                timeout=control,
            )


@pytest.mark.parametrize(("order", "rounds"), [("1", 2), ("0", 1), (None, 1)])
def test_rounds_have_groups_of_their_own_where_nccl_keeps_one_order(
    monkeypatch: pytest.MonkeyPatch, order: str | None, rounds: int
) -> None:
    """Elsewhere two groups might wait for each other: all rounds share one. What is sent as it is goes over
    the default group.
    """
    made: list[tuple[str, str]] = []

    def new_group(ranks: list[int], *, backend: str, group_desc: str, pg_options: Any, timeout: Any) -> str:
        made.append((group_desc, pg_options))
        return group_desc

    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    if order is not None:
        monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", order)
    monkeypatch.setattr(exchange_module, "GpuStreams", lambda device: FakeGpu())
    monkeypatch.setattr(exchange_module, "_high_priority_nccl_options", lambda timeout: "urgent")
    monkeypatch.setattr(dist, "new_group", new_group)
    control: Any = SimpleNamespace(all_gather_bytes=None)
    exchange = CommContext.open(
        control=control,
        device=torch.device("cuda", 0),
        backend="nccl",
        placement=RankPlacement(0, ("a", "a"), (2, 2)),
        gradients=make_stack("int8").requirements,
        timeout=timedelta(seconds=9),
    )
    groups: list[Any] = [*exchange.gradient_queue.world.process_groups]
    assert groups == [f"world.{index % rounds} of 0" for index in range(2)]
    assert len(made) == len(set(made)) == rounds
    assert exchange.plain_queue.world.process_groups == [dist.group.WORLD]
    assert {options for _, options in made} == {"urgent"}
    assert not any("plain" in name for name, _ in made)
