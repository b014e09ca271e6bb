"""The pages of docs/: links, the site, the tutorial's commands, and messages that troubleshooting names."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ddprun.config import load
from tests.ranks import ddprun

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    """Each relative link, of pages that are not in the site, too."""
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_site_is_made_of_them(tmp_path: Path) -> None:
    """Without a warning: every page is in its navigation, every anchor is there, the Python API is found."""
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    environment = {"NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=150, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ddprun_hooks.register" in (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")


@pytest.mark.timeout(600)
def test_the_tutorial_works(tmp_path: Path) -> None:
    """Its commands, in order, in an empty folder; the resumed run has the bits of the unbroken one."""
    commands = re.findall(r"^\$ (.+)$", page("tutorial.md"), re.MULTILINE)
    assert len(commands) == 11
    told = ""
    for command in commands:
        program, *words = shlex.split(command)
        if program == "ddprun":
            ended = ddprun(*words, cwd=tmp_path, environment={"HOME": str(tmp_path)})
            assert ended.code == 0, f"{command}\n{ended.stdout}{ended.stderr}"
        else:
            told = subprocess.check_output([program, *words], cwd=tmp_path, text=True, timeout=60)
    hashes = {line.split()[0] for line in told.splitlines()}
    assert len(told.splitlines()) == 2
    assert len(hashes) == 1


def test_troubleshooting_names_messages_that_there_are() -> None:
    """What stands in code in the first column is in the source, but for what torch says."""
    source = "".join(
        re.sub(r'"\s*f?"', "", path.read_text(encoding="utf-8"))
        for folder in ("runner", "hooks")
        for path in (ROOT / folder).rglob("*.py")
    )
    not_ours = {
        "operator torchvision::nms does not exist",
        "received 0 items of ancdata",
        "Too many open files",
        "Address already in use",
        "NCCL error",
        "unhandled system error",
        "CUDA out of memory",
        "No module named …",
    }
    messages = re.findall(r"^\| (`.+?) \|", page("troubleshooting.md"), re.MULTILINE)
    parts = [
        part.strip(" :()'")
        for message in messages
        for text in re.findall(r"`([^`]+)`", message)
        if text not in not_ours
        for part in text.split("…")
    ]
    assert len(parts) > 30
    assert [part for part in parts if len(part) > 3 and part not in source] == []


def test_files_to_migrate_to_are_good(tmp_path: Path) -> None:
    """They have neither errors nor warnings."""
    examples = re.findall(r"```yaml\n(.*?)```", page("migration.md"), re.DOTALL)
    assert examples
    for example in examples:
        (tmp_path / "p.yaml").write_text(example)
        assert load(tmp_path / "p.yaml").warnings == ()
