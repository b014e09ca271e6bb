"""How many files may be open at once: as many as the system allows."""

import errno
import resource
from pathlib import Path

import pytest

from ddprun.host.processes import file_limit_hint
from tests.launch.test_processes import SHORT
from tests.ranks import Running, ddprun

OPENING = """
import os
import resource
from pathlib import Path

from torch import nn

OPEN = []


class Net(nn.Sequential):
    def __init__(self, open_all=False):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        Path(f"limit-{os.environ['RANK']}").write_text(str(limit))
        if open_all:
            resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
        while open_all:
            OPEN.append(open(os.devnull))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "short.yaml").write_text(SHORT)
    (tmp_path / "opening.py").write_text(OPENING)
    return tmp_path


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one(folder: Path) -> None:
    """A shell's low one is that of programs that use `select`."""
    prefix = ["sh", "-c", 'ulimit -Sn 40; exec "$@"', "sh"]
    with Running("short.yaml", "--set=model=opening.Net", cwd=folder, prefix=prefix) as running:
        done = running.wait(300)
    assert done.code == 0, done.stderr
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert [(folder / f"limit-{rank}").read_text() for rank in range(2)] == [str(hard)] * 2


def test_too_many_open_files_are_named_with_the_limit(folder: Path) -> None:
    """Where the hard limit is reached, too."""
    done = ddprun("short.yaml", "--set=model={opening.Net: {open_all: true}}", cwd=folder)
    assert done.code == 1, done.stderr
    assert "Too many open files: '/dev/null'; this process may have 400 files" in done.stderr


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (OSError(errno.EMFILE, "Too many open files"), True),
        (
            RuntimeError(
                "unable to open shared memory object </torch_1> in read-write mode: Too many open files (24)"
            ),
            True,
        ),
        (RuntimeError("received 0 items of ancdata"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (ValueError("24"), False),
    ],
)
def test_errors_that_mean_too_many_open_files(error: Exception, hint: bool) -> None:
    """As Python says it, and torch's loading processes."""
    assert ("raise the hard limit" in file_limit_hint(error)) == hint
