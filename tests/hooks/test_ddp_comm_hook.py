"""DDP communication hooks of torch's form: torch's own, and what an adapted one may not do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import quantization_pertensor_hook
from torch.futures import Future

from ddprun.config import load
from ddprun.explain.explain import explain
from ddprun_hooks import DdpCommHook, ExchangeError, Payload
from ddprun_hooks.testing import NUMEL, Rank, check_hooks, run_hooks
from tests.engine.running import lines, run_pipeline, weights

TORCHS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"


def two_steps(rank: Rank) -> tuple[list[Tensor], list[Any]]:
    return [rank.step(0), rank.step(1)], rank.traces


@pytest.mark.parametrize(
    ("name", "own", "dtype"),
    [
        ("allreduce_hook", [], "float32"),
        ("fp16_compress_hook", "fp16", "float16"),
        ("fp16_compress_wrapper", "fp16", "float16"),
        ("bf16_compress_hook", "bf16", "bfloat16"),
    ],
)
def test_torchs_own_give_the_bits_of_those_here(name: str, own: Any, dtype: str) -> None:
    """With two ranks, where a division is exact; their bytes are counted."""
    hook: Any = f"{TORCHS}.{name}"
    if name.endswith("wrapper"):  # it leaves to DDP to cast the result
        hook = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    expected = run_hooks(own, 2, two_steps)
    for rank, (results, traces) in enumerate(run_hooks(hook, 2, two_steps)):
        assert all(map(torch.equal, results, expected[rank][0]))
        for trace in traces:
            (leg,) = trace.collectives
            assert (leg.op, leg.dtype, leg.bytes) == ("all_reduce", dtype, NUMEL * leg_size(dtype))
            assert leg.wire_bytes == leg.bytes


def leg_size(dtype: str) -> int:
    return getattr(torch, dtype).itemsize  # type: ignore[no-any-return]


def test_they_keep_what_every_hook_promises() -> None:
    check_hooks(f"{TORCHS}.allreduce_hook")
    check_hooks(f"{TORCHS}.bf16_compress_hook", relative_error=1e-2)


def in_halves(group: Any, bucket: Any) -> Future[Tensor]:
    """Sums the two halves of a bucket apart."""
    assert (bucket.index(), len(bucket.gradients())) == (0, 5)
    buffer = bucket.buffer().div_(group.size())
    halves = [dist.all_reduce(half, group=group, async_op=True).get_future() for half in buffer.chunk(2)]
    return torch.futures.collect_all(halves).then(lambda _: buffer)


def test_a_hook_with_several_all_reduces() -> None:
    def run(rank: Rank) -> list[Tensor]:
        return [rank.step(step) for step in range(3)]

    expected = run_hooks([], 2, run)
    found = run_hooks(DdpCommHook(in_halves, rounds=2), 2, run)
    assert all(map(torch.equal, expected[0], found[0]))
    with pytest.raises(ExchangeError, match="set `rounds`"):
        run_hooks(DdpCommHook(in_halves), 2, run)


def one_after_the_other(group: Any, bucket: Any) -> Future[Tensor]:
    """Sums the second half of a bucket when it has the sum of the first."""
    halves, mean = bucket.buffer().chunk(2), Future[Tensor]()

    def sum_second(_: Any) -> None:
        second = dist.all_reduce(halves[1], group=group, async_op=True).get_future()
        second.then(lambda _: mean.set_result(bucket.buffer().div_(2)))

    dist.all_reduce(halves[0], group=group, async_op=True).get_future().then(sum_second)
    return mean


def test_each_bucket_has_a_group_of_its_own() -> None:
    """Although other buckets have begun meanwhile."""

    def run(rank: Rank) -> list[list[float]]:
        payloads = [
            Payload(torch.full((6,), float(index + rank.rank)), (), "gradient", index) for index in range(4)
        ]
        sent = [rank._queue.send(payload, rank.stack, []) for payload in payloads]
        return [future.wait().tolist() for future in sent]

    found = run_hooks(DdpCommHook(one_after_the_other, rounds=2), 2, run)
    assert found[0] == found[1] == [[2.0 * index + 1] * 6 for index in range(4)]


def waits(group: Any, bucket: Any) -> Future[Tensor]:
    def again(done: Future[list[Tensor]]) -> Any:
        return dist.all_reduce(done.value()[0], group=group, async_op=True).get_future().wait()[0]

    return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(again)  # type: ignore[no-any-return]


def forgets(group: Any, bucket: Any) -> Future[Tensor]:
    first, _ = (dist.all_reduce(half, group=group, async_op=True) for half in bucket.buffer().chunk(2))
    return first.get_future()  # type: ignore[no-any-return]


def blocks(group: Any, bucket: Any) -> Future[Tensor]:
    dist.all_reduce(bucket.buffer(), group=group)
    raise AssertionError("it has waited")


def takes_the_largest(group: Any, bucket: Any) -> Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.MAX, group=group, async_op=True)
    return work.get_future()  # type: ignore[no-any-return]


def never_ends(group: Any, bucket: Any) -> Future[Tensor]:
    return Future()


def power_sgd(group: Any, bucket: Any) -> Future[Tensor]:
    """Of torch: with 1,000 steps of plain all-reduce first, it is to fail in the first one all the same."""
    return powerSGD_hook(PowerSGDState(group), bucket)


def looks_for_the_last(group: Any, bucket: Any) -> Future[Tensor]:
    bucket.is_last()
    return default_hooks.allreduce_hook(group, bucket)


OTHERS = [power_sgd, quantization_pertensor_hook, looks_for_the_last]


@pytest.mark.parametrize("hook", [waits, forgets, blocks, takes_the_largest, never_ends, *OTHERS])
def test_what_an_adapted_hook_may_not_do_is_said(hook: Callable[..., Any]) -> None:
    allowed = r"may call dist.all_reduce\(…, async_op=True\), .* and gradients of its bucket"
    with pytest.raises((ExchangeError, RuntimeError), match=allowed):
        run_hooks(hook, 2, two_steps)


def test_a_run_with_one(tmp_path: Path) -> None:
    """By its import path: the weights are those of the hook here, and the bytes those that `explain` says."""
    text = """
model: {mlp: {inputs: 64, hidden: [16], outputs: 10}}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.05}}
checkpoint: {keep: 0}
stages: [{train: {steps: 6}}, save]
"""
    runs = [
        run_pipeline(tmp_path, f"{text}hooks: [{hook}]\n", 2, f"run{number}")
        for number, hook in enumerate(("bf16", f"{TORCHS}.bf16_compress_hook"))
    ]
    own, torchs = ([line["wire_bytes"] for line in lines(run, "buckets")] for run in runs)
    assert own
    assert own == torchs
    expected, found = map(weights, runs)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    sent = explain(load(tmp_path / "run1.yaml"), hosts=1, ranks_per_host=2).stages[0].sent_in_stage
    assert sent is not None
    assert sent.all_ranks == sum(torchs)
