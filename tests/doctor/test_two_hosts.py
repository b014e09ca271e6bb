"""The doctor on two hosts, in network namespaces that the tests make, with what may really be wrong there."""

import json
import time
from pathlib import Path

import pytest
from benchmarks.two_hosts import Link, doctor_report

from ddprun.doctor.links import ELASTIC_HEARTBEAT_TIMEOUT_S
from ddprun.predict.links import slowest_link_in_report
from tests.doctor.ailing import (
    FLAGS,
    PORT,
    SLOW,
    SMALL_SHM,
    closed,
    examine,
    findings,
    needs_faketime,
    needs_firewall,
    needs_tbf,
    skewed,
)
from tests.namespaces import hosts, needs_namespaces
from tests.ranks import Running

pytestmark = [needs_namespaces, pytest.mark.netns]

WITH_LATENCY = Link(100, 20)
EPHEMERAL = (32768, 60999)
"""net.ipv4.ip_local_port_range, Linux's default, which a new network namespace has."""


@needs_tbf
@pytest.mark.alone
def test_a_link_of_100_mbit_is_measured_within_a_tenth(tmp_path: Path) -> None:
    """In each direction; nothing else is wrong, so both end with 0, and one of them speaks."""
    one, two = examine(tmp_path, "--format=json", setup=(SLOW, SLOW))
    assert (one.code, two.code) == (0, 0), one.stdout + one.stderr + two.stderr
    assert (two.stdout, one.stderr, two.stderr) == ("", "", "")
    (bandwidth,) = findings(one, "bandwidth", "node0 - node1")
    each = bandwidth["value"]["mbit_per_s"]
    assert set(each) == {"node0 to node1", "node1 to node0"}
    for measured in each.values():
        assert measured == pytest.approx(100, rel=0.1)
    # Acknowledgements go the same way as the other direction's data, and two cores have both hosts' work.
    assert 60 < bandwidth["value"]["all_reduce_mbit_per_s"] < 110
    by_bytes = bandwidth["value"]["all_reduce_mbit_per_s_by_bytes"]
    assert [size for size, _ in by_bytes][-3:] == [1 << 18, 1 << 20, 1 << 22], by_bytes
    for _, measured in by_bytes[-3:]:
        assert 50 < measured < 120
    assert bandwidth["level"] == "warning"
    assert "sync: diloco" in bandwidth["do"]
    (latency,) = findings(one, "latency")
    assert 1 < latency["value"]["all_reduce_us"] < 50_000
    report = json.loads(one.stdout)
    assert [host["name"] for host in report["hosts"]] == ["node0", "node1"]
    assert report["fit"]
    told = {(finding["where"], finding["check"]) for finding in report["findings"]}
    for host in ("node0", "node1"):
        checks = ("interfaces", "/dev/shm", "versions", "GPUs", "cores")
        assert {(host, check) for check in checks} <= told
    assert [finding["level"] for finding in findings(one, "ports")] == ["ok"]
    assert [finding["level"] for finding in findings(one, "clock")] == ["ok"]


@needs_tbf
@pytest.mark.alone
def test_one_slow_direction_is_told_from_the_other(tmp_path: Path) -> None:
    """Only what node1 sends is held back."""
    one, two = examine(tmp_path, "--format=json", setup=("true", SLOW))
    assert (one.code, two.code) == (0, 0), one.stderr + two.stderr
    (bandwidth,) = findings(one, "bandwidth")
    each = bandwidth["value"]["mbit_per_s"]
    assert each["node1 to node0"] == pytest.approx(100, rel=0.1)
    assert each["node0 to node1"] > 300
    assert "one direction is slower" in bandwidth["do"]


@pytest.mark.skipif(WITH_LATENCY.refusal() is not None, reason=str(WITH_LATENCY.refusal()))
def test_a_latency_is_measured_as_explain_takes_it(tmp_path: Path) -> None:
    """One way, as `--latency` is: not that of a message so small that Gloo sends it in fewer rounds."""
    link = slowest_link_in_report(doctor_report(tmp_path, WITH_LATENCY))
    assert 18e-3 < link.latency_s < 32e-3  # a busy machine adds some, and a message too small has half


@needs_firewall
@needs_faketime
def test_closed_ports_a_clock_and_a_small_dev_shm_are_named(tmp_path: Path) -> None:
    """Each with what to do, and nothing else; both end with 1."""
    one, two = examine(
        tmp_path,
        "--format=json",
        setup=(closed(*EPHEMERAL), SMALL_SHM),
        environment=({}, skewed(10)),
    )
    assert (one.code, two.code) == (1, 1), one.stdout + one.stderr + two.stderr
    assert (two.stdout, one.stderr, two.stderr) == ("", "", "")
    problems = {finding["check"]: finding for finding in findings(one) if finding["level"] == "problem"}
    assert set(problems) == {"ports", "clock", "/dev/shm"}

    ports = problems["ports"]
    assert (ports["value"]["from"], ports["value"]["to"]) == ("node1", "node0")
    assert len(ports["value"]["closed"]) == 3
    for port in ports["value"]["closed"]:
        assert EPHEMERAL[0] <= port <= EPHEMERAL[1]
        assert f"node0:{port}" in ports["found"]
    assert ports["found"].startswith("node1 cannot connect to node0:")
    assert "open all TCP ports on node0 (10.77.0.1) for node1 (10.77.0.2)" in ports["do"]

    clock = problems["clock"]
    assert clock["value"]["ahead"] == "node1"
    assert clock["value"]["ahead_s"] == pytest.approx(10, abs=0.1)
    assert clock["value"]["within_s"] < 0.1
    assert "the clock of node1 is 10 s ahead of that of node0" in clock["found"]
    assert "chrony" in clock["do"]

    shm = problems["/dev/shm"]
    assert shm["where"] == "node1"
    assert shm["value"]["total_bytes"] == 64 << 10
    assert "too little to start 4 DataLoader workers" in shm["found"]
    assert "docker run --shm-size=1g" in shm["do"]
    assert [finding["level"] for finding in findings(one, "/dev/shm", "node0")] == ["ok"]


