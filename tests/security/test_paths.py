"""What a pipeline writes: in the run's folder, elsewhere only where `save` says so; no shell reads a name."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ddprun.config import LoadedPipeline, PipelineError, load
from ddprun.engine.worker import run_worker
from ddprun.zoo.data import DataError, text
from tests.ranks import as_processes, ddprun

ROOT = Path(__file__).parents[2]
HOSTILE = "$(touch shell);`touch shell`|touch shell & '\"\n x.yaml"
PIPELINE = """
model: {mlp: {inputs: 64, outputs: 10}}
data: digits
optimizer: sgd
launch: {nproc_per_node: 1}
stages: [{train: {steps: 1}}, save]
"""


@pytest.mark.parametrize(
    "name", ["..", ".", ".hidden", "../x", "/tmp/x", "a/b", "a\\b", "a b", "$(x)", "a;b", "~", "a\n", "", "é"]
)
def test_a_name_stays_one_folder(loaded: Callable[..., LoadedPipeline], name: str) -> None:
    """Whatever could lead out of `runs/`, or mean something to a shell, is refused."""
    with pytest.raises(PipelineError, match="name: "):
        loaded("", f"name={name!r}" if "\n" not in name else 'name="a\\n"')


@pytest.mark.parametrize("name", ["..yaml", "...yaml", HOSTILE, "ü.yaml", "a" * 240 + ".yaml", "-rf.yaml"])
def test_a_files_name_gives_a_plain_one(tmp_path: Path, name: str) -> None:
    """The name that is taken from the file is one that the file could have given."""
    path = tmp_path / name
    path.write_text(PIPELINE)
    given = load(path).pipeline.name
    assert load(path, [f'name="{given}"']).pipeline.name == given


def test_shell_metacharacters_stay_text(tmp_path: Path) -> None:
    """In the pipeline's file name, the run's folder, the saved file, an override, and the data's files."""
    (tmp_path / HOSTILE).write_text(PIPELINE)
    (tmp_path / "runs $(touch shell)").mkdir()
    to = "`touch shell` $(touch shell);x.safetensors"
    done = ddprun(
        HOSTILE,
        "--run-dir",
        "runs $(touch shell)/a;touch shell",
        "--set",
        f"stages[1].save.to={to!r}",
        cwd=tmp_path,
    )
    assert done.code == 0, done.stderr
    assert not list(tmp_path.rglob("shell"))
    assert (tmp_path / "runs $(touch shell)" / "a;touch shell" / to).is_file()


def test_nothing_goes_through_a_shell() -> None:
    """No source of ours asks for one."""
    found = subprocess.run(
        ["grep", "-rnE", r"shell=True|os\.(system|popen)\(|getoutput", "--include=*.py", "runner", "hooks"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout == ""


def test_save_is_the_one_way_out(tmp_path: Path) -> None:
    """A run with an absolute `to` writes that file and the pipeline beside it, and all else in its folder."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "p.yaml").write_text(PIPELINE)
    to = tmp_path / "out" / "m.safetensors"
    done = ddprun("p.yaml", "--run-dir", "run", "--set", f"stages[1].save.to={to}", cwd=work)
    assert done.code == 0, done.stderr
    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    outside = {str(path) for path in written if not path.is_relative_to("work/run")}
    assert outside == {"work/p.yaml", "out/m.safetensors", "out/m.safetensors.yaml"}


def test_save_replaces_no_pipeline_that_a_run_was_started_with(tmp_path: Path) -> None:
    """Weights that are named after it bring another file with them; the next run replaces both."""
    work = tmp_path / "work"
    work.mkdir()
    text = PIPELINE.replace(
        "[{train: {steps: 1}}, save]",
        "[{train: {steps: 1}}, {save: {to: ../train.safetensors}}, {save: {to: pipeline.safetensors}}]",
    )
    (work / "train.yaml").write_text(text)
    for name in ("first", "second"):
        done = ddprun("train.yaml", "--run-dir", name, cwd=work)
        assert done.code == 0, done.stderr
        assert (work / "train.yaml").read_text() == text
        assert {path.name for path in work.iterdir() if path.is_file()} == {
            *("train.yaml", "train.safetensors", "train.safetensors.yaml"),
        }
        own = (work / name / "pipeline.yaml").read_text()
        assert (work / name / "pipeline.safetensors.yaml").read_text() == own
        assert (work / "train.safetensors.yaml").read_text() == own


@pytest.mark.parametrize("other", ["link", "folder"])
def test_what_stands_in_the_way_of_the_pipeline_leads_nowhere(tmp_path: Path, other: str) -> None:
    """A link is replaced, and not what it leads to; for a folder the run fails in a line."""
    work = tmp_path / "work"
    (work / "out").mkdir(parents=True)
    (work / "p.yaml").write_text(PIPELINE)
    (work / "mine.yaml").write_text("seed: 0\n")
    beside = work / "out" / "m.safetensors.yaml"
    if other == "link":
        beside.symlink_to("../mine.yaml")
    else:
        beside.mkdir()
    done = ddprun("p.yaml", "--run-dir", "run", "--set", "stages[1].save.to=../out/m.safetensors", cwd=work)
    assert (work / "mine.yaml").read_text() == "seed: 0\n"
    assert {path.name for path in (work / "out").iterdir()} == {"m.safetensors", "m.safetensors.yaml"}
    if other == "link":
        assert done.code == 0, done.stderr
        assert not beside.is_symlink()
    else:
        assert done.code == 1
        assert "stages[1].save: cannot write run/../out/m.safetensors: Is a directory" in done.stderr
        assert "Traceback" not in done.stderr


def test_an_endless_pattern_is_a_fault(tmp_path: Path) -> None:
    """Not a crash of the search."""
    with pytest.raises(DataError, match="too many folders"):
        text(folder=tmp_path, files=("**/" * 3000,), context=4, held_out=None)


def _run_under(umask: int, file: Path, run_dir: Path) -> int:
    os.umask(umask)
    return run_worker(load(file), run_dir)


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o002])
def test_the_umask_decides_who_may_read_a_run(tmp_path: Path, umask: int) -> None:
    """Every file and folder alike; safetensors makes its own for this user alone."""
    file = tmp_path / "p.yaml"
    file.write_text(f"{PIPELINE}checkpoint: {{every: 1, keep: 1}}\ntrack: [tensorboard, prometheus]\n")
    assert as_processes(1, _run_under, umask, file, tmp_path / "run", cwd=tmp_path) == [0]
    found = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert {".safetensors", ".json", ".jsonl", ".yaml", ".prom", ".lock"} <= {path.suffix for path in found}
    for path in found:
        mode = (0o777 if path.is_dir() else 0o666) & ~umask
        assert (path.name, oct(path.stat().st_mode & 0o777)) == (path.name, oct(mode))
