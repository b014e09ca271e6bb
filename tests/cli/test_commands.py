"""What the commands print and return, called in this process."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import pytest

from ddprun import __version__
from ddprun.cli import main
from ddprun.config import LoadedPipeline, PipelineFault, load
from ddprun.config.faults import Place, Source

GOOD = "model:\n  mlp: {inputs: 64, outputs: 10}\ndata: digits\noptimizer: sgd\n"
Out = pytest.CaptureFixture[str]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_text(GOOD + "sed: 1\nseed: x\n")
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of `launch.start`, which starts nothing here."""
    calls: list[tuple[Any, ...]] = []
    launch = ModuleType("ddprun.launch")

    def start(
        loaded: LoadedPipeline, flags: Mapping[str, str | bool], run_dir: Path | None, *, resuming: str
    ) -> int:
        assert resuming == "no"
        calls.append((loaded, dict(flags), loaded.overrides, run_dir))
        return 0

    launch.start = start  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ddprun.launch", launch)
    monkeypatch.setattr("ddprun.launch", launch, raising=False)
    return calls


def test_help_names_every_command(capsys: Out) -> None:
    """`--help` shows what there is."""
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("run", "check", "tune", "init", "catalog", "observe", "schema"):
        assert f"  {command} " in out
    sentences = re.split(r"\n  (?=\S)", out.partition("Commands:\n  ")[2].rstrip())
    assert len(sentences) == 13
    for sentence in sentences:
        assert re.search(r"[^.]\.$", sentence), "whole, and not cut at the end of a line"


def test_no_arguments_show_the_help(capsys: Out) -> None:
    """`ddprun` alone is bad input, and shows what to do."""
    assert main([]) == 2
    assert "Commands:" in capsys.readouterr().err


def test_version(capsys: Out) -> None:
    """`--version` prints name and version."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ddprun {__version__}\n"


def test_a_file_is_run(good: Path, started: list[Any]) -> None:
    """`ddprun FILE` is `ddprun run FILE`."""
    assert main([str(good)]) == 0
    assert main(["run", str(good)]) == 0
    assert [call[1:] for call in started] == [({}, (), None)] * 2
    assert started[0][0].pipeline == load(good).pipeline


def test_flags_of_torchrun_are_handed_on(good: Path, started: list[Any]) -> None:
    """Torchrun's flags are taken before and after the path, with - and with _, and given on as strings."""
    args = ["--nnodes", "2", "--nproc_per_node=3", "--rdzv-endpoint", "h:1", "--node_rank", "1"]
    args += ["--standalone", "--set", "seed=4"]
    assert main([*args, str(good)]) == 0
    assert main([str(good), *args]) == 0
    flags = {
        "nnodes": "2",
        "nproc_per_node": "3",
        "rdzv_endpoint": "h:1",
        "node_rank": "1",
        "standalone": True,
    }
    for _, given, overrides, _ in started:
        assert given == flags
        assert overrides == ("seed=4",)
    assert started[0][0].pipeline.seed == 4


def test_the_run_folder_is_handed_on(good: Path, tmp_path: Path, started: list[Any]) -> None:
    """`--run-dir` is a path."""
    assert main([str(good), "--run-dir", str(tmp_path / "r")]) == 0
    assert started[0][3] == tmp_path / "r"


def test_a_bad_pipeline_starts_nothing(bad: Path, started: list[Any], capsys: Out) -> None:
    """Faults go to stderr, stdout stays empty, the exit code is 2."""
    assert main([str(bad)]) == 2
    out, err = capsys.readouterr()
    assert started == []
    assert out == ""
    assert f"{bad}:5:1: sed: unknown key" in err
    assert f"{bad}:6:7: seed: expected a whole number" in err


