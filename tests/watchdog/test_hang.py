"""What a rank says of a hang: which of the collectives that it waits for stands on top."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest
import torch

from ddprun.engine import failures
from ddprun.engine.failures import FailureContext, make_ranks_and_watchdog
from ddprun.parallel import ranks as ranks_module
from ddprun.parallel.ranks import RankEnvironment, Ranks
from ddprun.watchdog.hang_report import PeerAddress, build_report
from ddprun.watchdog.rank_watchdog import RankWatchdog, WatchedCollective, WatchedSequence
from ddprun.watchdog.status_page import RankStatus
from ddprun_hooks.payload import ParamSlice, Payload
from tests.ranks import free_port
from tests.warm import fork_server

AROUND = (0, 3, "here")  # rank, size, host
BUCKET = Payload(torch.zeros(4), (ParamSlice("only.weight", (4,), 0, 4),), "delta", 2)


def page(rank: int, issued: tuple[int, ...], *overdue: WatchedCollective) -> RankStatus:
    return RankStatus(
        rank=rank,
        pid=100 + rank,
        state="S",
        beat_age_s=0.1,
        stage="stages[0].train",
        step=3,
        phase="forward",
        phase_age_s=8.0,
        issued=issued,
        waits=tuple(one.status_entry for one in overdue),
        code_location="",
        hang_reported=False,
    )


def test_the_oldest_collective_is_shown_first() -> None:
    """And what else the rank waits for below it, with its parameters."""
    watchdog = RankWatchdog(0, 8.0, None, lambda *_: None)
    control, deltas = (
        WatchedSequence(watchdog, 0, "control", (0, 1, 2)),
        WatchedSequence(watchdog, 1, "deltas", (0, 1, 2)),
    )
    word = control.record_issued("all_gather", what="the control message")
    delta = deltas.record_issued("all_reduce", BUCKET)
    seen = {0: page(0, (1, 1), word, delta), 1: page(1, (0, 0)), 2: page(2, (1, 1), word)}
    report = build_report(*AROUND, 8.0, [word, delta], seen, {})
    assert "rank 1 did not arrive within 8 s" in report.message
    first, _, rest = report.message.partition("also waits for")
    assert "all_gather 1 of control" in first
    assert rest.strip() == "all_reduce 1 of deltas, bucket 2 (delta): only.weight"
    assert (report.facts["line"], report.facts["bucket"], report.facts["params"]) == ("control", None, [])


def two_ranks(
    monkeypatch: pytest.MonkeyPatch, open_store: Callable[..., torch.distributed.Store], within_s: float = 5
) -> list[Ranks]:
    """Two ranks in this process, each with a store that `open_store` makes."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(ranks_module, "open_store", lambda *_, **__: open_store())
    both = [
        make_ranks_and_watchdog(RankEnvironment(rank, 2, rank, 2), within_s, FailureContext())
        for rank in range(2)
    ]
    for one in both:
        one.connect_store()
    return both


@pytest.mark.parametrize(("claimant", "is_hang", "code"), [(1, False, 2), (1, True, None), (0, False, None)])
def test_only_another_ranks_failure_ends_a_rank_that_is_being_connected(
    monkeypatch: pytest.MonkeyPatch, claimant: int, is_hang: bool, code: int | None
) -> None:
    """After a hang it makes its own report first; after its own failure the training thread ends it."""
    store = torch.distributed.HashStore()
    both = two_ranks(monkeypatch, lambda: store)
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setattr(failures, "_LAUNCHER_REACTION_S", 0.0)
    failures.exit_if_peer_failed(both[0], FailureContext(), "making a group")
    assert codes == [], "nobody has failed yet"
    both[claimant].claim_first_failure(2, is_hang=is_hang)
    failures.exit_if_peer_failed(both[0], FailureContext(), "making a group")
    assert codes == ([] if code is None else [code])


