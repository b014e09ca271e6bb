"""Canaries in the environment and in a URL: a real run writes and shows none of them."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from tests.engine.running import summary
from tests.ranks import Finished, Running, ddprun

IN_ENVIRONMENT, IN_LOGIN, IN_OVERRIDE, IN_URL = (
    f"canary-{hashlib.sha256(name.encode()).hexdigest()[:20]}" for name in ("env", "login", "set", "url")
)
SIGN = "canary-"
ENVIRONMENT = {"LAB_API_KEY": IN_ENVIRONMENT, "LAB_LOGIN": IN_LOGIN, "LAB_PASSWORD": IN_OVERRIDE}

MODULE = """
import hashlib
import torch
from torch import nn
from torch.utils.data import Dataset

class Files(Dataset):
    def __init__(self, url, api_token, password):
        self.seen = f"{url} {api_token} {password}"
        assert hashlib.sha256(self.seen.encode()).hexdigest() == "HASH", "other values than in the file"
    def __len__(self):
        return 64
    def __getitem__(self, place):
        if place == 40 and FAILS:
            try:
                raise OSError(self.seen)
            except OSError as error:
                raise RuntimeError(f"no answer: {self.seen!r}\\n{self.seen}") from error
        return torch.full((8,), float(place)), place % 2

def net(width, api_key):
    assert api_key.endswith("!")
    return nn.Linear(8, width)
"""

PIPELINE = """
model: {lab.net: {width: 2, api_key: "${env:LAB_API_KEY}!"}}
data:
  train:
    lab.Files:
      url: https://reader:IN_URL@data.example/x?y=${env:LAB_LOGIN}
      api_token: ${env:LAB_API_KEY}
      password: unset
optimizer: sgd
loader: {batch_size: 4, shuffle: false, workers: 1}
timings: {fidelity_every: 2}
audit: {every: 2}
stages:
  - train: {epochs: 2, sync: {local_sgd: {every: 2}}}
  - train: {epochs: 1}
  - save
launch: {preload: null}  # forked ranks show the command line of their launcher
"""


def prepare(folder: Path, *, fails: bool) -> None:
    seen = f"https://reader:{IN_URL}@data.example/x?y={IN_LOGIN} {IN_ENVIRONMENT} {IN_OVERRIDE}"
    module = MODULE.replace("HASH", hashlib.sha256(seen.encode()).hexdigest())
    (folder / "lab.py").write_text(module.replace("FAILS", str(fails)))
    # A loading process reports a failure under a first line of its own.
    text = PIPELINE.replace("workers: 1", "workers: 0") if fails else PIPELINE
    (folder / "p.yaml").write_text(text.replace("IN_URL", IN_URL))


def run(folder: Path, *, fresh: bool) -> tuple[Finished, set[str]]:
    """The finished run, and the command line of every process below it while it ran."""
    lines: set[str] = set()
    overrides = ["--set", "data.train.lab.Files.password=${env:LAB_PASSWORD}"]
    with Running(
        "p.yaml",
        *overrides,
        "--run-dir",
        "run",
        cwd=folder,
        environment=ENVIRONMENT,
        fresh=fresh,
    ) as running:
        own: set[str] = set()
        while running.process.poll() is None:
            own.add(_command_line(running.process.pid))  # until its exec is over, it shows none
            lines |= {_command_line(pid) for pid in below(running.process.pid)}
            time.sleep(0.02)
        # Between fork and exec a process still shows the line of the one that starts it, which is the user's.
        return running.wait(), lines - own


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def below(pid: int) -> list[int]:
    """All processes that a process has started, and that these have."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [*children, *(one for child in children for one in below(child))]


def leaks(folder: Path) -> list[str]:
    """Files that hold a canary in their content or their name."""
    return [str(path) for path in folder.rglob("*") if path.is_file() and SIGN.encode() in path.read_bytes()]


def test_a_run_writes_and_shows_no_secret(tmp_path: Path) -> None:
    """The values reach the user's code; no file, no output and no command line of a child has them."""
    prepare(tmp_path, fails=False)
    done, lines = run(tmp_path, fresh=True)
    assert done.code == 0, done.stderr
    assert SIGN not in done.stdout + done.stderr
    assert leaks(tmp_path / "run") == []
    ranks = [line for line in lines if " run p.yaml" in line]
    assert ranks, lines
    assert not any(SIGN in line or "--set" in line for line in lines), lines
    written = (tmp_path / "run" / "pipeline.yaml").read_text()
    assert 'api_token: "${env:LAB_API_KEY}"' in written
    assert 'password: "${env:LAB_PASSWORD}"' in written
    assert 'url: "https://reader:[redacted]@data.example/x?y=${env:LAB_LOGIN}"' in written
    assert summary(tmp_path / "run")["run_dir"] == "run"


def test_a_run_that_fails_with_a_secret_in_its_message_shows_none(tmp_path: Path) -> None:
    """Traceback, headline and summary name the variable, or a marker, in the value's place."""
    prepare(tmp_path, fails=True)
    done, _ = run(tmp_path, fresh=False)
    assert done.code == 1
    assert "Traceback" in done.stderr
    assert "no answer" in done.stderr
    assert (
        "https://reader:[redacted]@data.example/x?y=${env:LAB_LOGIN} ${env:LAB_API_KEY} ${env:LAB_PASSWORD}"
        in done.stderr
    )
    assert SIGN not in done.stdout + done.stderr
    assert leaks(tmp_path / "run") == []
    error = summary(tmp_path / "run")["error"]["message"]
    assert error.startswith(
        "RuntimeError: no answer: 'https://reader:[redacted]@data.example/x?y=${env:LAB_LOGIN}"
    )


@pytest.mark.parametrize("command", ["check", "explain"])
def test_commands_that_start_no_ranks_show_none_either(tmp_path: Path, command: str) -> None:
    """`check --resolved`, and `explain` of a pipeline whose data fail."""
    prepare(tmp_path, fails=False)
    lab = tmp_path / "lab.py"
    lab.write_text(
        lab.read_text().replace("        assert", "        raise ValueError(self.seen)\n        assert")
    )
    done = ddprun(
        *([command, "p.yaml", "--resolved"] if command == "check" else [command, "p.yaml"]),
        "--set",
        "data.train.lab.Files.password=${env:LAB_PASSWORD}",
        cwd=tmp_path,
        environment=ENVIRONMENT,
    )
    assert done.code == (0 if command == "check" else 1), done.stderr
    assert "[redacted]" in done.stdout + done.stderr
    assert SIGN not in done.stdout + done.stderr


def test_an_unset_variable_starts_no_rank(tmp_path: Path) -> None:
    """It is bad input, told before anything is launched, with its places."""
    prepare(tmp_path, fails=False)
    assert not ENVIRONMENT.keys() & os.environ.keys()
    done = ddprun("p.yaml", cwd=tmp_path)
    assert done.code == 2
    assert (
        'p.yaml:2:38: model."lab.net".api_key: the environment variable LAB_API_KEY is not set' in done.stderr
    )
    assert [done.stderr.count(f"{name} is not set") for name in ENVIRONMENT] == [2, 1, 0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
