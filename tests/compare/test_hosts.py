"""Comparing on several hosts: they run the same in turns, and believe nothing that makes no sense."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from ddprun.compare.hosts import HostCoordinator, HostMessage
from ddprun.doctor import Report
from ddprun.doctor.links import LinkMeasurement, link_findings
from ddprun.launch.host_group import HostGroup, HostsError
from ddprun.predict.links import parse_links
from ddprun.telemetry.reader import RecordedRun
from tests.namespaces import hosts, needs_namespaces
from tests.ranks import Running
from tests.tune.test_command import PIPELINE, SLOW, VARY


def waiting(said: Any) -> HostCoordinator:
    """A host that waits for the first one, which says this."""
    host = object.__new__(HostCoordinator)
    host._group, host._message_number = HostGroup(HashStore(), ["host 0", "host 1"], 1), 0
    host.index, host.count = 1, 2
    host._group.store.set("told/1", said if isinstance(said, str) else json.dumps(said))
    return host


def test_what_is_told_is_heard() -> None:
    told = HostMessage(folder="p-1/round-0", candidates=({"hooks": ["int8"]},), turn_steps=20, steps=200)
    assert waiting(told.model_dump(mode="json")).receive() == told


@pytest.mark.parametrize(("device", "latency_s"), [("cpu", 0.002), ("cuda", 0.004)])
def test_a_measured_link_is_that_of_explain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, latency_s: float
) -> None:
    """Which reads it from what doctor has written."""
    backend = "nccl" if device == "cuda" else "gloo"
    found = LinkMeasurement(backend, 0.008, 95.0, 96.0, 88.0, 1 << 20, [(65536, 94.0), (1 << 20, 80.0)])
    monkeypatch.setattr("ddprun.doctor.links.measure_host_link", lambda *_: found)
    file = tmp_path / "link.json"
    file.write_text(json.dumps(Report([], link_findings("a", "b", found, [None])).as_dict()))
    measured = waiting({}).measure_link(torch.device(device))
    assert measured == parse_links(str(file))
    assert measured.across.latency_s == pytest.approx(latency_s)


@pytest.mark.parametrize(
    "said",
    [
        "not JSON",
        [],
        {"folder": "../round-0"},
        {"folder": "/etc/round-0"},
        {"folder": "../../x/round-0"},
        {"steps": 0},
        {"steps": "9"},
        {"run": "rm"},
        {"candidates": ["hooks=[int8]"]},
        {"end": 999},
    ],
)
def test_what_makes_no_sense_is_refused(said: Any) -> None:
    with pytest.raises(HostsError, match="sent an invalid message"):
        waiting(said).receive()


@needs_namespaces
@pytest.mark.netns
def test_two_hosts_take_the_same_rounds(tmp_path: Path) -> None:
    """The first one says what was found and writes it; both end with 0. With a run's flags on each."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    (tmp_path / "slow.py").write_text(SLOW)
    words = ["tune", "p.yaml", *VARY, "--nnodes=2", "--nproc-per-node=1", "--rdzv-endpoint=node0:29400"]
    with (
        hosts(2) as (one, two),
        Running(*words, "--rdzv-id=t", cwd=tmp_path, host=one) as first,
        Running(*words, "--rdzv-id=t", cwd=tmp_path, host=two) as second,
    ):
        found, other = first.wait(120), second.wait(60)
    assert (found.code, other.code) == (0, 0), found.stderr + other.stderr
    assert re.search(r"2 ranks on 2 hosts, \S+ .bit/s.* between hosts", found.stdout)
    assert "Winner, which keeps training the same: hooks=[]. It is " in found.stdout
    assert other.stdout == ""
    assert (tmp_path / "p.tuned.yaml").exists()
    runs = list(tmp_path.glob("runs/tune/*/round-1/0/steps/rank-*.jsonl"))
    assert len(runs) == 2


COMPARED = """
model: {mlp: {inputs: 64, hidden: [32], outputs: 10}}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.1}}
stages: [train: {steps: 24}]
checkpoint: {keep: 0}
launch: {nnodes: 2, nproc_per_node: 1}
"""


@needs_namespaces
@pytest.mark.netns
def test_two_hosts_compare_over_their_own_link(tmp_path: Path) -> None:
    """Each run has a rank on each host; the first prints the table, and both end with its code."""
    (tmp_path / "p.yaml").write_text(COMPARED)
    words = ["compare", "p.yaml", "--vary=hooks=[[], [fp16]]", "--turn=3", "--rdzv-endpoint=node0:29400"]
    words += ["--format=json", "--seeds=2"]
    with (
        hosts(2) as (one, two),
        Running(*words, cwd=tmp_path, host=one) as first,
        Running(*words, cwd=tmp_path, host=two) as second,
    ):
        found, other = first.wait(150), second.wait(60)
    assert (found.code, other.code) == (0, 0), found.stderr + other.stderr
    assert other.stdout == ""
    rows = json.loads(found.stdout)
    assert [row["turns"] for row in rows] == [14, 14, 14]
    assert rows[0]["wire_bytes_per_step"] > 1.5 * rows[2]["wire_bytes_per_step"]
    (folder,) = tmp_path.glob("runs/compare/*")
    for seed in range(2):
        assert RecordedRun(folder / f"2-seed-{seed}").started.hosts == ["node0", "node1"]
    assert (folder / "2-seed-1.host-1.log").exists()
    assert (folder / "report.html").exists()


@needs_namespaces
@pytest.mark.netns
@pytest.mark.parametrize(("lr", "more"), [(0.2, []), (0.1, ["--output=other"])], ids=["file", "output"])
def test_hosts_with_other_files_or_options_say_so(tmp_path: Path, lr: float, more: list[str]) -> None:
    """Both of them, before anything runs, and with exit code 1."""
    done = []
    for name, own in (("one", 0.1), ("two", lr)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "p.yaml").write_text(COMPARED.replace("lr: 0.1", f"lr: {own}"))
    words = ["compare", "p.yaml", "--rdzv-endpoint=node0:29400"]
    with (
        hosts(2) as (one, two),
        Running(*words, cwd=tmp_path / "one", host=one) as first,
        Running(*words, *more, cwd=tmp_path / "two", host=two) as second,
    ):
        done = [first.wait(90), second.wait(60)]
    for found in done:
        assert found.code == 1, found.stderr
        assert "have different pipelines or options\n  -> give the same command and the same" in found.stderr
        assert "Traceback" not in found.stderr
    assert not list(tmp_path.glob("*/runs/compare/*/*"))
