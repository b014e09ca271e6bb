"""The winner's file: the user's own text with other values."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ddprun.cli import main
from ddprun.config import load
from ddprun.config.resolved import flow_yaml
from ddprun.tune.write import Change, save, secret_override_keys, tuned_text

HEAD = """# My pipeline.
model: {mlp: {inputs: 64, hidden: [32], outputs: 10}}  # small
data: digits
optimizer:
  sgd: {lr: 0.1}  # as in the paper
"""
HOOKS, SYNC, CAP = ("hooks", ["int8"]), ("sync", {"local_sgd": {"every": 4}}), ("ddp.bucket_cap_mb", 5)
OWN = ("stages[0].train.hooks", [{"topk": {"density": 0.1}}])


def written(folder: Path, text: str, *changes: tuple[str, Any], overrides: tuple[str, ...] = ()) -> str:
    """The text of the tuned file, which must load to what was wanted."""
    file = folder / "p.yaml"
    file.write_text(text)
    loaded = load(file, overrides)
    made = [Change(key, value, f"was other ({number})") for number, (key, value) in enumerate(changes)]
    found = tuned_text(loaded, made, ["Tuned.", ""])
    output = folder / "p.tuned.yaml"
    output.write_text(found)
    assert main(["check", str(output)]) == 0
    wanted = load(file, (*overrides, *(f"{key}={flow_yaml(value)}" for key, value in changes))).as_dict()
    assert {**load(output).as_dict(), "name": ""} == {**wanted, "name": ""}
    return found


@pytest.mark.parametrize(
    ("text", "changes", "lines"),
    [
        (
            "hooks: [fp16]   # half\nstages: [train: {steps: 40}]\n",
            [HOOKS],
            ["# was other (0)", "hooks: [int8]   # half"],
        ),
        (
            "hooks:\n  - fp16  # first\n\n# stages follow\nstages:\n  - train: {steps: 40}\n",
            [HOOKS, SYNC],
            ["hooks: [int8]  # first", "", "# stages follow", "sync: {local_sgd: {every: 4}}"],
        ),
        ("stages: [train: {steps: 40}]", [HOOKS], ["stages: [train: {steps: 40}]", "hooks: [int8]"]),
        (
            "ddp: {static_graph: true}\nstages: [train: {steps: 40}]\n",
            [CAP],
            ["# was other (0)", "ddp: {static_graph: true, bucket_cap_mb: 5}"],
        ),
        (
            "ddp:\n  # one graph\n  static_graph: true\nstages: [train: {steps: 40}]\n",
            [CAP],
            ["  # one graph", "  # was other (0)", "  bucket_cap_mb: 5", "  static_graph: true"],
        ),
        ("ddp: {}\nstages: [train: {steps: 40}]\n", [CAP], ["ddp: {bucket_cap_mb: 5}"]),
        ("stages: [train: {steps: 40}]\n", [CAP], ["ddp: {bucket_cap_mb: 5}"]),
        (
            "stages:\n  - train:\n      steps: 40  # short\n      hooks:\n        - fp16\n  - save\n",
            [OWN],
            ["      # was other (0)", "      hooks: [{topk: {density: 0.1}}]", "  - save"],
        ),
        (
            "stages:\n  - train: {steps: 40, hooks: [fp16]}\n",
            [OWN],
            ["  # was other (0)", "  - train: {steps: 40, hooks: [{topk: {density: 0.1}}]}"],
        ),
        (
            "stages:\n  - train: {\n      steps: 40,\n      hooks: [\n        fp16 ]}\n",
            [OWN],
            ["      # was other (0)", "      hooks: [{topk: {density: 0.1}}]}"],
        ),
        (
            "sync: every_step\r\nstages: [train: {steps: 40}]\r\n",
            [SYNC],
            ["sync: {local_sgd: {every: 4}}"],
        ),
        ('"hooks": ["fp16"]\nstages: [train: {steps: 40}]\n', [HOOKS], ['"hooks": [int8]']),
        ("hooks:\nstages: [train: {steps: 40}]\n".replace("hooks:", "hooks: []"), [HOOKS], ["hooks: [int8]"]),
    ],
)
def test_the_users_text_stays(
    tmp_path: Path, text: str, changes: list[tuple[str, Any]], lines: list[str]
) -> None:
    """Its comments and its layout, but for the values that change; a comment stands above each."""
    found = written(tmp_path, HEAD + text, *changes).splitlines()
    assert found[0] == "# Tuned."
    for line in (*HEAD.splitlines(), *lines):
        assert line in found
    for number in range(len(changes)):
        assert sum(line.strip() == f"# was other ({number})" for line in found) == 1


@pytest.mark.parametrize(
    "text",
    [
        "hooks: &h [fp16]\nstages: [train: {steps: 40, hooks: *h}, train: {steps: 9}]\n",
        "stages: [train: {steps: 40}]\n...\n",
    ],
)
def test_what_cannot_be_edited_is_written_anew(tmp_path: Path, text: str) -> None:
    """As `check --resolved` has it, with the comments of the changes at the top."""
    found = written(tmp_path, HEAD + text, HOOKS)
    assert "# hooks: was other (0)" in found
    assert "# default" in found


def test_overrides_are_written_but_no_secrets(tmp_path: Path) -> None:
    """What was tuned is the file with its overrides, so these belong to it."""
    text = f"{HEAD}stages: [train: {{steps: 40}}]\n"
    found = written(tmp_path, text, HOOKS, overrides=("loader.batch_size=16", "optimizer.sgd.lr=0.5"))
    assert "loader: {batch_size: 16}" in found
    assert "  sgd: {lr: 0.5}  # as in the paper" in found
    assert found.count("# by --set") == 2
    own = text.replace("data: digits", "data: {own.Data: {size: 3}}  # mine")
    found = written(tmp_path, own, HOOKS, overrides=("data.own.Data.size=4",))
    assert "data: {own.Data: {size: 4}}  # mine" in found
    (tmp_path / "p.yaml").write_text(own.replace("size: 3", "url: x"))
    loaded = load(tmp_path / "p.yaml", ("data.own.Data.url=https://me:hunter2@host",))
    assert "hunter2" not in tuned_text(loaded, [Change(*HOOKS, "")], [])
    assert secret_override_keys(loaded) == ["data.own.Data.url"]


def test_a_file_is_no_more_readable_than_the_first(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").touch(0o600)
    before = os.umask(0)
    try:
        save("text\n", tmp_path / "q.yaml", permissions_from=tmp_path / "p.yaml")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "q.yaml").stat().st_mode) == 0o600
    assert (tmp_path / "q.yaml").read_text() == "text\n"
