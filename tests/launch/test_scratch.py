"""The launcher's temporary folder, and what ranks leave in it."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddprun.host import rank_files
from ddprun.host.rank_files import remove_dead_launcher_folders, temporary_launcher_folder

OPEN = """
import sys

from ddprun.host.rank_files import temporary_launcher_folder

with temporary_launcher_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders are made, here and in processes that the test starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield tmp_path
    monkeypatch.setattr("tempfile.tempdir", None)


def test_only_the_folder_of_a_launcher_that_is_gone_is_removed(temporary: Path) -> None:
    """One that was killed could not clear up; one that runs needs its folder."""
    living, dead = (
        subprocess.Popen(
            [sys.executable, "-c", OPEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    )
    try:
        folders = []
        for process in (living, dead):
            assert process.stdout is not None
            folders.append(Path(process.stdout.readline().strip()))
        (folders[1] / "note").touch()
        dead.kill()
        dead.communicate(timeout=30)
        assert all(folder.is_dir() for folder in folders)
        with temporary_launcher_folder() as own:
            assert own.is_dir()
            assert [folder.is_dir() for folder in folders] == [True, False]
        living.communicate(timeout=30)
        remove_dead_launcher_folders()
        assert list(temporary.iterdir()) == []
    finally:
        for process in (living, dead):
            process.kill()
            process.communicate(timeout=30)


def test_a_fork_keeps_no_folder_of_a_dead_launcher(temporary: Path) -> None:
    """As a process of a pipeline's own code, which goes on when the launcher and its ranks are killed."""
    fork = "os.fork() or os.kill(os.getppid(), signal.SIGKILL)\n    time.sleep(60)"
    command = [sys.executable, "-c", f"import os, signal, time\n{OPEN.replace('sys.stdin.read()', fork)}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as launcher:
        launcher.wait(30)
        try:
            remove_dead_launcher_folders()
            assert list(temporary.iterdir()) == []
        finally:
            os.killpg(launcher.pid, signal.SIGKILL)


def test_hosts_that_share_a_disk_keep_their_folders_apart(temporary: Path) -> None:
    """A lock that another host holds on a folder is not seen here."""
    script = f"import os\nos.uname = lambda: os.uname_result('abcde')\n{OPEN}"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as elsewhere:
        assert elsewhere.stdout is not None
        folder = Path(elsewhere.stdout.readline().strip())
        elsewhere.kill()
    remove_dead_launcher_folders()
    assert list(temporary.iterdir()) == [folder]


def test_a_new_folder_is_not_taken_for_a_dead_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another launcher that starts before it is locked."""
    lock = fcntl.flock

    def cleaned_and_locked(handle: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            remove_dead_launcher_folders()
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", cleaned_and_locked)
    with temporary_launcher_folder() as folder:
        assert folder.is_dir()


def test_the_end_of_a_run_is_left_for_the_launcher(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the exit code then. Where it cannot be left, the rank gives it itself; a success that cannot
    be told is none.
    """
    with temporary_launcher_folder() as folder:
        monkeypatch.setenv(rank_files.SCRATCH_VARIABLE, str(folder))
        assert rank_files.read_outcome(folder) is None
        assert rank_files.report_outcome_and_exit_code(3) == 0
        assert rank_files.read_outcome(folder) == 3
    monkeypatch.setenv(rank_files.SCRATCH_VARIABLE, str(temporary / "nowhere"))
    assert (rank_files.report_outcome_and_exit_code(3), rank_files.report_outcome_and_exit_code(0)) == (3, 1)
    rank_files.report_checkpoint(5)
    rank_files.report_run_dir(temporary)
    assert rank_files.read_run_dir() is None
    monkeypatch.delenv(rank_files.SCRATCH_VARIABLE)
    assert rank_files.report_outcome_and_exit_code(3) == 3


def test_only_children_that_do_not_fail_are_signalled(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number may be another process's by now."""
    monkeypatch.setenv(rank_files.SCRATCH_VARIABLE, str(temporary))
    rank_files.register_pid()
    assert rank_files.live_rank_pids(temporary) == [], "this process is no child of its own"
    child = subprocess.Popen([sys.executable, "-c", OPEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        (temporary / "pids" / str(child.pid)).touch()
        assert rank_files.live_rank_pids(temporary) == [child.pid]
    finally:
        child.kill()
        child.communicate(timeout=30)
    assert rank_files.live_rank_pids(temporary) == []
    rank_files.unregister_pid()
    assert not (temporary / "pids" / str(os.getpid())).exists()
