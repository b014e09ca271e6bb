"""Groups: the same bits on every rank, no deadlock in any order, and nobody left waiting for the dead."""

import gc
import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ddprun_hooks import ExchangeError
from ddprun_hooks.shm import setup
from ddprun_hooks.shm.group import ShmGroup, ShmOperation
from ddprun_hooks.shm.progress_thread import ProgressThread, progress_thread
from ddprun_hooks.shm.setup import open_shm_groups
from tests.ranks import as_processes, is_running
from tests.warm import fork_server

SLOT_BYTES = 4096
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int32, torch.int64)


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short tensors take several pieces."""
    monkeypatch.setattr(setup, "SLOT_BYTES", SLOT_BYTES)


def as_ranks(
    size: int,
    body: Callable[[int, list[ShmGroup]], Any],
    *,
    count: int = 1,
    timeout_s: float = 30,
    before_connecting: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Run `body(rank, groups)` on `size` threads; gives what they return.

    `before_connecting` runs when all ranks listen and none has connected.
    """
    addresses, all_listen = [b""] * size, threading.Barrier(size, before_connecting, timeout_s)

    def run(rank: int) -> Any:
        def share(address: bytes) -> list[bytes]:
            addresses[rank] = address
            all_listen.wait()
            return addresses

        labels = range(size)
        groups = open_shm_groups(
            rank=rank, labels=labels, count=count, all_gather_bytes=share, timeout_s=timeout_s
        )
        return body(rank, groups)

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        for future in as_completed(futures, 60):
            future.result()  # raises what failed first
        return [future.result() for future in futures]


