"""Queues: order between ranks, whatever the threads do, and no future that is never set."""

import gc
import random
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.futures import Future

from ddprun_hooks import Communicator, ExchangeError, Hook, ParamSlice, Payload
from ddprun_hooks.comm.groups import RankGroup
from ddprun_hooks.comm_queue import GpuCommQueue, HostCommQueue
from ddprun_hooks.config.options import HookSpec
from ddprun_hooks.registry import make_stack
from ddprun_hooks.stack import Stack
from ddprun_hooks.testing import check_hooks, run_hooks, run_ranks
from tests.fake_gpu import FakeGpu
from tests.hooks.test_exchange import Watched

BUCKETS, NUMEL = 12, 512
PARAMS = (ParamSlice("p", (NUMEL,), 0, NUMEL),)


class Dawdling(Hook):
    """Sums by all-reduce, or by all-to-all and all-gather, after delays that differ on each rank."""

    role = "reducer"
    rounds = 2

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        time.sleep(self.random.random() * 1e-3)
        if payload.bucket % 3 == 1:  # buckets that need fewer collectives than their neighbours
            return await comm.all_reduce(payload.tensor)
        parts = await comm.all_to_all(payload.tensor)
        time.sleep(self.random.random() * 1e-3)
        share = parts.view(comm.size, -1).sum(0)
        return await comm.all_gather(share)


def contribution(rank: int, step: int, bucket: int) -> Tensor:
    """A tensor that tells rank, step and bucket apart; sums of it are exact in fp32."""
    return torch.arange(NUMEL, dtype=torch.float32) + 1000 * rank + 17 * bucket + 7 * step + 1


def send_all(group: RankGroup, *stacks: Stack, steps: int) -> int:
    """Send BUCKETS equal buckets a step, through the stacks in turn; gives how many came back wrong."""
    queue, wrong = HostCommQueue(group), 0
    pauses = random.Random(group.rank)
    for step in range(steps):
        futures = []
        for bucket in range(BUCKETS):
            time.sleep(pauses.random() * 1e-3)
            payload = Payload(contribution(group.rank, step, bucket), PARAMS, "gradient", bucket)
            futures.append(queue.send(payload, stacks[bucket % len(stacks)], []))
        for bucket, future in enumerate(futures):
            wanted = torch.stack([contribution(rank, step, bucket) for rank in range(group.size)]).sum(0)
            wrong += not torch.equal(future.wait(), wanted)
    return wrong


def test_buckets_with_different_numbers_of_collectives_never_mix() -> None:
    """Four ranks with random delays sum every bucket right, though some buckets skip the second round."""
    wrong = run_ranks(
        4, lambda group: send_all(group, Stack([("d", Dawdling(group.rank))]), steps=15), requirements=2
    )
    assert wrong == [0, 0, 0, 0]


def test_buckets_sent_at_once_never_overtake_those_that_are_under_way() -> None:
    """A bucket of one collective is issued by whoever sends it, unless an earlier one has still to issue."""

    def body(group: RankGroup) -> int:
        return send_all(group, Stack([("d", Dawdling(group.rank))]), Stack([]), Stack([]), steps=15)

    assert run_ranks(4, body, requirements=2) == [0, 0, 0, 0]


def test_a_bucket_of_one_collective_ends_without_the_thread_that_sent_it() -> None:
    """Its hooks' rest runs where the collective has ended, and the trace is complete when the future is."""

    def body(group: RankGroup) -> None:
        queue, traces = HostCommQueue(group), list[Any]()
        for bucket in range(20):
            payload = Payload(contribution(group.rank, 0, bucket), PARAMS, "gradient", bucket)
            assert queue.send(payload, make_stack(["fp16"]), traces).wait() is payload.tensor
            encode, decode = traces[-1].spans
            (leg,) = traces[-1].collectives
            assert traces[-1].ready <= encode.start <= encode.done <= leg.start
            assert leg.done <= decode.start <= decode.done <= traces[-1].done
            assert encode.on_training_thread

    run_ranks(2, body)


class Halting(Hook):
    """Waits before and after; for some buckets and shares it needs one collective more."""

    rounds = 2

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        time.sleep(self.random.random() * 1e-3)
        if (payload.bucket + (payload.params[0].start > 0)) % 3 == 1:
            nothing = await comm.reduce(torch.zeros(3))
            payload.tensor[:3] += nothing
        total = await comm.reduce(payload.tensor)
        time.sleep(self.random.random() * 1e-3)
        return total


def two_levels(seed: int) -> Stack:
    """Hierarchical with delays, whose shares differ in how many collectives they need between hosts."""
    across: list[HookSpec] = [{"tests.hooks.test_queue.Halting": {"seed": seed}}]
    return make_stack([{"hierarchical": {"hosts": 2, "across": across}}])


