"""The control message, agreement between ranks, clocks, and broadcast."""

import math
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ddprun_hooks import DisagreementError
from ddprun_hooks.comm.collective_observer import CollectiveHandle, CollectiveObserver, CollectiveSequence
from ddprun_hooks.comm.control_channel import ControlChannel
from ddprun_hooks.comm.groups import RankGroup
from ddprun_hooks.comm.trace import now_us
from ddprun_hooks.comm_context import CommContext
from ddprun_hooks.comm_queue import HostCommQueue
from ddprun_hooks.payload import Payload
from ddprun_hooks.testing import run_ranks


class Watched(CollectiveObserver, CollectiveSequence, CollectiveHandle):
    """An observer that notes what is issued, and how many of these have failed."""

    def __init__(self) -> None:
        self.issued: list[str] = []
        self.failed = 0

    def new_sequence(self, name: str, ranks: Sequence[int]) -> "Watched":
        return self

    def record_issued(
        self, op: str, payload: Payload | None = None, *, what: str = "", peers: Sequence[int] | None = None
    ) -> "Watched":
        self.issued.append(what)
        return self

    def mark_done(self) -> None: ...

    def mark_failed(self) -> None:
        self.failed += 1

    def set_completion_check(self, has_ended: Callable[[], bool]) -> None: ...


def control(group: RankGroup) -> ControlChannel:
    return ControlChannel(group.process_groups[0])


def test_a_word_reaches_every_rank_in_rank_order() -> None:
    """Posting does not wait; reading gives every rank's numbers exactly."""

    def body(group: RankGroup) -> torch.Tensor:
        wait = control(group).all_gather_async([group.rank + 0.1, 2.0**52 + group.rank])
        return wait()

    for words in run_ranks(3, body):
        assert words.tolist() == [[rank + 0.1, 2.0**52 + rank] for rank in range(3)]


def test_ranks_that_disagree_are_named() -> None:
    """Rank 2 differs from rank 0: every rank gets an error that says so."""

    def body(group: RankGroup) -> str:
        control(group).check_agreement("the pipeline", "same")
        with pytest.raises(DisagreementError) as caught:
            control(group).check_agreement("the buckets", "odd" if group.rank == 2 else "same")
        return str(caught.value)

    messages = run_ranks(3, body)
    assert messages[0] == "rank 2 and rank 0 disagree about the buckets; on rank 0 it is: same"
    assert messages[2].endswith("on rank 2 it is: odd")


def test_a_control_message_that_cannot_be_sent_has_failed() -> None:
    """Or the rank would seem to wait for the others ever longer, and report a hang."""

    def body(group: RankGroup) -> int:
        observer = Watched()
        channel = ControlChannel(group.process_groups[0], observer)
        channel.size += 1  # Gloo refuses room for one rank too many
        with pytest.raises(RuntimeError, match="expected length"):
            channel.all_gather([1.0])
        return observer.failed

    assert run_ranks(2, body) == [1, 1]