def test_a_fault_of_the_run_is_told_alike(good: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    """What only a run can see looks like any other fault, and the exit code is 2 too."""
    launch = ModuleType("ddprun.launch")

    def start(loaded: LoadedPipeline, *rest: object, resuming: str) -> int:
        raise loaded.error("model.mlp", "is too small")

    launch.start = start  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ddprun.launch", launch)
    monkeypatch.setattr("ddprun.launch", launch, raising=False)
    assert main([str(good)]) == 2
    assert capsys.readouterr().err.startswith(f"{good}:2:8: model.mlp: is too small\n")


def test_warnings_do_not_stop_a_run(good: Path, started: list[Any], capsys: Out) -> None:
    """A warning goes to stderr, and the run starts."""
    assert main([str(good), "--set", "stages=[save, {train: {steps: 1}}]"]) == 0
    assert len(started) == 1
    assert "warning: stages[0]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["chek"], "ddprun: no such command 'chek'. (Did you mean one of: 'check', 'schema'?); see"),
        (["check"], "missing argument 'PIPELINE…'"),
        (["x.yaml", "--nnode", "2"], "--nnodes"),
        (["--nproc-per-node", "2"], "missing argument 'PIPELINE'"),
        (["x.yaml", "--start-method", "fork"], "no such option '--start-method'"),
        (["x.yaml", "--max-restarts", "-1"], "-1 is not in the range x>=0"),
        (["x.yaml", "--monitor-interval", "inf"], "inf is not in the range 0<x<=3600"),
        (["explain", "x.yaml", "--cores", "inf"], "inf is not a finite number"),
        (["doctor", "--timeout", "nan"], "nan is not a finite number"),
        (["observe", "--timeout-s", "nan", "x.py"], "nan is not a finite number"),
        (["observe", "--timeout-s", "1e300", "x.py"], "1e+300 is not in the range 0<x<=31622400"),
        (["x.yaml", "y.yaml"], "unexpected extra argument"),
        (
            ["x.yaml", "seed=3"],
            "unexpected extra argument (seed=3); write --set KEY=VALUE to change a value; see",
        ),
        (["x.yaml", "--set", "seed=3", "stages[0].train.steps=5"], "write --set KEY=VALUE to change a value"),
        (["x.yaml", "data.a.B.token=abc123"], "(data.a.B.token=[redacted]; write --set KEY=VALUE"),
        (["explain", "x.yaml", "seed=3"], "write --set KEY=VALUE"),
        (["submit", "--to", "slurm", "x.yaml", "seed=3"], "write --set KEY=VALUE"),
        (["seed=3", "x.yaml"], "no such command 'seed=3'"),
        (["data.a.B.token=abc123"], "no such command 'data.a.B.token=[redacted]; see"),
        (["x.yaml", "--master-port", "x"], "'x'"),
        (["check", "x.yaml", "--format", "xml"], "'xml' is not one of"),
        (["check", "x.yaml", "y.yaml", "--resolved"], "--resolved takes one pipeline"),
        (["catalog", "hoook"], '"hoook" is neither a kind nor the name of an entry (did you mean "hook"?)'),
        (["catalog", "dilocco"], 'did you mean "diloco"?'),
    ],
)
def test_a_misuse_is_one_line(args: list[str], words: str, capsys: Out) -> None:
    """A wrong command line gives one line that says what is wrong and where help is, and exit code 2."""
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err
    assert "--help`" in err


@pytest.mark.parametrize("command", ["check", "compare"])
def test_a_setting_without_its_option_shows_no_secret(command: str, good: Path, capsys: Out) -> None:
    """Where it is taken for one of several files."""
    assert main([command, str(good), "data.a.B.token=abc123"]) == 2
    out, err = capsys.readouterr()
    assert "data.a.B.token=[redacted]: there is no such file" in out + err
    assert "abc123" not in out + err