@pytest.mark.parametrize("steps", [15, pytest.param(250, marks=pytest.mark.slow)])
def test_legs_of_two_levels_never_mix(steps: int) -> None:
    """Random delays on each rank, legs of many buckets under way at once, on two hosts: none is wrong."""
    wrong = run_ranks(
        4,
        lambda group: send_all(group, two_levels(group.rank), steps=steps),
        requirements=two_levels(0).requirements,
    )
    assert wrong == [0, 0, 0, 0]


@pytest.mark.slow
def test_a_soak_of_four_ranks_sums_every_bucket_right() -> None:
    """Hundreds of steps with random delays on each rank; with the rule switched off it fails within a few."""
    wrong = run_ranks(
        4, lambda group: send_all(group, Stack([("d", Dawdling(group.rank))]), steps=400), requirements=2
    )
    assert wrong == [0, 0, 0, 0]


def test_collectives_of_one_round_start_in_bucket_order_on_every_rank() -> None:
    """Within a round, no bucket starts before an earlier one has."""

    def body(group: RankGroup) -> list[Any]:
        traces: list[Any] = []
        queue = HostCommQueue(group)
        stack = Stack([("d", Dawdling(group.rank))])
        futures = [
            queue.send(Payload(contribution(group.rank, 0, bucket), (), "gradient", bucket), stack, traces)
            for bucket in range(BUCKETS)
        ]
        for future in futures:
            future.wait()
        return traces

    for traces in run_ranks(4, body, requirements=2):
        for index in range(2):
            starts = [trace.collectives[index].start for trace in traces if len(trace.collectives) > index]
            assert starts == sorted(starts)
        for trace in traces:
            assert trace.ready <= trace.collectives[0].start <= trace.done
            assert all(leg.start <= leg.done <= trace.done for leg in trace.collectives)
            assert len(trace.collectives) == (1 if trace.bucket % 3 == 1 else 2)


class Broken(Hook):
    """Fails on one bucket, after others have gone."""

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        if payload.bucket == 2:
            raise ZeroDivisionError("the hook's own error")
        return await comm.reduce(payload.tensor)


def test_a_hook_that_raises_fails_every_future_and_hangs_nobody() -> None:
    """The bucket's future and all later ones carry the error; the queue keeps it as it was raised."""

    def body(group: RankGroup) -> HostCommQueue:
        queue = HostCommQueue(group)
        futures = [
            queue.send(Payload(torch.ones(4), (), "gradient", bucket), Stack([("b", Broken())]), [])
            for bucket in range(5)
        ]
        for future in futures[2:]:
            with pytest.raises((ZeroDivisionError, RuntimeError), match="the hook's own error"):
                future.wait()
        return queue

    for queue in run_ranks(2, body):
        assert isinstance(queue.error, ZeroDivisionError)


class Unclean(Hook):
    """Fails on bucket 1; while it is ended in the middle of another one, raises or awaits once more."""

    role = "reducer"
    rounds = 2

    def __init__(self, awaits: bool) -> None:
        self.awaits = awaits

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        if payload.bucket == 1:
            raise ZeroDivisionError("the hook's own error")
        try:
            return await comm.all_reduce(payload.tensor)
        finally:
            if self.awaits:
                await comm.all_reduce(torch.zeros(1))
            raise OSError("the hook's own end")


@pytest.mark.parametrize("awaits", [False, True])
def test_a_hook_that_cannot_be_ended_hangs_nobody_either(awaits: bool) -> None:
    """The queue went on no more: futures of later buckets were never set."""
    rank_0_is_done = threading.Event()

    def body(group: RankGroup) -> None:
        if group.rank == 1:  # late, so that rank 0's bucket 0 is under way when its bucket 1 fails
            assert rank_0_is_done.wait(30)
            HostCommQueue(group).send(Payload(torch.ones(4), (), "gradient", 0), Stack([]), []).wait()
            return
        queue, stack = HostCommQueue(group), Stack([("u", Unclean(awaits))])
        futures = [
            queue.send(Payload(torch.ones(4), (), "gradient", bucket), stack, []) for bucket in range(3)
        ]
        rank_0_is_done.set()
        for future in futures:
            assert future.done()
            with pytest.raises((ZeroDivisionError, RuntimeError), match="the hook's own error"):
                future.wait()

    run_ranks(2, body, requirements=2)


def test_what_comes_to_a_broken_queue_leaves_no_coroutine_behind() -> None:
    """Python warned that it "was never awaited"."""

    def body(group: RankGroup) -> None:
        queue = HostCommQueue(group)
        queue.error = KeyboardInterrupt("broken before")
        assert queue.send(Payload(torch.ones(4), (), "gradient", 0), Stack([]), []).done()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(1, body)
        gc.collect()
    assert caught == []


