"""The doctor on this host alone, as a real process."""

import json
import time
from pathlib import Path

import pytest

from tests.doctor.ailing import SMALL_SHM, findings
from tests.namespaces import hosts, needs_namespaces
from tests.ranks import Running, ddprun, ddprun_here


def test_this_host_is_examined_alone(tmp_path: Path) -> None:
    """Every line that is not ok says what to do, and nothing is said of other hosts."""
    done = ddprun("doctor", "--format=json", cwd=tmp_path, fresh=True)
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert done.code == (0 if report["fit"] else 1)
    assert len(report["hosts"]) == 1
    assert {finding["where"] for finding in report["findings"]} == {report["hosts"][0]["name"]}
    for finding in report["findings"]:
        assert bool(finding["do"]) == (finding["level"] != "ok"), finding
    checks = {"interfaces", "/dev/shm", "versions", "GPUs", "cores"}
    assert checks == {finding["check"] for finding in report["findings"]}


@pytest.mark.parametrize(
    ("arguments", "environment", "told"),
    [
        (
            ["--nnodes=2"],
            {},
            "--nnodes 2 needs a rendezvous: add --rdzv-endpoint HOST:PORT",
        ),
        (["--nnodes=two"], {}, "--nnodes is 'two'; it must be a number of hosts, or MIN:MAX"),
        (["--nproc-per-node=zero"], {}, "--nproc-per-node is 'zero'; it must be at least 1"),
        (["--monitor-interval=0"], {}, "0.0 is not in the range 0<x<=3600"),
        (["--nnodes=²"], {}, "--nnodes is '²'; it must be a number of hosts, or MIN:MAX"),
        (["--nnodes=2", "--rdzv-endpoint=127.0.0.1:x"], {}, "'127.0.0.1:x' is not HOST:PORT"),
        (["--timeout=0"], {}, "--timeout"),
        ([], {"RANK": "1"}, "not set: WORLD_SIZE; a rank needs"),
        ([], {"RANK": "0", "WORLD_SIZE": "1"}, "doctor runs once on each host, and not as a rank"),
        (["p.yaml"], {}, "unexpected extra argument"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], told: str
) -> None:
    """Exit code 2, and nothing on stdout."""
    done = ddprun_here("doctor", *arguments, cwd=tmp_path, environment=environment)
    assert (done.code, done.stdout) == (2, ""), done.stderr
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_rendezvous_that_has_no_address_is_said_at_once(tmp_path: Path) -> None:
    """A run waits for the name, which a cluster may only be about to know."""
    began = time.monotonic()
    flags = ["--nnodes=2", "--rdzv-endpoint=no-such-host.invalid:29400", "--timeout=50"]
    done = ddprun("doctor", *flags, cwd=tmp_path)
    assert time.monotonic() - began < 40
    assert done.code == 1
    assert "the name 'no-such-host.invalid' of 'no-such-host.invalid:29400' does not" in done.stderr


@needs_namespaces
@pytest.mark.netns
def test_a_small_dev_shm_is_a_problem(tmp_path: Path) -> None:
    """64 KiB are too little for loading processes."""
    with (
        hosts(1) as (host,),
        Running("doctor", "--format=json", cwd=tmp_path, host=host, setup=SMALL_SHM) as running,
    ):
        done = running.wait(60)
    assert done.code == 1, done.stderr
    (shm,) = findings(done, "/dev/shm")
    assert shm["level"] == "problem"
    assert "64 KiB" in shm["found"]
