"""Installed trackers and cluster backends: what can be wrong with one, and that it stays its own trouble."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from ddprun.cli import main
from ddprun.config import PipelineError, load
from ddprun.config.catalog import json_schema
from ddprun.config.schema import Pipeline, _with_clusters, pipeline_with_cluster_keys
from ddprun.plugins import CLUSTERS, TRACKERS
from ddprun_hooks.config import import_path as installing

BASE = "model: {mlp: {inputs: 64, outputs: 10}}\ndata: digits\noptimizer: sgd\nlaunch: {nproc_per_node: 2}\n"
GOOD = """
from ddprun.cluster import Cluster
from ddprun.sync import SyncPlan, SyncPolicy, Transfer
from ddprun.track import Tracker

class Good(Tracker):
    "A good one."

class Site(Cluster):
    "A site."

    class Options(Cluster.Options):
        queue: str
        "Where jobs wait."
        labels: dict[str, str] = {}

    text = "nothing"

class Relay(SyncPolicy):
    "One rank's parameters for all."

    source: str
    "A host."

    def plan(self, stage):
        return SyncPlan(transfers=(Transfer("parameters", 2, source=1),))

other = print
"""
POINTS = [
    EntryPoint("good", "plugins_good:Good", "ddprun.trackers"),
    EntryPoint("broken", "plugins_broken:Broken", "ddprun.trackers"),
    EntryPoint("gone", "plugins_good:Gone", "ddprun.trackers"),
    EntryPoint("printer", "plugins_good:other", "ddprun.trackers"),
    EntryPoint("twice", "plugins_good:Good", "ddprun.trackers"),
    EntryPoint("twice", "plugins_broken:Good", "ddprun.trackers"),
    EntryPoint("wandb", "plugins_broken:Wandb", "ddprun.trackers"),
    EntryPoint("relay", "plugins_good:Relay", "ddprun.sync"),
    EntryPoint("site", "plugins_good:Site", "ddprun.clusters"),
    EntryPoint("model", "plugins_good:Site", "ddprun.clusters"),
    EntryPoint("broken", "plugins_broken:Broken", "ddprun.clusters"),
]


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "plugins_good.py").write_text(GOOD)
    (tmp_path / "plugins_broken.py").write_text("raise RuntimeError('it is broken')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(installing, "_all_entry_points", lambda: EntryPoints(POINTS))
    caches = (installing.installed_entry_points, _with_clusters)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
    for name in ("plugins_good", "plugins_broken"):
        sys.modules.pop(name, None)


def problem(text: str) -> str:
    """The only fault of a pipeline with this line more."""
    Path("p.yaml").write_text(f"{BASE}{text}\n")
    with pytest.raises(PipelineError) as caught:
        load(Path("p.yaml"))
    (fault,) = caught.value.faults
    assert fault.place.line == 5
    return f"{fault.path}: {fault.message}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("track: [broken]", '"broken" (plugins_broken.Broken) cannot be imported: it is broken'),
        ("track: [gone]", '"gone" (plugins_good.Gone) cannot be imported: "plugins_good" has no "Gone"'),
        (
            "track: [printer]",
            '"printer" (plugins_good.other) is not a class derived from ddprun.track.Tracker',
        ),
        ("track: [twice]", '"twice" is claimed twice, by plugins_broken.Good and plugins_good.Good'),
        ("track: [{good: {every: 1}}]", 'track[0].good.every: good takes no options, got "every"'),
        ("track: [goood]", 'unknown tracker "goood"'),
        ("broken: {}", '"broken" (plugins_broken.Broken) cannot be imported: it is broken'),
        ("site: {}", "site.queue: is required"),
        ("site: {queue: 3}", "site.queue: expected a string, got 3"),
        ("sites: {queue: a}", '(did you mean "site"?)'),
        ("sync: {relay: {source: 3}}", "sync.relay.source: expected a string, got 3"),
    ],
)
def test_what_is_wrong_is_a_fault_with_its_place(text: str, told: str) -> None:
    """Never a traceback, whatever a package does when it is imported."""
    assert told in problem(text)


def test_a_broken_one_disturbs_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    """Others can be chosen and are listed; of the broken one there is the name. Built-in names win."""
    Path("p.yaml").write_text(f"{BASE}track: [good]\nsite: {{queue: long}}\n")
    loaded = load(Path("p.yaml"))
    (tracker,) = loaded.pipeline.track
    assert (tracker.source, tracker.to_plain_data()) == ("installed", "good")
    assert loaded.as_dict()["site"] == {"queue": "long", "labels": {}}
    assert TRACKERS.load("wandb").__module__ == "ddprun.track.backends.wandb"
    assert main(["catalog", "tracker"]) == 0
    listed = capsys.readouterr().out
    assert "  broken: Added by an installed package.\n" in listed
    assert "  good: A good one.\n" in listed
    assert listed.count("  wandb: ") == 1
    assert main(["schema"]) == 0
    assert main(["submit", "p.yaml", "--to", "broken"]) == 2
    assert "cannot be imported: it is broken" in capsys.readouterr().err


def test_a_name_that_is_a_key_already_is_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    """A package cannot take a pipeline's own keys away, and no command offers such a cluster."""
    assert CLUSTERS.reserved_names == Pipeline.model_fields.keys()
    assert CLUSTERS.installed_names() == ("broken", "site")
    assert pipeline_with_cluster_keys(["site"]).model_fields["model"].is_required()
    assert json_schema()["properties"]["model"]["$ref"] == "#/$defs/model"
    Path("p.yaml").write_text(BASE)
    assert main(["submit", "p.yaml", "--to", "model", "--dry-run"]) == 2
    assert (
        "'model' is not one of 'docker', 'kubernetes', 'slurm', 'broken', 'site'" in capsys.readouterr().err
    )


def test_what_is_installed_is_looked_up_only_where_it_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read the metadata of all packages takes longer than to check a pipeline."""

    def refuse() -> EntryPoints:
        raise AssertionError("metadata was read")

    monkeypatch.setattr(installing, "_all_entry_points", refuse)
    Path("p.yaml").write_text(f"{BASE}slurm: {{nodes: 2}}\ntrack: [tensorboard]\nhooks: [fp16]\n")
    assert load(Path("p.yaml")).warnings == ()
    with pytest.raises(AssertionError, match="metadata was read"):
        load(Path("p.yaml"), ["site.queue=long"])


def test_submit_asks_for_options_that_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the pipeline lacks the key."""
    Path("p.yaml").write_text(BASE)
    assert main(["submit", "p.yaml", "--to", "site", "--dry-run"]) == 2
    assert "p.yaml needs the key site, with queue" in capsys.readouterr().err
