"""A search on several hosts: they take the same rounds, and believe nothing that makes no sense."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from ddprun.doctor import Report
from ddprun.doctor.links import LinkMeasurement, link_findings
from ddprun.predict.links import parse_links
from ddprun.tune.hosts import HostsError, RoundMessage, SearchHosts
from tests.namespaces import hosts, needs_namespaces
from tests.ranks import Running
from tests.tune.test_command import PIPELINE, SLOW, VARY


def waiting(said: Any) -> SearchHosts:
    """A host that waits for the first one, which says this."""
    host = object.__new__(SearchHosts)
    host._store, host._message_number, host.index, host.count = HashStore(), 0, 1, 2
    host._store.set("told/1", said if isinstance(said, str) else json.dumps(said))
    return host


def test_what_is_told_is_heard() -> None:
    told = RoundMessage(folder="p-1/round-0", candidates=({"hooks": ["int8"]},), turn_steps=20, steps=200)
    assert waiting(told.model_dump(mode="json")).receive() == told


@pytest.mark.parametrize(("device", "latency_s"), [("cpu", 0.002), ("cuda", 0.004)])
def test_a_measured_link_is_that_of_explain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, latency_s: float
) -> None:
    """Which reads it from what doctor has written."""
    backend = "nccl" if device == "cuda" else "gloo"
    found = LinkMeasurement(backend, 0.008, 95.0, 96.0, 88.0, 1 << 20, [(65536, 94.0), (1 << 20, 80.0)])
    monkeypatch.setattr("ddprun.doctor.links.measure", lambda *_: found)
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
    with pytest.raises(HostsError, match="makes no sense"):
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
    assert "Winner: hooks=[]. It is " in found.stdout
    assert other.stdout == ""
    assert (tmp_path / "p.tuned.yaml").exists()
    runs = list(tmp_path.glob("runs/tune/*/round-0/0/steps/rank-*.jsonl"))
    assert len(runs) == 2
