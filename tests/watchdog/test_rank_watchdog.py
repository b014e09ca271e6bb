"""Status pages, the watchdog of one rank, and asking another host."""

import contextlib
import errno
import os
import resource
import signal
import socket
import subprocess
import sysconfig
import threading
import time
from functools import partial
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

from ddprun.host.network import interface_by_address
from ddprun.watchdog.hang_report import dump_flight_recorders
from ddprun.watchdog.rank_watchdog import HANG_FILE, RankWatchdog, WatchedCollective
from ddprun.watchdog.status_page import (
    STATUSES_ADAPTER,
    HangStatusServer,
    StatusPage,
    announce_hang_and_ask,
    announce_hang_to_all,
    read_page,
    read_pages,
)
from ddprun_hooks.comm.collective_observer import observed_wait
from ddprun_hooks.payload import ParamSlice, Payload


def watchdog(
    folder: Path | None, timeout_s: float = 0.4
) -> tuple[RankWatchdog, list[list[WatchedCollective]], threading.Event]:
    """A watchdog of rank 0, what its handler was called with, and whether it was."""
    calls: list[list[WatchedCollective]] = []
    rung = threading.Event()

    def handler(_: RankWatchdog, waits: list[WatchedCollective]) -> None:
        calls.append(waits)
        rung.set()

    return RankWatchdog(0, timeout_s, folder, handler), calls, rung


