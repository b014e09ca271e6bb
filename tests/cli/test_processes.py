"""Real processes: what is imported, what is shadowed, and what never shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config import bad

ROOT = Path(__file__).parents[2]
GOOD = "model:\n  mlp: {inputs: 64, outputs: 10}\ndata: digits\noptimizer: sgd\n"

SHADOW = "raise SystemExit('the working directory shadows {}')\n"

# What `python -m ddprun` runs, and then tells which of the heavy packages are loaded.
WATCHED = """
import sys
from ddprun.cli import main
code = main(sys.argv[1:])
slow = {'torch', 'numpy', 'rich', 'structlog', 'sklearn'}
heavy = sorted({name.partition('.')[0] for name in sys.modules} & slow)
print('heavy:', *heavy, file=sys.stderr)
sys.exit(code)
"""


def python(
    *args: str | Path, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with the packages of this checkout."""
    source = os.pathsep.join([str(ROOT / "runner"), str(ROOT / "hooks")])
    return subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": source, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "start", ["from ddprun.cli import main", "runpy.run_module('ddprun', run_name='__main__')"]
)
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_elsewhere_than_on_linux_a_line_says_so(start: str, platform: str) -> None:
    """At once: what only Linux has is not there to be imported."""
    gone = "sys.modules |= dict.fromkeys(['fcntl', 'resource', 'click', 'psutil'])"
    done = python("-c", f"import runpy, sys; sys.platform = {platform!r}; {gone}; {start}")
    assert (done.returncode, done.stdout) == (2, "")
    where = "run it in a container, or on Windows in WSL 2"
    assert done.stderr == f"ddprun needs Linux, and this is {platform}: {where}\n"


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--help"], 0),
        (["run", "--help"], 0),
        (["--version"], 0),
        (["check", "pipelines/quickstart.yaml", "pipelines/bytes.yaml"], 0),
        (["check", "pipelines/exact.yaml", "--resolved"], 0),
        (["check", "tests/bad/wrong-types.yaml", "tests/bad/unknown-names.yaml"], 2),
        (["catalog"], 0),
        (["schema"], 0),
        (["doctor", "--help"], 0),
        (["doctor", "--timeout=x"], 2),
        (["tests/bad/wrong-types.yaml"], 2),
    ],
)
def test_torch_is_not_imported(args: list[str], code: int) -> None:
    """All that needs no rank starts without torch, and without anything else that is slow to import."""
    done = python("-c", WATCHED, *args, cwd=ROOT)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == "heavy:"


def test_no_bad_file_shows_a_traceback() -> None:
    """Every bad file gives exit code 2, and none a traceback or a word of the validation library."""
    paths = [case.path for case in bad.ALL if not case.overrides]
    done = python("-m", "ddprun", "check", *paths)
    assert done.returncode == 2
    assert done.stderr == ""
    for word in ("Traceback", "pydantic", "ValidationError", "type=", "errors.pydantic.dev"):
        assert word not in done.stdout


@pytest.mark.parametrize("command", [["check"], ["run"], []])
def test_a_bad_file_ends_with_2(command: list[str]) -> None:
    """As a process too, the exit code of bad input is 2."""
    done = python("-m", "ddprun", *command, ROOT / "tests/bad/unknown-hook.yaml")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert 'unknown hook "fp61"' in done.stdout + done.stderr


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A working directory whose files are called like what ddprun imports."""
    for name in ("yaml", "click", "runner", "pydantic", "torch", "typing", "logging", "json"):
        (tmp_path / f"{name}.py").write_text(SHADOW.format(name))
    for name in ("hooks", "ddprun_hooks", "pydantic_core"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(SHADOW.format(name))
    (tmp_path / "p.yaml").write_text(GOOD)
    return tmp_path


@pytest.mark.parametrize("flags", [[], ["-P"], ["-u"]], ids=lambda flags: "".join(flags) or "plain")
def test_the_working_directory_shadows_nothing(hostile: Path, flags: list[str]) -> None:
    """A user's `yaml.py`, `runner.py` or `hooks/` in the working directory stays the user's."""
    done = python(*flags, "-m", "ddprun", "check", "p.yaml", cwd=hostile)
    assert (done.returncode, done.stdout, done.stderr) == (0, "p.yaml: ok\n", "")


def test_the_hostile_folder_is_hostile(hostile: Path) -> None:
    """Without the guard the same folder does shadow, so the test above can fail."""
    done = python("-c", "import yaml", cwd=hostile)
    assert "shadows yaml" in done.stderr


def test_under_torchrun_the_working_directory_shadows_nothing(hostile: Path) -> None:
    """A worker that torchrun starts (`torchrun -m ddprun`) is guarded too."""
    runner = (
        "import sys; sys.path = [p for p in sys.path if p]; from torch.distributed.run import main; main()"
    )
    done = python(
        "-P",
        "-c",
        runner,
        "--standalone",
        "--nproc-per-node=1",
        "-m",
        "ddprun",
        "check",
        "p.yaml",
        cwd=hostile,
    )
    assert "shadows" not in done.stderr
    assert "p.yaml: ok" in done.stdout


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    """A shell that stands in a deleted folder can still ask for the version."""
    script = (
        "import os, subprocess, sys\n"
        "os.rmdir(os.getcwd())\n"
        "sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))\n"
    )
    (tmp_path / "gone").mkdir()
    done = python("-c", script, "-m", "ddprun", "--version", cwd=tmp_path / "gone")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_that_knows_ascii_only() -> None:
    """A character that cannot be shown is escaped, and no traceback shows instead."""
    done = python("-m", "ddprun", "check", ROOT / "tests/bad/missing-options.yaml", PYTHONIOENCODING="ascii")
    assert done.returncode == 2
    assert done.stderr == ""
    assert "{inputs: \\u2026}" in done.stdout


def test_a_closed_pipe_is_no_traceback() -> None:
    """`ddprun catalog | true` ends quietly: nobody reads what it prints."""
    source = os.pathsep.join([str(ROOT / "runner"), str(ROOT / "hooks")])
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "ddprun", "catalog"],
        env={**os.environ, "PYTHONPATH": source},
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write_end)
    assert done.stderr == ""
    assert done.returncode == 1


def test_output_that_a_disk_does_not_take_is_a_failure() -> None:
    """`ddprun schema > FILE` on a full disk left half a file behind, with a traceback or without a word."""
    source = os.pathsep.join([str(ROOT / "runner"), str(ROOT / "hooks")])
    for command in (["schema"], ["check", "--resolved", str(ROOT / "pipelines/quickstart.yaml")]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "ddprun", *command],
                env={**os.environ, "PYTHONPATH": source},
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
                check=False,
            )
        assert done.returncode == 1
        assert done.stderr == "ddprun: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("streams", ["2>&-", ">&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
@pytest.mark.parametrize(("file", "code"), [("missing-options.yaml", 2), ("no-such-file.yaml", 2)])
def test_a_stream_that_is_closed_is_no_traceback(streams: str, file: str, code: int) -> None:
    """Python has None in the place of a stream that the shell has closed."""
    script = f'"{sys.executable}" -m ddprun run "$0" {streams}'
    source = os.pathsep.join([str(ROOT / "runner"), str(ROOT / "hooks")])
    done = subprocess.run(
        ["bash", "-c", script, str(ROOT / "tests" / "bad" / file)],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    assert "Traceback" not in done.stdout + done.stderr
