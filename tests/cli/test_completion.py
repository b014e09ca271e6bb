"""The Tab key, in a real bash, and what click's script gets for zsh and fish."""

import os
import pty
import select
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import ddprun

LINE = 'eval "$(_DDPRUN_COMPLETE=bash_source ddprun)"\n'


class Bash:
    """An interactive bash in `folder`, with completion set up as the documentation says."""

    def __init__(self, folder: Path) -> None:
        (folder / ".inputrc").touch()  # no settings but its own, whatever the machine's are
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            environment = {
                **os.environ,
                "PATH": path,
                "PS1": "> ",
                "TERM": "dumb",
                "INPUTRC": str(folder / ".inputrc"),
            }
            os.execve(shutil.which("bash") or "bash", ["bash", "--norc", "--noprofile", "-i"], environment)
        self.type(
            "bind 'set enable-bracketed-paste off'; bind 'set show-all-if-ambiguous on'; "
            + LINE
            + "echo rea''dy\n"
        )
        self.read("ready")

    def type(self, keys: str) -> None:
        os.write(self.terminal, keys.encode())

    def read(self, until: str, seconds: float = 60) -> str:
        """What it has written when `until` is there."""
        found, end = "", time.monotonic() + seconds
        while until not in found:
            assert select.select([self.terminal], [], [], max(0.0, end - time.monotonic()))[0], found
            found += os.read(self.terminal, 4096).decode()
        return found

    def complete(self, typed: str, until: str) -> str:
        """What stands on the screen after a line and the Tab key; the line is then dropped."""
        self.type(f"{typed}\t")
        found = self.read(until)
        self.type("\x15echo nex''t\n")
        return found + self.read("next\r\n")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_tab_key_in_bash(tmp_path: Path) -> None:
    """Files and folders, commands, keys, kinds, names and clusters."""
    for name in ("digits.yaml", "digital.yml"):
        (tmp_path / name).touch()
    (tmp_path / "pipelines").mkdir()
    bash = Bash(tmp_path)
    assert "digital.yml" in bash.complete("ddprun dig", "digits.yaml")
    assert "digital.yml" in bash.complete("ddprun check dig", "digits.yaml")
    assert "ddprun run pipelines/" in bash.complete("ddprun run pip", "pipelines/")
    assert "ddprun explain " in bash.complete("ddprun expl", "explain ")
    bash.complete("ddprun digits.yaml --set loader.batch", "--set loader.batch_size=")
    bash.complete("ddprun catalog dilo", "catalog diloco ")
    bash.complete("ddprun submit digits.yaml --to kub", "--to kubernetes ")
    bash.type("exit\n")
    os.waitpid(bash.pid, 0)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_their_script_and_the_same_words(tmp_path: Path, shell: str) -> None:
    """Click's own for each of them; that files are wanted, and the keys of `--set`."""
    script = ddprun(cwd=tmp_path, environment={"_DDPRUN_COMPLETE": f"{shell}_source"}, fresh=True)
    assert "_DDPRUN_COMPLETE" in script.stdout
    for line, word, expected in (
        ("ddprun check dig", "dig", "file"),
        ("ddprun check --set loader.batch", "loader.batch", "loader.batch_size="),
    ):
        position = word if shell == "fish" else str(len(line.split()) - 1)
        asked = {"COMP_WORDS": line, "COMP_CWORD": position, "_DDPRUN_COMPLETE": f"{shell}_complete"}
        assert expected in ddprun(cwd=tmp_path, environment=asked, fresh=True).stdout