@pytest.mark.parametrize("in_folder", [True, False])
def test_a_status_page_says_what_its_rank_is_at(tmp_path: Path, in_folder: bool) -> None:
    """To anyone of this host who knows its path, and after JSON to other hosts."""
    it, _, _ = watchdog(tmp_path if in_folder else None)
    it.set_phase(b"data", 12, "stages[1].train")
    it.set_phase(b"backward")
    line = it.new_sequence("world.0", [0, 1])
    line.record_issued("all_reduce", what="one").mark_done()
    line.record_issued("all_reduce", what="two")
    noting = threading.Thread(target=lambda: it.write_status(it.find_overdue(0)))
    noting.start()
    noting.join()
    found = read_page(it.status_page.path)
    assert found is not None
    assert (found.pid, found.stage, found.step, found.phase) == (
        os.getpid(),
        "stages[1].train",
        12,
        "backward",
    )
    assert found.issued == (2,)
    assert [(wait.number, wait.what, wait.ranks) for wait in found.waits] == [(2, "two", (0, 1))]
    assert found.code_location.endswith("in test_a_status_page_says_what_its_rank_is_at")
    assert not found.is_lifeless
    assert STATUSES_ADAPTER.validate_json(STATUSES_ADAPTER.dump_json({0: found})) == {0: found}
    assert list(read_pages(tmp_path)) == ([0] if in_folder else [])
    it.status_page.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_status_page_in_a_folder_keeps_one_descriptor(tmp_path: Path) -> None:
    """That of its mapping; the one by which the file was opened was never closed."""
    before = len(os.listdir("/proc/self/fd"))
    page = StatusPage(0, tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    page.remove()


def test_a_status_page_without_room_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file stayed. The rank's status page is in memory then."""
    allocate, full = os.posix_fallocate, [OSError(errno.ENOSPC, "no space")]

    def allocate_later(*arguments: int) -> None:
        if full:
            raise full.pop()
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", allocate_later)
    it, _, _ = watchdog(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert read_page(it.status_page.path) is not None


def test_a_status_page_of_a_stopped_process_says_so(tmp_path: Path) -> None:
    """Though it cannot write any more."""
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        page = StatusPage(3, tmp_path)
        data = bytearray(Path(page.path).read_bytes())
        data[8:16] = sleeper.pid.to_bytes(8, "little")
        Path(page.path).write_bytes(data)
        sleeper.send_signal(signal.SIGSTOP)
        end = time.monotonic() + 5
        while not (found := read_pages(tmp_path)[3]).is_suspended and time.monotonic() < end:
            time.sleep(0.01)
        assert found.is_suspended
        assert found.is_lifeless
    finally:
        sleeper.kill()
        sleeper.wait()


def test_what_is_no_status_page_is_none(tmp_path: Path) -> None:
    """Absent, empty, half made, of something else."""
    for content in (b"", b"ddprun1\0", b"\0" * 40000, b"x" * 40000):
        (tmp_path / "rank-00000.status").write_bytes(content)
        assert read_page(tmp_path / "rank-00000.status") is None
    assert read_page(tmp_path / "nowhere") is None


def test_who_waits_for_connections_asks_whether_a_rank_has_failed(tmp_path: Path) -> None:
    """One that waits in a collective need not: its connections break. Nor one whose own wait has failed."""
    asked, heard = [], threading.Event()

    def ask(what: str) -> None:
        asked.append(what)
        heard.set()

    it = RankWatchdog(0, 60, tmp_path, lambda *_: None, ask)
    it.start()
    with observed_wait(it.new_sequence("world.0", [0, 1]), "all_reduce", "a sum"):
        assert not heard.wait(2.5)
    failed = it.new_sequence("failed", [0, 1]).record_issued("new_group", what="failing")
    failed.mark_failed()
    assert not heard.wait(2.5)
    failed.mark_done()
    with observed_wait(it.new_sequence("set-up", [0, 1]), "new_group", "making a group"):
        assert heard.wait(10)
    it.close()
    assert set(asked) == {"making a group"}


def test_a_collective_that_takes_too_long_calls_the_handler_with_its_bucket(tmp_path: Path) -> None:
    """One that has ended in time, by its future or by what was asked, does not."""
    it, calls, rung = watchdog(tmp_path)
    line = it.new_sequence("world.0", [0, 1])
    it.start()
    line.record_issued("all_reduce", what="ends").mark_done()
    line.record_issued("all_reduce", what="has ended").set_completion_check(lambda: True)
    assert not rung.wait(0.8)
    payload = Payload(torch.zeros(2), (ParamSlice("w", (2,), 0, 2),), "gradient", 7)
    line.record_issued("all_reduce", payload).set_completion_check(lambda: False)
    assert rung.wait(5)
    ((one, *others),) = calls
    assert (one.bucket, one.params[0].name, one.number) == (7, "w", 3)
    assert one.description == "gradient bucket 7"
    assert 0.4 < one.age_s(it.clock_us()) < 6
    assert not others


def test_a_collective_that_failed_is_still_what_this_rank_waits_for(tmp_path: Path) -> None:
    """Ranks that end over a hang break the others' collectives. It does not ring by growing older."""
    it, _, _ = watchdog(tmp_path, timeout_s=30)
    line = it.new_sequence("world.0", [0, 1])
    ended = threading.Event()
    line.record_issued("all_reduce", what="one").mark_done()
    two = line.record_issued("all_reduce", what="two")
    two.set_completion_check(ended.is_set)
    ended.set()
    assert it.find_overdue(0) == []  # over, as far as one can see
    with pytest.raises(ConnectionError), observed_wait(line, "broadcast", "three"):
        raise ConnectionError
    two.mark_failed()
    first = {one.what: one.age_s(it.clock_us()) for one in it.find_overdue(0)}
    time.sleep(0.05)
    assert {one.what: one.age_s(it.clock_us()) for one in it.find_overdue(0)} == first
    assert first.keys() == {"two", "three"}


def test_another_rank_that_finds_a_hang_is_heard(tmp_path: Path) -> None:
    """The file that the first rank of a host makes."""
    it, calls, rung = watchdog(tmp_path, timeout_s=600)
    it.start()
    (tmp_path / HANG_FILE).touch()
    assert rung.wait(5)
    assert calls == [[]]


def test_time_in_which_the_process_was_stopped_does_not_count(tmp_path: Path) -> None:
    """Ctrl-Z and fg: the collective is old, but nobody has waited for it."""
    it, _, rung = watchdog(tmp_path, timeout_s=2.0)
    it.new_sequence("world.0", [0, 1]).record_issued("all_reduce")
    it.suspended_us += 60_000_000
    assert it.find_overdue(0.0) == []
    it.suspended_us -= 60_000_000
    assert len(it.find_overdue(0.0)) == 1
    assert not rung.is_set()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_another_hosts_launcher_answers_those_who_know_its_secret(tmp_path: Path, address: str) -> None:
    """And takes word of a hang from them; others get nothing."""
    if address not in interface_by_address():
        pytest.skip("this machine has no IPv6")
    page = StatusPage(5, tmp_path)
    called: list[bool] = []

    with HangStatusServer(address, lambda: read_pages(tmp_path), lambda: called.append(True)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert announce_hang_and_ask(server.endpoint[:-1] + "x") is None
        assert not called
        found = announce_hang_and_ask(server.endpoint)
        assert found is not None
        assert found[5].pid == os.getpid()
        assert called == [True]
        assert list(announce_hang_to_all([server.endpoint])) == [5]
        assert called == [True, True]
        name = server.endpoint
        server.shutdown()
    assert announce_hang_and_ask(name) is None
    page.remove()


def test_asking_takes_no_longer_than_one_answer_may(tmp_path: Path) -> None:
    """Hosts that take the connection and say nothing are asked at the same time."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(8)]
        servers = [f"127.0.0.1:{server.getsockname()[1]}/secret" for server in silent]
        since = time.monotonic()
        assert announce_hang_to_all(servers) == {}
        assert time.monotonic() - since < 8, "one after the other would take 12 s"


def test_a_status_page_has_room_for_lines_of_many_ranks(tmp_path: Path) -> None:
    """A rank whose status page cannot say what it waits for would be taken for one that waits for nobody."""
    it, _, _ = watchdog(tmp_path)
    lines = (range(10_000), range(3, 9_003, 8), range(16, 24), [5], [2, 9])
    for ranks in lines[1:]:
        it.new_sequence("some", ranks).record_issued("all_reduce")
    it.new_sequence("world.0", lines[0]).record_issued("all_reduce")
    it.write_status(it.find_overdue(0))
    found = read_page(it.status_page.path)
    assert found is not None
    assert [wait.ranks for wait in found.waits] == [tuple(ranks) for ranks in lines[1:]]
    for ranks in lines:
        it.new_sequence("again", ranks).record_issued("all_reduce")
        it.write_status(it.find_overdue(0)[-1:])
        found = read_page(it.status_page.path)
        assert found is not None
        assert found.waits[0].ranks == tuple(ranks)
        assert STATUSES_ADAPTER.validate_json(STATUSES_ADAPTER.dump_json({0: found})) == {0: found}


def test_torch_is_no_code_of_the_user_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment may use the torch of the Python that it was made from, or of `pip --user`."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: f"/elsewhere/{name}")
    spec = find_spec("ddprun.watchdog.rank_watchdog")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := module_from_spec(spec))
    assert module._is_library_file(torch.nn.__file__)
    assert not module._is_library_file(pytest.__file__)


@pytest.mark.parametrize("note", ["{}", "3", '[1, ""]', '[[{}], ""]', '[[[]], ""]', "[[], "])
def test_a_status_page_with_half_a_note_is_none_yet(tmp_path: Path, note: str) -> None:
    page = StatusPage(0, tmp_path)
    page._page.note = note.encode()
    assert read_page(page.path) is None


def test_a_device_is_asked_about_the_oldest_collective_alone_and_not_at_once(tmp_path: Path) -> None:
    """To ask holds Python's lock. A thread that has turned to no GPU would begin to use the first one."""
    it, _, _ = watchdog(tmp_path, timeout_s=30)
    line, asked = it.new_sequence("world.0", [0, 1]), list[str]()
    over = {"one": True, "two": False, "three": False}

    def ask(what: str) -> bool:
        asked.append(what)
        return over[what]

    for what in over:
        line.record_issued("all_reduce", what=what).set_completion_check(partial(ask, what))
    it.suspended_us -= 500_000  # half a second later
    assert it.find_overdue(0.2) == []
    assert not asked, "they are young"
    it.suspended_us -= 2_000_000  # two seconds later
    it.device = torch.device("cuda", 3)
    with mock.patch.object(torch.cuda, "set_device") as set_device:
        assert [one.what for one in it.find_overdue(0.2)] == ["two"]
        assert asked == ["one", "two"]
        assert {call.args for call in set_device.call_args_list} == {(torch.device("cuda", 3),)}
        over["two"] = over["three"] = True
        assert it.find_overdue(0.2) == []
    assert asked == ["one", "two", "two", "three"]


def test_both_flight_recorders_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's is another one than Gloo's, and torch without CUDA has none."""
    from torch._C import _distributed_c10d

    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace_json", lambda: b'{"entries": []}')
    dump_flight_recorders(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []
    trace = b'{"entries": [{"profiling_name": "nccl:all_reduce"}]}'
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace_json", lambda: trace, raising=False)
    dump_flight_recorders(tmp_path, 3)
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [
        ("flight-recorder-nccl-00003.json", trace)
    ]


def test_a_thousand_idle_connections_keep_nobody_from_an_answer() -> None:
    """Who asks nothing is sent away."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        server = stack.enter_context(HangStatusServer("127.0.0.1", dict, lambda: None))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        address = ("127.0.0.1", int(server.server_address[1]))
        held = min(1000, hard // 3)  # both ends are open here
        idle = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(held)]
        assert announce_hang_and_ask(server.endpoint) == {}
        assert {one.recv(1) for one in idle} == {b""}