@pytest.mark.parametrize(("is_hang", "reports"), [(True, 1), (False, 0)])
def test_a_rank_whose_collective_breaks_after_a_hang_reports_the_hang(
    monkeypatch: pytest.MonkeyPatch, is_hang: bool, reports: int
) -> None:
    """The ranks that found it have ended before this one's watchdog knew."""
    store = torch.distributed.HashStore()
    both = two_ranks(monkeypatch, lambda: store)
    found: list[list[WatchedCollective]] = []
    watchdog = RankWatchdog(0, 600.0, None, lambda _, waits: found.append(waits))
    pending = watchdog.new_sequence("gradients", (0, 1)).record_issued("all_reduce", BUCKET)
    both[0].watchdog = watchdog
    watchdog.start()
    time.sleep(0.5)
    assert not found
    pending.mark_failed()
    both[1].claim_first_failure(1, is_hang=is_hang)
    with pytest.raises(RuntimeError) as error:
        exec("raise RuntimeError('Connection closed by peer')", {"__name__": "torch.distributed.any"})
    failures.wait_for_first_failure(error.value, both[0])
    watchdog.close()
    assert found == [[pending]] * reports


def serve(port: int, ready: Connection) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    ready.send(bool(store))
    time.sleep(60)


def test_a_store_that_answers_late_knows_one_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine: hosts that each went by themselves would print the same message."""
    port, (ours, theirs) = free_port(), Pipe()
    server = fork_server().Process(target=serve, args=(port, theirs), daemon=True)
    server.start()
    assert ours.recv()
    assert server.pid is not None
    join = partial(torch.distributed.TCPStore, "127.0.0.1", port, is_master=False)
    both = two_ranks(monkeypatch, join, within_s=30)
    os.kill(server.pid, signal.SIGSTOP)
    threading.Timer(2.0, os.kill, (server.pid, signal.SIGCONT)).start()
    with ThreadPoolExecutor() as pool:
        claimed = list(pool.map(lambda one: one.claim_first_failure(2), both))
    server.kill()
    assert claimed[0] == claimed[1]
    assert claimed[0].rank in (0, 1)


def test_a_rank_whose_host_has_no_status_server_is_said_to_be_out_of_reach() -> None:
    """Its launcher may be ddprun's all the same, and its server not have opened."""
    watchdog = RankWatchdog(0, 8.0, None, lambda *_: None)
    control = WatchedSequence(watchdog, 0, "control", (0, 1, 2))
    word = control.record_issued("all_gather", what="the control message")
    seen = {0: page(0, (1,), word), 2: page(2, (1,), word)}
    report = build_report(*AROUND, 8.0, [word], seen, {1: PeerAddress("there", "/page", "")})
    assert "cannot be asked: no status server of ddprun's launcher runs there" in report.message


def test_a_collective_that_all_have_entered_names_a_next_step() -> None:
    """No rank is at fault, so nothing else says what to do."""
    watchdog = RankWatchdog(0, 8.0, None, lambda *_: None)
    control = WatchedSequence(watchdog, 0, "control", (0, 1))
    word = control.record_issued("all_gather", what="the control message")
    seen = {0: page(0, (1,), word), 1: page(1, (1,), word)}
    peers = {0: PeerAddress("here", "/page", ""), 1: PeerAddress("there", "/page", "")}
    message = build_report(*AROUND, 8.0, [word], seen, peers).message
    assert message.splitlines()[0].endswith("have all entered a collective that has not completed for 8 s")
    assert message.splitlines()[-1].split(maxsplit=2)[:2] == ["next", "step"]
    assert "ddprun doctor" in message
    on_one_host = {rank: PeerAddress("here", "/page", "") for rank in (0, 1)}
    assert "ddprun doctor" not in build_report(*AROUND, 8.0, [word], seen, on_one_host).message
    seen[1] = page(1, (0,))
    assert "ddprun doctor" not in build_report(*AROUND, 8.0, [word], seen, peers).message
