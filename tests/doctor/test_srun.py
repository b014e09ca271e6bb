"""The doctor under a real Slurm."""

import json
import sys
from pathlib import Path

import pytest

from tests.slurm import needs_slurm, slurm

pytestmark = [needs_slurm, pytest.mark.netns, pytest.mark.engines]


def test_srun_starts_one_doctor_on_each_host(tmp_path: Path) -> None:
    """Nothing is told by hand: where hosts meet follows from the job."""
    program = str(Path(sys.executable).parent / "ddprun")
    with slurm(tmp_path / "cluster") as cluster:
        command = ["srun", "-N2", "--ntasks-per-node=1", "-c2", program, "doctor", "--format=json"]
        done = cluster.call(*command, cwd=tmp_path, timeout_s=90)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert sorted(host["name"] for host in report["hosts"]) == ["node0", "node1"]
    assert {"bandwidth", "latency", "clock", "ports"} <= {one["check"] for one in report["findings"]}