class OfNoRank(Hook):
    """Broadcasts from a rank that there is not, which Gloo refuses at once."""

    role = "reducer"

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        return await comm.broadcast(payload.tensor, 7)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_collective_that_cannot_be_started_has_failed(on_gpu: bool) -> None:
    """Or the rank would seem to wait for the others ever longer, and report a hang."""

    def body(group: RankGroup) -> int:
        observer = Watched()
        watched = replace(group, sequences={"network": [observer]})
        queue = GpuCommQueue(watched, FakeGpu()) if on_gpu else HostCommQueue(watched)
        payload = Payload(torch.ones(4), (), "gradient", 0)
        with pytest.raises(Exception, match="root"):
            queue.send(payload, Stack([("of no rank", OfNoRank())]), []).wait()
        return observer.failed

    assert run_ranks(2, body) == [1, 1]


def test_an_all_reduce_without_hooks_that_breaks_has_failed() -> None:
    """Though DDP alone waits for it: a rank that ends over a hang breaks the others' collectives."""

    class Broken:
        def allreduce(self, tensors: list[Tensor], op: object) -> "Broken":
            return self

        def get_future(self) -> Future[Any]:
            future = Future[Any]()
            future.set_exception(RuntimeError("connection closed by peer"))
            return future

        def is_completed(self) -> bool:
            return True

    observer, broken = Watched(), cast(Any, Broken())
    group = RankGroup("world", 0, ("a", "a"), [broken], sequences={"network": [observer]})
    HostCommQueue(group).start_all_reduce(Payload(torch.ones(4), (), "gradient", 0), [])
    assert observer.failed == 1


class Longer(Hook):
    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        return torch.cat([await comm.reduce(payload.tensor), torch.zeros(1)])


class Narrow(Hook):
    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        return (await comm.reduce(payload.tensor)).half()


class First(Hook):
    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        return (await comm.reduce(payload.tensor))[:1].expand(payload.tensor.numel())


def test_a_view_of_other_strides_that_begins_with_the_payload_is_not_the_payload() -> None:
    for mean in run_hooks(First(), 2, lambda rank: rank.step(0)):
        assert torch.equal(mean, mean[:1].expand_as(mean))


@pytest.mark.parametrize(("hook", "what"), [(Longer(), r"\(5,\)"), (Narrow(), "float16")])
def test_what_a_hook_returns_is_held_against_what_it_was_given(hook: Hook, what: str) -> None:
    """DDP would take a longer tensor without a word; the queue refuses it and names the hook."""

    def body(group: RankGroup) -> None:
        queue = HostCommQueue(group)
        future = queue.send(Payload(torch.ones(4), (), "gradient", 0), Stack([("mine", hook)]), [])
        with pytest.raises((ExchangeError, RuntimeError), match=rf"\['mine'\] returned .*{what}"):
            future.wait()

    run_ranks(2, body)


class EverySecond(Hook):
    """A codec that reduces the even elements, then the odd ones, as they lie."""

    rounds = 2

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        for part in (payload.tensor[::2], payload.tensor[1::2]):
            part.copy_(await comm.reduce(part))
        return payload.tensor


@pytest.mark.parametrize("rest", [[], ["bf16"], ["shared_memory"]])
def test_a_codec_may_reduce_what_is_not_contiguous(rest: list[str]) -> None:
    """Gloo ignores strides: it would sum the wrong elements, without an error."""
    check_hooks([EverySecond(), *rest], ranks=2)


@pytest.mark.parametrize(
    "collective", [lambda comm, part: comm.all_reduce(part), lambda comm, part: comm.broadcast(part, 0)]
)
def test_what_changes_a_tensor_in_place_takes_a_contiguous_one(collective: Any) -> None:
    async def hook(payload: Payload, comm: Communicator) -> Tensor:
        await collective(comm, payload.tensor[::2])
        return payload.tensor

    with pytest.raises(ValueError, match=r"pass tensor\.contiguous\(\)"):
        run_hooks(hook, 2, lambda rank: rank.step(0))


class Greedy(Hook):
    role = "reducer"  # but rounds is 1

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        await comm.all_reduce(payload.tensor)
        return await comm.all_reduce(payload.tensor)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_one_round_more_than_declared_is_an_error_that_says_what_to_set(on_gpu: bool) -> None:
    """No group was made for it, and none may be made in mid-step. On a GPU no other would be needed."""

    def body(group: RankGroup) -> None:
        queue = GpuCommQueue(group, FakeGpu()) if on_gpu else HostCommQueue(group)
        future = queue.send(Payload(torch.ones(4), (), "gradient", 0), Stack([("greedy", Greedy())]), [])
        with pytest.raises((ExchangeError, RuntimeError), match="set `rounds`"):
            future.wait()

    run_ranks(2, body)


ENDS = """
import threading
import time
from torch.futures import Future
from ddprun_hooks.comm_queue import await_callback_at_exit

def called_back(_):
    begun.set()
    time.sleep(0.3)
    print("came back", flush=True)

begun, future = threading.Event(), Future()
future.add_done_callback(await_callback_at_exit(called_back))
threading.Thread(target=future.set_result, args=(0,), daemon=True).start()
begun.wait()
"""


def test_a_process_does_not_end_below_what_is_called_back() -> None:
    """It would abort: the thread that calls back, one of Gloo's, is in C++ and gets the GIL no more."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "came back\n"), done.stderr
