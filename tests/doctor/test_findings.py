"""What is made of what was measured, without measuring anything."""

import json
from dataclasses import replace
from typing import Any

import click
import pytest
import torch

from ddprun.cli.doctor import format_report
from ddprun.doctor import Finding, Report, pair_label
from ddprun.doctor.between_hosts import version_findings
from ddprun.doctor.host import Gpus, cpu_core_finding, gpu_finding, shm_finding
from ddprun.doctor.links import (
    LinkMeasurement,
    ListeningPorts,
    _CallTiming,
    _LinkBenchmark,
    all_reduce_rates_by_bytes,
    clock_findings,
    find_unreachable_ports,
    link_findings,
    listen_on_ports,
    pairs_to_measure,
    port_findings,
)
from ddprun.host.dev_shm import ShmSpace
from ddprun.units import format_duration

FINE = Finding("a", "cores", "ok", "4 for 2 ranks")
BAD = Finding("a - b", "ports", "problem", "none", "open them", {"closed": [1]})


def test_what_is_not_ok_says_what_to_do() -> None:
    """And what is ok has nothing to be done."""
    for level, do in (("ok", "something"), ("problem", ""), ("fatal", "something")):
        with pytest.raises(AssertionError):
            Finding("a", "c", level, "f", do)  # type: ignore[arg-type]


def test_a_report_is_grouped_by_place() -> None:
    """The verdict comes last."""
    report = Report([{"name": "a"}, {"name": "b"}], [FINE, BAD, replace(FINE, check="later")])
    assert click.unstyle(format_report(report)).splitlines() == [
        "a",
        "  ok       cores        4 for 2 ranks",
        "  ok       later        4 for 2 ranks",
        "a - b",
        "  problem  ports        none",
        "                     -> open them",
        "2 hosts: 1 problem",
    ]
    assert format_report(Report([{"name": "a"}], [FINE])).endswith("1 host: no problems")


def test_a_report_in_json_gives_the_findings_back() -> None:
    """With counts, and whether there is no problem."""
    plain = json.loads(json.dumps(Report([{"name": "a"}], [FINE, BAD]).as_dict()))
    assert [Finding(**one) for one in plain["findings"]] == [FINE, BAD]
    assert (plain["fit"], plain["counts"]) == (False, {"ok": 1, "note": 0, "warning": 0, "problem": 1})


@pytest.mark.parametrize("hosts", range(1, 20))
def test_up_to_eight_hosts_each_pair_is_measured_and_of_more_the_neighbours(hosts: int) -> None:
    """Each once, and every host takes part."""
    found = pairs_to_measure(hosts)
    assert found == [(i, j) for i in range(hosts) for j in range(i + 1, hosts) if hosts <= 8 or j == i + 1]
    assert hosts == 1 or {host for pair in found for host in pair} == {*range(hosts)}


def test_clocks_are_told_by_who_is_ahead() -> None:
    """Of every pair of three hosts; what lies within the error bound says nothing."""
    found = clock_findings(["a", "b", "c"], [(0.0, 0.0), (-2.0, 0.001), (7.5, 0.001)])
    assert [finding.where for finding in found] == ["a - b", "a - c", "b - c"]
    assert [finding.level for finding in found] == ["warning", "problem", "problem"]
    assert "the clock of a is 2 s ahead of that of b (± 1 ms)" in found[0].found
    assert "the clock of c is 9.5 s ahead of that of b (± 2 ms)" in found[2].found
    (near,) = clock_findings(["a", "b"], [(0.0, 0.0), (0.001, 0.002)])
    assert (near.level, near.found) == ("ok", "clocks are equal within 2 ms")
    (known,) = clock_findings(["a", "b"], [(0.0, 0.0), (0.9, 0.002)])
    assert (known.level, known.value["ahead"]) == ("ok", "b")


def test_lengths_have_three_digits() -> None:
    """In the unit that fits."""
    assert [format_duration(s) for s in (3600, 12.34, 1, 0.9996, 0.5, 1.5e-4, 0)] == [
        "3600 s",
        "12.3 s",
        "1 s",
        "1 s",
        "500 ms",
        "150 µs",
        "0 µs",
    ]


MEASURED = LinkMeasurement(
    "gloo", 1e-4, 9400.0, 9300.0, 9000.0, 1 << 20, [(65536, 9900.0), (1 << 20, 9000.0)]
)


@pytest.mark.parametrize(
    ("changed", "speeds", "level", "told"),
    [
        ({}, [10_000, 10_000], "ok", ""),
        ({}, [None, None], "ok", ""),
        ({}, [100_000, 100_000], "ok", ""),  # one stream does not fill it
        (
            {"there_mbit": 2000.0, "back_mbit": 2000.0},
            [10_000, 10_000],
            "warning",
            "interfaces say 10 Gbit/s",
        ),
        ({"there_mbit": 4000.0}, [10_000, 10_000], "warning", "one direction is slower"),
        ({"there_mbit": 95.0, "back_mbit": 95.0, "both_mbit": 94.0}, [100, 100], "warning", "sync: diloco"),
        (
            {"there_mbit": 95.0, "back_mbit": 95.0, "both_mbit": 100.0},
            [],
            "warning",
            "100 MB of gradients take 8 s",
        ),
    ],
)
def test_what_is_said_of_a_bandwidth(
    changed: dict[str, float], speeds: list[float | None], level: str, told: str
) -> None:
    """It is held against the interfaces' speed, the other direction, and what gradients need."""
    _, finding = link_findings("a", "b", replace(MEASURED, **changed), speeds)  # type: ignore[arg-type]
    assert finding.level == level
    assert told in finding.found + finding.do
    assert finding.value["mbit_per_s"]["a to b"] == changed.get("there_mbit", 9400.0)