def contribution(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers whose sum depends on the order in which they are added and on the precision."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


def rank_order_sum(tensors: list[Tensor]) -> Tensor:
    """What the collectives promise, computed in the plainest way."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = tensors[0].to(wide)
    for tensor in tensors[1:]:
        total = total + tensor.to(wide)
    return total.to(dtype)


def lengths(dtype: torch.dtype) -> tuple[int, ...]:
    slot = SLOT_BYTES // dtype.itemsize
    return 0, 1, 7, slot - 1, slot, slot + 1, 5 * slot + 3


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_reduce_gives_the_rank_order_sum_bit_for_bit_on_every_rank(size: int) -> None:
    """Every dtype and length, one operation right after the other: the plain sum, to the bit."""
    cases = [(dtype, numel) for dtype in DTYPES for numel in lengths(dtype)]

    def body(rank: int, groups: list[ShmGroup]) -> list[Tensor]:
        progress, results = ProgressThread(), [contribution(rank, numel, dtype) for dtype, numel in cases]
        for future in [progress.submit(groups[0], groups[0].all_reduce(tensor)) for tensor in results]:
            future.wait()
        return results

    wanted = [
        rank_order_sum([contribution(rank, numel, dtype) for rank in range(size)]) for dtype, numel in cases
    ]
    for results in as_ranks(size, body):
        for case, result, total in zip(cases, results, wanted, strict=True):
            assert torch.equal(result, total), case


def test_a_matrix_is_summed_in_its_own_memory() -> None:
    """Parameters of any shape, also those that autograd watches."""

    def body(rank: int, groups: list[ShmGroup]) -> Tensor:
        matrix = torch.full((30, 50), rank + 1.0, requires_grad=True)
        ProgressThread().submit(groups[0], groups[0].all_reduce(matrix)).wait()
        return matrix

    for matrix in as_ranks(2, body):
        assert torch.equal(matrix, torch.full((30, 50), 3.0))


PARTS = [(5, 0, 3000, 1), (0, 0, 0, 0), (0, 9000, 0, 0), (1024, 1023, 1025, 4096), (0, 0, 0, 3)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64])
def test_parts_of_unequal_sizes_are_scattered_and_gathered(size: int, dtype: torch.dtype) -> None:
    """Each rank keeps the rank-order sum of its own part; gathered again, the parts are the whole sum. Both
    also work in place.
    """

    def body(rank: int, groups: list[ShmGroup]) -> list[tuple[Tensor, Tensor]]:
        (group,), progress, results = groups, ProgressThread(), []
        for in_place, parts in itertools.product((False, True), PARTS):
            sizes = parts[:size]
            given = contribution(rank, sum(sizes), dtype)
            kept = given.split_with_sizes(sizes)[rank] if in_place else given.new_empty(sizes[rank])
            progress.submit(group, group.reduce_scatter(given, sizes, kept)).wait()
            whole = given if in_place else given.new_empty(sum(sizes))
            part = kept.clone()
            progress.submit(group, group.all_gather(kept, sizes, whole)).wait()
            results.append((part, whole))
        return results

    for rank, results in enumerate(as_ranks(size, body)):
        for parts, (part, whole) in zip(PARTS * 2, results, strict=True):
            sizes = list(parts[:size])
            total = rank_order_sum([contribution(each, sum(sizes), dtype) for each in range(size)])
            assert torch.equal(part, total.split_with_sizes(sizes)[rank])
            assert torch.equal(whole, total)


def test_groups_in_different_orders_on_different_ranks_neither_mix_nor_deadlock() -> None:
    """Operations of two groups are interleaved at random on each rank, with random delays; all sums are
    right, and the futures of an group are set in order.
    """
    size, turns = 3, 60

    def body(rank: int, groups: list[ShmGroup]) -> int:
        progress, dice = ProgressThread(), random.Random(rank)
        left = [0] * turns + [1] * turns
        dice.shuffle(left)
        done: list[list[int]] = [[], []]
        sent: list[tuple[Tensor, int, Future[None]]] = []
        turn = [0, 0]
        for which in left:
            seed = 2 * turn[which] + which
            tensor = contribution(rank, 1 + 37 * seed, torch.float32, seed)
            future = progress.submit(groups[which], groups[which].all_reduce(tensor))
            future.add_done_callback(lambda _, which=which, seed=seed: done[which].append(seed))  # type: ignore[misc]
            sent.append((tensor, seed, future))
            turn[which] += 1
            if dice.random() < 0.3:
                time.sleep(dice.random() * 2e-3)
        for _, _, future in sent:
            future.wait()
        until(lambda: len(done[0]) == len(done[1]) == turns)  # a waiter may wake before callbacks are called
        assert done == [sorted(done[0]), sorted(done[1])]
        return sum(
            not torch.equal(
                tensor,
                rank_order_sum(
                    [contribution(each, tensor.numel(), torch.float32, seed) for each in range(size)]
                ),
            )
            for tensor, seed, _ in sent
        )

    assert as_ranks(size, body, count=2) == [0] * size


def test_a_callback_may_submit_the_next_operation() -> None:
    """A chain of operations, each submitted when the one before it is done, on whatever thread that is."""
    links = 2000  # more than a recursion would survive

    def body(rank: int, groups: list[ShmGroup]) -> Tensor:
        (group,), progress, end = groups, ProgressThread(), threading.Event()
        total, left = torch.ones(3, dtype=torch.int64), iter(range(links))

        def go_on(_: object = None) -> None:
            if next(left, None) is None:
                end.set()
            else:
                total.remainder_(1_000_003)
                progress.submit(group, group.all_reduce(total)).add_done_callback(go_on)

        time.sleep(0.01 * rank)
        go_on()
        assert end.wait(30)
        return total

    wanted = 1
    for _ in range(links):
        wanted = wanted % 1_000_003 * 2
    assert [total.tolist() for total in as_ranks(2, body)] == [[wanted] * 3] * 2


def test_a_peer_that_is_late_is_named_and_the_group_is_of_no_more_use() -> None:
    """Ranks 0 and 1 wait for rank 2 until the timeout; what they had queued fails with it, and what comes
    later fails without having begun.
    """
    finished = threading.Barrier(3)
    begun: list[int] = []

    def never_begun() -> ShmOperation:
        begun.append(1)
        yield ()

    def body(rank: int, groups: list[ShmGroup]) -> list[str]:
        (group,), progress, messages = groups, ProgressThread(), []
        if rank != 2:
            start = time.monotonic()
            queued = [progress.submit(group, group.all_reduce(torch.ones(9))) for _ in range(2)]
            for future in queued:
                with pytest.raises(ExchangeError) as caught:
                    future.wait()
                messages.append(str(caught.value))
            assert time.monotonic() - start >= 0.3
            later = progress.submit(group, never_begun())
            with pytest.raises(ExchangeError, match="rank 2"):
                later.wait()
        finished.wait(60)
        return messages

    late = "rank 2 did not arrive within 0.3 s"
    assert as_ranks(3, body, timeout_s=0.3) == [[late, late], [late, late], []]
    assert not begun


def test_an_operation_that_fails_of_itself_breaks_the_group_with_its_own_error() -> None:
    """A tensor that is too short for its parts is an error of the one operation; later ones refer to it."""

    def body(rank: int, groups: list[ShmGroup]) -> None:
        (group,), progress = groups, ProgressThread()
        with pytest.raises(RuntimeError, match="split_with_sizes"):
            progress.submit(group, group.reduce_scatter(torch.ones(3), [2, 2], torch.ones(2))).wait()
        with pytest.raises(ExchangeError, match="split_with_sizes"):
            progress.submit(group, group.all_reduce(torch.ones(3))).wait()

    as_ranks(2, body)


def test_ranks_that_do_not_come_to_open_groups_are_named() -> None:
    """Rank 0 waits for rank 1 no longer than it was told to."""
    with pytest.raises(ExchangeError, match="rank 7 did not arrive"):
        open_shm_groups(
            rank=0,
            labels=[4, 7],
            count=1,
            all_gather_bytes=lambda address: [address, b""],
            timeout_s=0.1,
        )


def test_memory_is_not_shared_with_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends look at whose process the other is."""
    monkeypatch.setattr("os.geteuid", lambda: 4242)

    def body(rank: int, groups: list[ShmGroup]) -> None:
        raise AssertionError("opened")

    with pytest.raises(ExchangeError, match=rf"refused .* user {os.getuid()}\b.* as 4242"):
        as_ranks(2, body, timeout_s=2)


NOBODY = 65534
SILENT, BABBLING = b"", b"\2" * 36


def connect_as_another_user(said: bytes, times: int, folder: str) -> None:
    """Connect to every socket of shared memory that there is, as a user who may not.

    Args:
        said: on each connection, if anything.
        times: how often to connect to each.
        folder: in it, `listening` says that the ranks listen, `knocked` that this has connected, `gone` that
            it may go.
    """
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    until((Path(folder) / "listening").exists)
    held = []
    for name in listening_sockets() * times:
        knock = socket.socket(socket.AF_UNIX)
        knock.settimeout(1)
        try:
            knock.connect(b"\0" + name)
            if said:
                knock.send(said)
        except OSError:  # closed at once
            pass
        held.append(knock)
    assert held
    (Path(folder) / "knocked").touch()
    until((Path(folder) / "gone").exists)


def listening_sockets() -> list[bytes]:
    """Those of this machine, of other tests that run now, too."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line.rpartition("@")[2].encode() for line in lines if "@ddprun-" in line]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize(
    ("said", "times"),
    [(SILENT, 1), (BABBLING, 1), (SILENT, 300)],
    ids=["silent", "babbling", "often"],
)
def test_another_user_who_connects_changes_nothing(tmp_path: Path, said: bytes, times: int) -> None:
    """A real process of another user finds the socket, connects before any rank does and stays connected,
    silent or not, once or many times: the ranks get their group all the same.
    """
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents[:3]:  # pytest's own are for its user alone
        folder.chmod(folder.stat().st_mode | 0o011)
    context = fork_server()
    stranger = context.Process(target=connect_as_another_user, args=(said, times, str(tmp_path)), daemon=True)
    stranger.start()

    def before_connecting() -> None:
        (tmp_path / "listening").touch()
        until((tmp_path / "knocked").exists)

    def body(rank: int, groups: list[ShmGroup]) -> Tensor:
        tensor = torch.full((3,), rank + 1.0)
        ProgressThread().submit(groups[0], groups[0].all_reduce(tensor)).wait()
        return tensor

    try:
        for tensor in as_ranks(3, body, timeout_s=20, before_connecting=before_connecting):
            assert torch.equal(tensor, torch.full((3,), 6.0))
    finally:
        (tmp_path / "gone").touch()
        stranger.join(30)
        assert stranger.exitcode == 0


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def mappings() -> set[str]:
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "ddprun" in line}


def test_a_group_leaves_no_descriptor_and_no_memory() -> None:
    """When it is dropped; and its memory has no name, in /dev/shm or elsewhere."""

    def body(rank: int, groups: list[ShmGroup]) -> set[str]:
        time.sleep(0.01 * rank)  # the others' operations are handed to the thread, which starts
        for group in groups:
            progress_thread.submit(group, group.all_reduce(torch.ones(5000))).wait()
        return mappings()

    def left() -> tuple[set[str], set[str]]:
        gc.collect()
        return descriptors(), mappings()

    earlier = left()[1]
    as_ranks(3, body)
    until(lambda: left()[1] == earlier)
    before = left()
    for mapped in as_ranks(3, body, count=2):
        assert mapped - earlier
        assert all("/memfd:ddprun (deleted)" in line for line in mapped)
    until(lambda: left() == before)


def open_by_file(rank: int, folder: Path) -> ShmGroup:
    """One group of three processes that share nothing but a folder."""
    store = dist.FileStore(str(folder / "store"), -1)

    def share(address: bytes) -> list[bytes]:
        store.set(str(rank), address.decode())
        return [bytes(store.get(str(other))) for other in range(3)]

    return open_shm_groups(rank=rank, labels=range(3), count=1, all_gather_bytes=share, timeout_s=30)[0]


def survive(folder: Path, with_child: bool) -> tuple[str, float, float] | None:
    """Ranks 0 and 1: the error that rank 2's death brings, seconds from it, and CPU seconds in the wait for
    it. Process 2 starts rank 2, which forks a child of its own, and kills it.
    """
    rank = int(os.environ["RANK"])
    written, killed, over = folder / "child", folder / "killed", folder / "over"
    if rank == 2:
        pid = os.fork()
        if pid == 0:
            be_killed(folder, written, with_child)
        until(lambda: written.exists() and written.read_text().endswith("\n"))
        time.sleep(0.3)
        killed.write_text(str(time.monotonic()))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        until(lambda: len(list(folder.glob("over*"))) == 2)
        for child in map(int, written.read_text().split()):
            assert is_running(child)
            os.kill(child, signal.SIGKILL)
        return None
    group, progress = open_by_file(rank, folder), ProgressThread()
    progress.submit(group, group.all_reduce(torch.ones(10))).wait()
    busy_s = time.process_time()
    future = progress.submit(group, group.all_reduce(torch.ones(10)))
    with pytest.raises(ExchangeError) as caught:
        future.wait()
    noticed, busy_s = time.monotonic(), time.process_time() - busy_s
    over.with_name(f"over{rank}").touch()
    return str(caught.value), noticed - float(killed.read_text()), busy_s


def be_killed(folder: Path, written: Path, with_child: bool) -> None:
    """Rank 2: takes part once and is then away for good."""
    try:
        group = open_by_file(2, folder)
        ProgressThread().submit(group, group.all_reduce(torch.ones(10))).wait()
        child = os.fork() if with_child else -1
        if child:
            written.write_text(f"{child}\n" if with_child else "\n")
        time.sleep(60)
    finally:
        os._exit(1)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(2e-3)


@pytest.mark.parametrize("with_child", [False, True])
def test_a_killed_rank_fails_the_others_at_once(tmp_path: Path, with_child: bool) -> None:
    """Ranks that sleep in an operation hear of it long before the timeout, without having been busy, and also
    when a forked child of the dead rank, such as a data loader's worker, lives on.
    """
    outcomes = as_processes(3, survive, tmp_path, with_child)
    for message, after_s, busy_s in outcomes[:2]:
        assert message == "rank 2 left the exchange: the process has ended or given up"
        assert after_s < 10  # of the timeout's 30; a few milliseconds when the cores are free
        assert busy_s < 0.1


def test_steps_never_block() -> None:
    """An operation whose peers are not there says whom it waits for; it is a generator, and can be left."""

    def body(rank: int, groups: list[ShmGroup]) -> Iterator[Any]:
        (group,) = groups
        operation: ShmOperation = group.all_reduce(torch.ones(3))
        if rank == 0:
            assert [peer.rank_label for peer in next(operation)] == [1, 2]
            assert [peer.rank_label for peer in next(operation)] == [1, 2]
            assert group.phase == 0
        return operation

    as_ranks(3, body)