def test_clock_offsets_are_within_their_own_error_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's clock is set 5 s ahead of the one before; what is measured differs from that by no more
    than the bound.
    """
    ahead_us = 5_000_000
    clock = threading.local()
    monkeypatch.setattr("ddprun_hooks.comm.control_channel.now_us", lambda: now_us() + clock.ahead_us)

    def body(group: RankGroup) -> tuple[float, float]:
        clock.ahead_us = ahead_us * group.rank
        return control(group).measure_clock_offset()

    measured = run_ranks(6, body)
    assert measured[0] == (0, 0)
    for rank, (offset, bound) in enumerate(measured[1:], start=1):
        assert abs(offset - rank * ahead_us) <= bound
        assert 0 < bound < 1_000_000


class Post:
    """Messages between ranks that are threads, each as long under way as is drawn for it. No time passes: a
    rank's moment is that of the newest thing it knows of, and `hops` how many messages led to it.
    """

    def __init__(self, size: int, longest_us: int) -> None:
        self.size_of_world = size
        self.boxes: dict[tuple[int, int], queue.Queue[tuple[torch.Tensor, int, int]]] = {}
        self.longest_us = longest_us
        self.here = threading.local()
        self._lock = threading.Lock()

    def box(self, source: int, target: int) -> "queue.Queue[tuple[torch.Tensor, int, int]]":
        with self._lock:
            return self.boxes.setdefault((source, target), queue.Queue())

    def rank(self) -> int:
        return int(self.here.rank)

    def size(self) -> int:
        return self.size_of_world

    def arrive(self, rank: int) -> None:
        """This thread is that rank."""
        self.here.rank, self.here.now, self.here.hops = rank, 10**9, 0
        self.here.chance = random.Random(rank)
        self.here.ahead = self.here.chance.randrange(-(10**9), 10**9) if rank else 0

    def now_us(self) -> int:
        return int(self.here.now + self.here.ahead)

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> "Post":
        late = self.here.chance.randrange(1, self.longest_us)
        self.box(self.here.rank, target).put((tensors[0].clone(), self.here.now + late, self.here.hops + 1))
        return self

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> "Post":
        content, at, hops = self.box(source, self.here.rank).get(timeout=60)
        tensors[0].copy_(content)
        self.here.now, self.here.hops = max(self.here.now, at), max(self.here.hops, hops)
        return self

    def wait(self) -> None: ...


@pytest.mark.parametrize("size", [2, 3, 5, 64, 257, 512])
def test_clocks_are_compared_by_pairs_at_a_time(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Of 512 ranks the last is through after 9 comparisons, one after the other, not after 511; each offset
    is within its own bound, and that within what so many hops can have cost.
    """
    rounds, longest_us = 12, 200
    post = Post(size, longest_us)
    monkeypatch.setattr("ddprun_hooks.comm.control_channel.now_us", post.now_us)

    def work(rank: int) -> tuple[float, float, int, int]:
        post.arrive(rank)
        group: Any = post
        offset, bound = ControlChannel(group).measure_clock_offset(rounds)
        return offset, bound, post.here.ahead, post.here.hops

    with ThreadPoolExecutor(size) as pool:
        measured = [done.result(120) for done in [pool.submit(work, rank) for rank in range(size)]]
    levels = math.ceil(math.log2(size))
    assert max(hops for *_, hops in measured) <= 2 * rounds * levels
    assert measured[0][:2] == (0, 0)
    for offset, bound, ahead, _ in measured[1:]:
        assert abs(offset - ahead) <= bound
        assert 0 < bound <= levels * (longest_us + 1)


def test_bytes_arrive_whole_and_none_is_fine() -> None:
    """Records of another host, which may be empty; a watchdog is told what they are."""

    def body(group: RankGroup) -> bytes:
        observer = Watched()
        own, sent = ControlChannel(group.process_groups[0], observer), bytes(range(256)) * 1000
        if group.rank == 1:
            own.send_bytes(sent, 0, "records")
            own.send_bytes(b"", 0, "a checkpoint file")
            assert observer.issued == ["256000 bytes of records", "0 bytes of a checkpoint file"]
            return sent
        got = own.receive_bytes(1, "records")
        assert own.receive_bytes(1, "a checkpoint file") == b""
        assert observer.issued == ["records", "a checkpoint file"]
        return got

    got, sent = run_ranks(2, body)
    assert got == sent


def test_broadcast_overwrites_tensors_of_any_dtype_and_shape() -> None:
    """One message for each dtype; scalars and strided tensors keep their shapes."""

    def body(group: RankGroup) -> list[torch.Tensor]:
        queue = HostCommQueue(group)
        exchange = CommContext(queue, queue, queue, control(group))
        tensors = [
            torch.full((2, 3), float(group.rank)).t(),
            torch.tensor(group.rank),
            torch.full((4,), group.rank + 0.5),
        ]
        exchange.broadcast(tensors, source=1)
        return tensors

    for tensors in run_ranks(3, body):
        assert torch.equal(tensors[0], torch.ones(3, 2))
        assert tensors[1].item() == 1
        assert torch.equal(tensors[2], torch.full((4,), 1.5))


def test_an_exact_sum_and_the_largest_values() -> None:
    """The sum comes with its bytes; what is compared stays as it is."""

    def body(group: RankGroup) -> tuple[list[float], int, list[float], list[float]]:
        queue = HostCommQueue(group)
        exchange = CommContext(queue, queue, queue, control(group))
        total, sent = exchange.exact_sum(torch.tensor([1.0, group.rank], dtype=torch.float64))
        own = torch.tensor([group.rank, -group.rank, 0.5])
        return total.tolist(), sent, exchange.control.all_reduce_max(own, "values").tolist(), own.tolist()

    for rank, (total, sent, largest, own) in enumerate(run_ranks(3, body)):
        assert (total, sent) == ([3.0, 3.0], round(2 * 2 / 3 * 16))
        assert largest == [2.0, 0.0, 0.5]
        assert own == [rank, -rank, 0.5]


def test_a_barrier_lets_nobody_through_before_the_last() -> None:
    """The rank that comes last is the first to know."""

    def body(group: RankGroup) -> tuple[float, float]:
        time.sleep(0.1 * group.rank)
        came = time.monotonic()
        control(group).barrier()
        return came, time.monotonic()

    results = run_ranks(3, body)
    last_to_come = max(came for came, _ in results)
    assert all(left >= last_to_come for _, left in results)