def test_check_says_ok(good: Path, capsys: Out) -> None:
    """A good file gives one line."""
    assert main(["check", str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: ok\n"


def test_check_tells_all_files(good: Path, bad: Path, capsys: Out) -> None:
    """One bad file does not keep the others from being checked."""
    assert main(["check", str(bad), str(good)]) == 2
    out = capsys.readouterr().out
    assert out.count("bad.yaml:") == 2
    assert out.endswith(f"{good}: ok\n")


def test_check_resolved_is_a_pipeline(good: Path, tmp_path: Path, capsys: Out) -> None:
    """`--resolved` prints the pipeline alone, so that it can be redirected to a file."""
    assert main(["check", str(good), "--resolved", "--set", "stages=[save, {train: {steps: 1}}]"]) == 0
    out, err = capsys.readouterr()
    assert "warning" in err
    (tmp_path / "resolved.yaml").write_text(out)
    assert load(tmp_path / "resolved.yaml").pipeline.stages[1].index == 1


def test_check_as_json(good: Path, bad: Path, capsys: Out) -> None:
    """`--format json` is one list of all faults."""
    assert main(["check", str(bad), str(good), "--format", "json"]) == 2
    faults = json.loads(capsys.readouterr().out)
    assert [(fault["file"], fault["line"], fault["path"]) for fault in faults] == [
        (str(bad), 5, "sed"),
        (str(bad), 6, "seed"),
    ]
    assert faults[0]["suggestion"] == "seed"
    assert main(["check", str(good), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_check_for_github(bad: Path, capsys: Out) -> None:
    """`--format github` annotates the line."""
    assert main(["check", str(bad), "--format", "github"]) == 2
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"::error title=ddprun,file={bad},line=5,col=1::sed: unknown key")
    assert second.startswith(f"::error title=ddprun,file={bad},line=6,col=7::seed: expected")


def test_github_annotations_are_escaped() -> None:
    """Whatever a fault holds stays one annotation."""
    from ddprun.cli.printing import github_annotation

    fault = PipelineFault(Place(Source("a,b:c%.yaml"), 1, 2), "x", "50% :: of it")
    assert (
        github_annotation(fault)
        == "::error title=ddprun,file=a%2Cb%3Ac%25.yaml,line=1,col=2::x: 50%25 :: of it"
    )
    override = PipelineFault(Place(Source("--set 1", 1), 1, 2), "x", "bad")
    assert github_annotation(override) == "::error title=ddprun::--set 1: x: bad"


@pytest.mark.parametrize("form", ["text", "json", "github"])
def test_a_file_may_be_called_like_an_override(
    form: str, bad: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """Its faults are those of a file."""
    monkeypatch.chdir(bad.parent)
    bad.rename("--set x.yaml")
    assert main(["check", "--format", form, "--", "--set x.yaml"]) == 2
    out = capsys.readouterr().out
    assert out.count("--set x.yaml") == 2
    assert form != "github" or out.startswith("::error title=ddprun,file=--set x.yaml,line=5,col=1::sed: ")


@pytest.mark.parametrize(
    ("terminal", "no_color", "colored"), [(True, "", True), (True, "1", False), (False, "", False)]
)
def test_colors(
    terminal: bool, no_color: str, colored: bool, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """There is color on a terminal only, and none with NO_COLOR."""
    from ddprun.cli.printing import print_faults

    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    fault = PipelineFault(Place(Source("a.yaml", 0, ("x: 1",)), 1, 2), "x", "bad")
    print_faults([fault], sys.stdout)
    printed = capsys.readouterr().out
    assert ("\x1b[" in printed) == colored
    assert click.unstyle(printed) == f"{fault}\n"


def test_progress_is_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    """However often something is going on."""
    from ddprun.cli.printing import make_progress_printer

    seconds = iter((0.0, 0.1, 4.9, 5.0, 9.9, 10.0))
    monkeypatch.setattr("ddprun.cli.printing.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    show = make_progress_printer()
    for number in range(6):
        show(f"turn {number}")
    assert capsys.readouterr().err == "ddprun: turn 0\nddprun: turn 3\nddprun: turn 5\n"


def test_init_writes_a_good_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out, started: list[Any]
) -> None:
    """The starter file has neither faults nor warnings, and the command it shows runs it."""
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert capsys.readouterr().out == "wrote pipeline.yaml; run it with `ddprun pipeline.yaml`\n"
    assert load(Path("pipeline.yaml")).warnings == ()
    assert main(["pipeline.yaml"]) == 0
    assert len(started) == 1


def test_init_overwrites_nothing(tmp_path: Path, capsys: Out) -> None:
    """A file that is there stays as it is."""
    path = tmp_path / "x.yaml"
    path.write_text("mine")
    assert main(["init", str(path)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_a_folder_that_is_there_is_not_called_missing(capsys: Out) -> None:
    """Where no file can be made in it."""
    assert main(["init", "/proc/x.yaml"]) == 2
    assert capsys.readouterr().err == "ddprun: cannot write /proc/x.yaml: No such file or directory\n"
    assert main(["init", "/nowhere/x.yaml"]) == 2
    assert capsys.readouterr().err == "ddprun: cannot write /nowhere/x.yaml: there is no folder /nowhere\n"


def test_the_catalog_has_every_kind(capsys: Out) -> None:
    """All that can be chosen is listed, with options."""
    assert main(["catalog"]) == 0
    out = capsys.readouterr().out
    for words in (
        "  mlp: ",
        "  digits: ",
        "  CrossEntropyLoss: ",
        "  SGD: ",
        "  CosineAnnealingLR: ",
        "  fp16: ",
        "  accuracy: ",
    ):
        assert words in out
    assert "lr: a number; default 0.001" in out
    assert "T_max: a whole number; default the stage's steps" in out


def test_the_catalog_of_one_kind_as_json(capsys: Out) -> None:
    """`catalog hook --format json` is data for other programs."""
    assert main(["catalog", "hook", "--format", "json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert {"fp16", "bf16", "noop"} <= {entry["name"] for entry in entries}
    assert all(entry["kind"] == "hook" for entry in entries)


@pytest.mark.parametrize(
    ("name", "kinds", "written"),
    [
        ("diloco", ["sync"], "Write sync: {diloco: {every: …}}"),
        ("average", ["sync", "stage"], "Write stages: [average]"),
        ("cross_entropy", ["loss"], "Write loss: CrossEntropyLoss"),
        ("powersgd", ["hook"], "Write hooks: [powersgd]"),
        ("slurm", ["cluster"], "Write slurm: {}"),
        ("noise", ["mutate"], "Write stages: [{train: {steps: …, mutate: {noise: {std: …}}}}]"),
    ],
)
def test_the_catalog_shows_one_entry_in_full(name: str, kinds: list[str], written: str, capsys: Out) -> None:
    """With how a file names it, and every option; of each kind that has the name."""
    assert main(["catalog", name, "--format", "json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["kind"] for entry in entries] == kinds
    assert main(["catalog", name]) == 0
    out = capsys.readouterr().out
    assert written in out
    for option in (option for entry in entries for option in entry["options"]):
        assert f"\n  {option['name']}: " in out


def test_the_schema_goes_to_a_file(tmp_path: Path, capsys: Out) -> None:
    """`schema` prints, and `schema --output` writes, the same; a folder that is missing is named."""
    assert main(["schema"]) == 0
    printed = capsys.readouterr().out
    assert main(["schema", "--output", str(tmp_path / "s.json")]) == 0
    assert (tmp_path / "s.json").read_text() == printed
    assert json.loads(printed)["$schema"].endswith("2020-12/schema")
    assert main(["schema", "--output", "/nowhere/x.json"]) == 2
    assert capsys.readouterr().err == "ddprun: cannot write /nowhere/x.json: there is no folder /nowhere\n"


def test_an_interrupt_is_130(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends with the code that shells know, without a traceback."""
    launch = ModuleType("ddprun.launch")

    def start(*rest: object, resuming: str) -> int:
        raise KeyboardInterrupt

    launch.start = start  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ddprun.launch", launch)
    monkeypatch.setattr("ddprun.launch", launch, raising=False)
    assert main([str(good)]) == 130