@needs_firewall
def test_a_rendezvous_that_is_closed_is_named_on_both_hosts(tmp_path: Path) -> None:
    """The host that cannot connect says so; the one at which they would meet reports of itself."""
    began = time.monotonic()
    one, two = examine(tmp_path, "--timeout=6", setup=(closed(PORT, PORT), "true"))
    assert time.monotonic() - began < 30
    assert (one.code, two.code) == (1, 1)
    assert two.stdout == ""
    first, second = two.stderr.splitlines()
    why = f"node1 cannot connect to node0:{PORT} (10.77.0.1): no answer"
    assert first == f"ddprun: not all of the 2 hosts reached node0:{PORT} within 6 s ({why})"
    assert f"open TCP port {PORT} to that host" in second
    assert "problem  rendezvous" in one.stdout
    assert f"not all of the 2 hosts reached node0:{PORT} within 6 s" in one.stdout
    assert one.stdout.endswith("1 host: 1 problem\n")
    assert one.stderr == ""


def test_a_host_that_nobody_has_started_is_missed(tmp_path: Path) -> None:
    """On either of the two: the first one waits for another, the other for somebody who listens."""
    told = []
    for number in (0, 1):
        with (
            hosts(2) as made,
            Running("doctor", *FLAGS, "--timeout=2", cwd=tmp_path, host=made[number]) as running,
        ):
            done = running.wait(40)
        assert done.code == 1
        assert "Traceback" not in done.stderr
        told.append(" ".join((done.stdout + done.stderr).split()))
    assert "not all of the 2 hosts reached node0:29400 within 2 s" in told[0]
    assert "node1 cannot connect to node0:29400 (10.77.0.1): connection refused" in told[1]
    assert "start the same command on all 2 hosts" in told[1]


@needs_tbf
def test_a_link_that_dies_while_it_is_measured_is_told_on_both_hosts(tmp_path: Path) -> None:
    """Nothing comes over it any more, not even an end; a megabit a second takes long enough to cut it."""
    slow = SLOW.replace("100mbit", "1mbit")
    with (
        hosts(2) as made,
        Running("doctor", *FLAGS, "--timeout=6", cwd=tmp_path, host=made[0], setup=slow) as one,
        Running("doctor", *FLAGS, "--timeout=6", cwd=tmp_path, host=made[1], setup=slow) as two,
    ):
        until = time.monotonic() + 40
        while made[0].tx_bytes("e0") < 300_000 and time.monotonic() < until:
            time.sleep(0.1)
        made[1].cut()
        began = time.monotonic()
        first, second = one.wait(60), two.wait(60)
        assert time.monotonic() - began < 50
    assert (first.code, second.code) == (1, 1), first.stdout + first.stderr + second.stderr
    assert "Traceback" not in first.stderr + second.stderr
    assert "problem  " in first.stdout
    assert second.stderr.startswith("ddprun: ")
    assert "  -> " in second.stderr


@needs_faketime
def test_a_clock_of_an_hour_ago_does_not_keep_hosts_from_meeting(tmp_path: Path) -> None:
    """Torchelastic's own patience is 15 s, by clocks that it takes to be equal."""
    assert ELASTIC_HEARTBEAT_TIMEOUT_S < 15
    one, two = examine(tmp_path, "--format=json", environment=(skewed(-3600), {}))
    assert (one.code, two.code) == (1, 1), one.stdout + one.stderr + two.stderr
    (clock,) = findings(one, "clock")
    assert clock["value"]["ahead"] == "node1"
    assert clock["value"]["ahead_s"] == pytest.approx(3600, abs=0.1)


@pytest.mark.parametrize("name", ["lo", "eth7"])
def test_a_variable_that_names_a_wrong_interface_is_told_and_not_followed(tmp_path: Path, name: str) -> None:
    """The loopback, and one that is not there."""
    one, two = examine(tmp_path, "--format=json", environment=({}, {"GLOO_SOCKET_IFNAME": name}))
    assert (one.code, two.code) == (1, 1)
    (problem,) = [finding for finding in findings(one) if finding["level"] == "problem"]
    assert (problem["where"], problem["check"]) == ("node1", "interfaces")
    assert f"GLOO_SOCKET_IFNAME is {name}, " in problem["found"]
    assert "unset GLOO_SOCKET_IFNAME" in problem["do"]
    assert findings(one, "bandwidth")


def test_hosts_of_one_name_are_told(tmp_path: Path) -> None:
    """A run would end with that; the rest is examined all the same."""
    one, two = examine(tmp_path, "--format=json", setup=("true", "hostname node0"))
    assert (one.code, two.code) == (1, 1), one.stdout + one.stderr + two.stderr
    problems = [finding for finding in findings(one) if finding["level"] == "problem"]
    assert [(problem["where"], problem["check"]) for problem in problems] == [
        ("node0 (0)", "hostname"),
        ("node0 (1)", "hostname"),
    ]
    assert findings(one, "bandwidth")