def test_a_late_link_is_noted() -> None:
    """With what sends fewer messages."""
    latency, _ = link_findings("a", "b", replace(MEASURED, latency_s=0.02), [])
    assert (latency.level, latency.found) == ("note", "a small all-reduce takes 20 ms over gloo")
    assert "local_sgd" in latency.do


def test_a_port_is_open_or_closed() -> None:
    """Each that cannot be reached is named with why."""
    with listen_on_ports("127.0.0.1") as one:
        assert find_unreachable_ports([one, one]) == [[], []]
    assert find_unreachable_ports([one]) == [[(port, "connection refused") for port in one.ports]]
    there = ListeningPorts("10.0.0.1", (1, 2))
    found: Any = [[[], [(2, "no answer")]], [[], []]]
    (finding,) = port_findings(["a", "b"], [there, there], found)
    assert finding.found == "a cannot connect to b:2 (of 2 tried): no answer"
    assert finding.level == "problem"


def test_versions_that_differ_between_hosts() -> None:
    """Of Python the last number does not count; of torch every character does."""
    versions = {"ddprun": "1", "python": "3.11.7", "torch": "2.13.0+cpu", "CUDA": None, "NVIDIA driver": None}
    hosts = [{"name": "a", "versions": versions}, {"name": "b", "versions": {**versions, "python": "3.11.9"}}]
    assert version_findings(hosts) == []
    changed = {
        **versions,
        "torch": "2.13.0+cu130",
        "CUDA": "13.0",
        "NVIDIA driver": "580",
        "python": "3.12.1",
    }
    found = version_findings([hosts[0], {"name": "b", "versions": changed}])
    assert [(one.level, one.found.partition(":")[0]) for one in found] == [
        ("warning", "python"),
        ("problem", "torch"),
        ("problem", "CUDA"),
        ("warning", "NVIDIA driver"),
    ]
    assert found[1].found == "torch: a has 2.13.0+cpu, b has 2.13.0+cu130"
    assert {one.where for one in found} == {pair_label("a", "b")}


@pytest.mark.parametrize(
    ("gpus", "level", "told"),
    [
        (Gpus(), "ok", "no NVIDIA GPU here"),
        (
            Gpus(driver="580.1", why_unusable="CUDA cannot start"),
            "problem",
            "(580.1) sees GPUs, torch does not",
        ),
        (Gpus(names=("H200",), driver="580.1"), "ok", "1 x H200"),
        (Gpus(names=("A", "A", "B")), "ok", "2 x A, 1 x B"),
    ],
)
def test_what_is_said_of_gpus(gpus: Gpus, level: str, told: str) -> None:
    """As torch and the driver see them."""
    finding = gpu_finding("a", gpus)
    assert finding.level == level
    assert told in finding.found


@pytest.mark.parametrize(
    ("cores", "ranks", "level"), [(8, 2, "ok"), (2, 2, "ok"), (1, 2, "warning"), (0.5, 1, "warning")]
)
def test_cores_are_held_against_ranks(cores: float, ranks: int, level: str) -> None:
    """Ranks that share cores are worth a word."""
    assert cpu_core_finding("a", cores, ranks).level == level


@pytest.mark.parametrize(
    ("free", "nccl", "level"),
    [
        (1 << 30, True, "ok"),
        (300 << 20, False, "ok"),
        (300 << 20, True, "warning"),
        (64 << 20, False, "warning"),
        (64 << 10, False, "problem"),
    ],
)
def test_dev_shm_is_held_against_loading_processes_and_nccl(free: int, nccl: bool, level: str) -> None:
    """As in a run, here with four processes for each of two ranks, and batches of 16 MiB."""
    finding = shm_finding("a", ShmSpace(1 << 30, free), 2, nccl=nccl)
    assert finding.level == level
    assert finding.value == {"total_bytes": 1 << 30, "free_bytes": free}


@pytest.mark.parametrize(
    ("latency_s", "busy", "told"),
    [
        (0.001, 0.1, [1 << 16, 1 << 18, 1 << 20, 1 << 22]),
        (0.01, 0.1, [1 << 18, 1 << 20, 1 << 22]),  # 64 KiB take hardly longer than a small all-reduce
        (0.4, 0.1, [1 << 24]),  # between continents
        (0.001, 0.5, []),  # a veth pair on one machine: copying is the work
    ],
)
def test_sizes_that_say_more_of_the_hosts_than_of_the_link_are_left_out(
    monkeypatch: pytest.MonkeyPatch, latency_s: float, busy: float, told: list[int]
) -> None:
    """At 100 Mbit/s, with so much of each call on a CPU; measuring ends once the link is busy for long."""
    rate = 100e6 / 8

    def repeat(_benchmark: object, _collective: object, nbytes: int) -> list[_CallTiming]:
        took_s = nbytes / rate + 2 * latency_s
        return [_CallTiming(took_s + late_s, busy * took_s) for late_s in (0.0, 0.0, 0.1)]

    monkeypatch.setattr(_LinkBenchmark, "time_collective", repeat)
    calls = _LinkBenchmark(torch.device("cpu")).time_all_reduces(latency_s)
    assert max(calls) == max([1 << 22, *told])
    found = all_reduce_rates_by_bytes(calls, latency_s, by_cpu=True)
    assert [nbytes for nbytes, _ in found] == told
    assert [mbit for _, mbit in found] == pytest.approx([100.0] * len(told))
