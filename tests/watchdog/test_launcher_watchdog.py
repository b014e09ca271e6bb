"""What the launcher answers for its ranks."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ddprun.watchdog import launcher_watchdog
from ddprun.watchdog.launcher_watchdog import LauncherWatchdog

RANK = """
import sys
from pathlib import Path

from ddprun.watchdog.status_page import StatusPage

page = StatusPage(int(sys.argv[1]), Path(sys.argv[2]))
if sys.argv[3] == "reported":
    page.set_hang_reported()
print("ready", flush=True)
sys.stdin.read()
"""


def rank(number: int, folder: Path, reported: str) -> "subprocess.Popen[str]":
    """A process with a status page, once that is there."""
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(number), str(folder), reported],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_ranks_that_have_reported_a_hang_and_ended_are_still_answered_for(tmp_path: Path) -> None:
    """Those of the last start alone; ranks that ended otherwise are none any more."""
    watchdog = LauncherWatchdog(tmp_path, None)
    before, now = tmp_path / "run" / "attempt_0", tmp_path / "run" / "attempt_1"
    processes = [
        rank(5, before, "reported"),
        rank(0, now, ""),
        rank(1, now, "reported"),
        rank(2, now, ""),
    ]
    try:
        assert sorted(watchdog.read_statuses()) == [0, 1, 2, 5]
        for process in processes[:3]:
            process.communicate(timeout=30)
        assert sorted(watchdog.read_statuses()) == [1, 2]
    finally:
        for process in processes:
            process.communicate(timeout=30)


def test_a_launcher_that_begins_to_linger_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if it begins while the watchdog still waits for the rendezvous to answer."""
    monkeypatch.setattr(launcher_watchdog, "_LAUNCHER_EXIT_S", 0.0)
    monkeypatch.setattr(launcher_watchdog, "_MAX_UNANSWERED", 1)
    (tmp_path / "run" / "attempt_0").mkdir(parents=True)
    given_up, asked = threading.Event(), threading.Event()

    def reachable() -> bool:
        watchdog.linger(0)
        asked.set()
        return False

    with LauncherWatchdog(tmp_path, None, given_up.set, reachable) as watchdog:
        assert asked.wait(30)
    assert not given_up.is_set()
    assert capsys.readouterr().err == ""


def test_a_status_server_that_cannot_open_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other hosts' ranks will say that nobody answers here, and nothing said why."""
    with LauncherWatchdog(tmp_path, "192.0.2.1"):
        assert "DDPRUN_STATUS_SERVER" not in os.environ
    assert "warning: no status server at 192.0.2.1: " in capsys.readouterr().err
