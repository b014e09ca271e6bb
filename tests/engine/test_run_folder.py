"""The folder of a run is one run's at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddprun.config import load
from ddprun.engine import run_folder
from ddprun.engine.failures import FailureContext, make_ranks_and_watchdog
from ddprun.engine.run_folder import SUMMARY_FILE, RunFolderError
from ddprun.parallel.ranks import RankEnvironment
from ddprun.run_files import RUN_INFO_FILE, ResumeMode
from tests.ranks import as_processes, end_together

PIPELINE = """
model: {mlp: {inputs: 64, outputs: 10}}
data: digits
optimizer: sgd
stages: [save]
"""

HOLD = """
import fcntl
import os
import sys
import time

handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(handle, fcntl.LOCK_EX)
os.write(handle, b"process 7 on node1\\n")
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def held(folder: Path, for_s: float) -> "subprocess.Popen[str]":
    """Another process that has the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder / "run.lock"), str(for_s)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_run_that_goes_on_waits_for_its_predecessors_lock(tmp_path: Path) -> None:
    """A rank 0 that was killed is gone soon; the lock then falls to the next one."""
    (tmp_path / RUN_INFO_FILE).write_text("{}")
    (tmp_path / SUMMARY_FILE).write_text("{}")
    with held(tmp_path, 1.5) as other:
        run_folder._take_over_folder(tmp_path, 30)
        assert other.wait(30) == 0
    assert (tmp_path / "run.lock").read_text() == f"process {os.getpid()} on {os.uname().nodename}\n"
    assert (tmp_path / SUMMARY_FILE).exists(), "it stays until nothing can refuse to resume"


def test_a_folder_that_another_run_has_is_refused(tmp_path: Path) -> None:
    """After a while, with its name; nothing in it is touched."""
    (tmp_path / RUN_INFO_FILE).write_text("{}")
    (tmp_path / SUMMARY_FILE).write_text("{}")
    with held(tmp_path, 60) as other:
        with pytest.raises(RunFolderError, match="is in use by process 7 on node1"):
            run_folder._take_over_folder(tmp_path, 0.3)
        other.kill()
    assert (tmp_path / SUMMARY_FILE).exists()


def resumed_nowhere(folder: Path) -> str:
    """What is said where no host has the folder."""
    ranks = make_ranks_and_watchdog(RankEnvironment.read(), 60.0, FailureContext())
    ranks.connect_store()
    loaded = load(folder / "p.yaml")
    with pytest.raises(RunFolderError) as caught:
        run_folder.agree_on_folder(loaded, folder / "elsewhere", ranks, resuming="yes", known=None)
    return str(caught.value)


def test_a_folder_that_no_host_has_is_refused(tmp_path: Path) -> None:
    """As where another host has it, but takes no part."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    (said,) = as_processes(1, resumed_nowhere, tmp_path)
    where = tmp_path / "elsewhere"
    assert said == f"cannot resume in the run folder {where}: no host has its run.json"
    assert not where.exists()


def apart(
    folder: Path, disks: list[str], run_dir: str, others: ResumeMode = "if begun"
) -> tuple[int, ...] | str:
    """The leaders of ranks that are each on a host of its own, on these disks; or what is refused. The ranks
    besides the first are started with another mode.
    """
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    os.chdir(folder / disks[int(os.environ["RANK"])])
    ranks = make_ranks_and_watchdog(RankEnvironment.read(), 60.0, FailureContext())
    ranks.connect_store()
    ranks.join(torch.device("cpu"), "gloo")
    loaded = load(folder / "p.yaml")
    wanted = Path(run_dir)
    mode: ResumeMode = others if ranks.rank else "if begun"
    try:
        agreed = run_folder.agree_on_folder(loaded, wanted, ranks, resuming=mode, known=None)
    except (RunFolderError, RuntimeError) as error:  # the others lose the store
        return str(error)
    assert len(set(ranks.gather("begun", agreed.begun))) == 1
    try:
        leaders = run_folder.find_folder_leaders(loaded, agreed, ranks)
    except RunFolderError as error:
        ranks.gather("leaders", None)  # so that the others need not find out
        end_together(ranks)
        return str(error)
    end_together(ranks)
    assert {entry.name for entry in wanted.iterdir()} == {"run.json", "pipeline.yaml", "run.lock"}
    return leaders


def test_hosts_share_rank_0s_folder_or_have_their_own(tmp_path: Path) -> None:
    """A resume finds the same; a host that is new gets the folder."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    for disk in "abcd":
        (tmp_path / disk).mkdir()
    for disks, leaders in [
        (["a", "b", "a", "c"], (0, 1, 0, 3)),
        (["b", "b", "a", "c"], (0, 0, 2, 3)),
    ]:
        assert as_processes(4, apart, tmp_path, disks, "run") == [leaders] * 4
    assert as_processes(2, apart, tmp_path, ["a", "d"], "run", "no") == [(0, 1)] * 2, "rank 0 decides"
    ids = {json.loads((tmp_path / disk / "run" / "run.json").read_text())["id"] for disk in "abcd"}
    assert len(ids) == 1


def test_hosts_that_share_another_disk_than_rank_0_are_refused(tmp_path: Path) -> None:
    """One of the two: the folder there is the other one's."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    for disk in "ab":
        (tmp_path / disk).mkdir()
    found = as_processes(3, apart, tmp_path, ["a", "b", "b"], "run")
    assert found.count((0, 1, 2)) == 2
    (refusal,) = [one for one in found if isinstance(one, str)]
    assert refusal.endswith("hosts that share a disk must share it with rank 0's host)")
    assert any(why in refusal for why in ("in use by process", "was just taken", "is not empty"))


def test_hosts_with_different_runs_are_refused(tmp_path: Path) -> None:
    """A folder of this name that an earlier run has left on one of them."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    for disk in "ab":
        (tmp_path / disk).mkdir()
        as_processes(1, apart, tmp_path, [disk], "run")
    (said, *_) = as_processes(2, apart, tmp_path, ["a", "b"], "run")
    host = os.uname().nodename
    assert said == f"run has different runs on {host} and on {host}: remove one of them"


@pytest.mark.parametrize(("timeout_s", "wait_s"), [("5", 10.0), ("100", 80.0), ("3600", 120.0)])
def test_a_restart_waits_as_long_as_a_network_disk_may_keep_a_lock(
    tmp_path: Path, timeout_s: str, wait_s: float
) -> None:
    """But not so long that the other ranks, which wait for it, take that for a hang."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    loaded = load(tmp_path / "p.yaml", [f"launch.timeout_s={timeout_s}"])
    assert run_folder._lock_wait_s(loaded) == wait_s
