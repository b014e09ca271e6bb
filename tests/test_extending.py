"""docs/dev/extending.md works: its code as an installed package, used by real commands."""

import csv
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from ddprun.track import RunInfo
from ddprun_hooks.testing import contribution, run_hooks
from tests.engine.running import lines, summary
from tests.ranks import ddprun

PAGE = (Path(__file__).parents[1] / "docs" / "dev" / "extending.md").read_text(encoding="utf-8")
SOURCES = dict(re.findall(r"```(?:toml|python)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))
KEYS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]
PIPELINE = f"""
name: extended
model: {{mlp: {{inputs: 64, hidden: [16], outputs: 10}}}}
data: digits
loader: {{batch_size: 8}}
optimizer: {{sgd: {{lr: 0.1}}}}
hooks: [{{clamp: {{limit: 0.01}}}}, fp16]
track: [{{csv: {{every: 2}}}}]
stages:
  - train: {{steps: 6}}
  - train: {{steps: 5, sync: {{neighbours: {{every: 2}}}}}}
  - evaluate: {{metrics: [accuracy]}}
launch: {{nproc_per_node: 4}}
{KEYS}"""
WITHOUT_TORCH = """
import sys
from ddprun.cli import main
code = main(sys.argv[1:])
print(*(name for name in sys.modules if name == "torch" or name.startswith("mylab")), file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def mylab(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """An environment in which the page's package is installed, by pip if that needs no network."""
    source, target = tmp_path_factory.mktemp("mylab"), tmp_path_factory.mktemp("installed")
    (source / "mylab").mkdir()
    (source / "mylab" / "__init__.py").touch()
    for name, code in SOURCES.items():
        (source / name).write_text(code)
    if all(importlib.util.find_spec(name) for name in ("pip", "setuptools")):
        options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
        install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options]
        subprocess.run([*install, str(source)], check=True, timeout=120)
    else:
        points = re.findall(
            r'\[project\.entry-points\."(.*?)"\]\n(\w+ = )"(.*)"', (source / "pyproject.toml").read_text()
        )
        (source / "mylab").rename(target / "mylab")
        info = target / "mylab-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mylab\nVersion: 1.0\n")
        declared = "".join(f"[{group}]\n{name}{value}\n" for group, name, value in points)
        (info / "entry_points.txt").write_text(declared)
    return {"PYTHONPATH": os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a pipeline that names all four."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    return tmp_path


def load(path: str) -> dict[str, Any]:
    """What a module of the page defines."""
    module: dict[str, Any] = {"__name__": path}
    exec(SOURCES[path], module)
    return module


def test_the_hook_limits_what_each_rank_adds() -> None:
    """On three ranks in one process: the mean is that of limited values."""
    module = load("mylab/hooks.py")
    shares = torch.stack([contribution(rank, step=1, ranks=3) for rank in range(3)])
    for mean in run_hooks(module["Clamp"](limit=0.1), 3, lambda rank: rank.step(1)):
        torch.testing.assert_close(mean, shares.clamp(-0.1, 0.1).sum(0))


def test_the_tracker_closes_its_file(tmp_path: Path) -> None:
    """So that the last rows are there, whatever becomes of the process."""
    tracker_class = load("mylab/trackers.py")["Csv"]
    tracker = tracker_class(tracker_class.Options(), RunInfo("name", tmp_path, {}, tmp_path))
    tracker.log_eval_metrics(3, {"accuracy": 0.5})
    tracker.close({})
    assert (tmp_path / "curves.csv").read_text().split() == ["3,accuracy,0.5"]


def test_a_job_that_has_ended_is_shown_to_its_last_line(tmp_path: Path) -> None:
    """Though it ended before it was followed."""
    backend = object.__new__(load("mylab/clusters.py")["Background"])
    backend.name, backend.log, backend.command = (
        "job",
        tmp_path / "job.log",
        ["sh", "-c", "echo last; exit 3"],
    )
    assert backend.send() == "job"
    backend.process.wait(30)
    shown: list[str] = []
    assert backend.follow("job", shown.append) == ("ended with exit code 3", False)
    assert shown == ["last\n"]


def test_hook_policy_and_tracker_take_part_in_a_run(mylab: Mapping[str, str], folder: Path) -> None:
    """On four ranks: the records name the hook, neighbours average in turns and all at the end, as `explain`
    says to the byte; the tracker's file has what it was given.
    """
    done = ddprun("p.yaml", "--run-dir=run", cwd=folder, environment=mylab)
    assert done.code == 0, done.stderr
    assert "averaging them" not in done.stderr, "the plan itself makes the ranks equal at the stage's end"
    trained, gossiped = (
        [line for line in lines(folder / "run", "buckets") if line["stage"] == n] for n in (0, 1)
    )
    assert {tuple(line["hooks"]) for line in trained} == {("clamp", "fp16")}
    assert [(line["rank"], line["step"], line["legs"][0]["group"]) for line in gossiped] == [
        (rank, step, group)
        for rank in range(4)
        for step, group in ((8, "plain part/0.0"), (10, "plain part/1.0"), (11, "plain.0"))
    ]
    explained = ddprun("explain", "p.yaml", "--format=json", cwd=folder, environment=mylab)
    stage = json.loads(explained.stdout)["stages"][1]
    assert [pattern["steps"] for pattern in stage["patterns"] if pattern["exchanges"]] == [[2], [4]]
    assert stage["whole"]["all_ranks"] == sum(line["wire_bytes"] for line in gossiped)
    with (folder / "run" / "curves.csv").open(newline="") as file:
        found = {(int(step), name): float(value) for step, name, value in csv.reader(file)}
    assert [step for step, name in found if name == "loss/mean"] == [2, 4, 6, 8, 10]
    assert found[11, "accuracy"] == summary(folder / "run")["metrics"]["accuracy"]


def test_a_job_is_sent_and_followed(mylab: Mapping[str, str], folder: Path) -> None:
    """A dry run prints the command and makes nothing; the job's output and its end are shown."""
    settings = ("--set=launch.nproc_per_node=2", "--set=seed=3")
    submit = ("submit", "p.yaml", "--to", "background", *settings)
    dry = ddprun(*submit, "--dry-run", "--set=background.niceness=5", cwd=folder, environment=mylab)
    assert (dry.code, dry.stderr) == (0, "")
    command = shlex.split(dry.stdout)
    assert command[:3] == ["nice", "-n", "5"]
    assert command[command.index("ddprun") + 1 :][:2] == ["run", str(folder / "p.yaml")]
    assert command[-2:] == ["--set", "seed=3"], "its own keys have been heeded"
    assert [path.name for path in folder.iterdir()] == ["p.yaml"]

    done = ddprun(*submit, "--follow", cwd=folder, environment=mylab)
    assert done.code == 0, done.stderr
    job = done.stdout.strip()
    assert "2 ranks on cpu over gloo" in done.stderr
    assert f"ddprun: job {job}: ended with exit code 0" in done.stderr
    assert summary(folder / "runs" / "extended" / job)["status"] == "done"

    (folder / "p.yaml").write_text(PIPELINE.replace("limit: 0.01", "limit: 0.01, lower: 0"))
    failed = ddprun(*submit, "--follow", cwd=folder, environment=mylab)
    assert failed.code == 1
    assert 'options of hook "clamp"' in failed.stderr
    assert "ended with exit code 2" in failed.stderr


def test_options_are_checked_as_those_of_built_in_ones(mylab: Mapping[str, str], folder: Path) -> None:
    """All at once, each with its place; neither torch nor the hook is imported for that."""
    (folder / "p.yaml").write_text(
        PIPELINE.replace("every: 2", "evry: 2").replace("niceness: 19", "niceness: low")
    )
    checked = [sys.executable, "-c", WITHOUT_TORCH, "check", "p.yaml"]
    environment = {**os.environ, **mylab}
    done = subprocess.run(
        checked, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    told = done.stdout + done.stderr
    assert done.returncode == 2
    assert 'p.yaml:8:16: track[0].csv.evry: csv has no option "evry"; allowed: every (did you' in told
    assert 'p.yaml:14:24: background.niceness: expected a whole number, got "low" (a string)' in told
    assert set(done.stderr.splitlines()[-1].split()) == {
        "mylab",
        "mylab.sync",
        "mylab.trackers",
        "mylab.clusters",
    }


def test_they_are_listed_with_their_options(mylab: Mapping[str, str], folder: Path) -> None:
    """By `catalog`, `submit --help`, `check --resolved` and in the JSON Schema."""
    listed = ddprun("catalog", "tracker", "--format", "json", cwd=folder, environment=mylab)
    (entry,) = (one for one in json.loads(listed.stdout) if one["source"] == "installed")
    assert (entry["name"], entry["description"]) == (
        "csv",
        "Curves as rows of a CSV file in the run's folder.",
    )
    (option,) = entry["options"]
    assert (option["name"], option["default"]) == ("every", 1)
    assert option["description"] == "Steps from one row to the next."

    clusters = ddprun("catalog", "cluster", cwd=folder, environment=mylab).stdout
    assert "background: A process on this machine that continues when you log out.\n" in clusters
    assert "niceness: a whole number; default 10.  From 0 to 19" in clusters
    shown = ddprun("submit", "--help", cwd=folder, environment=mylab).stdout
    assert "--to [docker|kubernetes|slurm|background]" in shown

    schema = json.loads(ddprun("schema", cwd=folder, environment=mylab).stdout)
    pipeline = {"model": "a.B", "data": "digits", "optimizer": "sgd"}
    for options, good in (({"niceness": 3}, True), ({"niceness": "low"}, False), ({"nice": 3}, False)):
        valid = jsonschema.Draft202012Validator(schema).is_valid({**pipeline, "background": options})
        assert valid is good, options

    whole = ddprun("check", "p.yaml", "--resolved", cwd=folder, environment=mylab).stdout
    assert re.search(r"^background:\n  niceness: 19\b", whole, re.MULTILINE)
    (folder / "p.yaml").write_text(PIPELINE.replace(KEYS, ""))
    without = ddprun("check", "p.yaml", "--resolved", cwd=folder, environment=mylab).stdout
    assert "background" not in without, "a pipeline does not change with what is installed"


@pytest.mark.parametrize(("trusted", "code"), [("", 2), ("mylab.hooks", 2), ("mylab", 0)])
def test_what_is_not_trusted_is_not_imported(
    mylab: Mapping[str, str], folder: Path, trusted: str, code: int
) -> None:
    """Each is a fault at its name; `catalog`, `schema` and `submit` do without it."""
    environment = {**os.environ, **mylab, "DDPRUN_TRUSTED": trusted}

    def call(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
        )

    done = call("check", "p.yaml")
    assert done.returncode == code, done.stderr
    told = done.stdout + done.stderr
    for kind, name, target, place in (
        ("tracker", "csv", "mylab.trackers.Csv", "8:10"),
        ("sync policy", "neighbours", "mylab.sync.Neighbours", "11:30"),
        ("cluster", "background", "mylab.clusters.Background", "14:1"),
    ):
        refused = f'the installed {kind} "{name}" ({target}) may not be imported: '
        assert (f"p.yaml:{place}: " in told and refused in told) is (code == 2), told
    imported = call("catalog", "tracker"), call("schema"), call("submit", "--help"), done
    for one in imported:
        assert ("mylab" in one.stderr.splitlines()[-1].split()) is (code == 0)
    sent = call("submit", "p.yaml", "--to", "background", "--dry-run")
    assert sent.returncode == code
