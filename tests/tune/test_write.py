"""The winner's file: the user's own keys with other values."""

from pathlib import Path
from typing import Any

import pytest

from ddprun.cli import main
from ddprun.config import load
from ddprun.config.yaml_writer import flow_yaml
from ddprun.tune.text import overrides_without_secrets, tuned_pipeline_yaml

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
    wanted = (*overrides, *(f"{key}={flow_yaml(value)}" for key, value in changes))
    found = tuned_pipeline_yaml(load(file, overrides), wanted, ["Tuned.", ""])
    output = folder / "p.tuned.yaml"
    output.write_text(found)
    assert main(["check", str(output)]) == 0
    assert {**load(output).as_dict(), "name": ""} == {**load(file, wanted).as_dict(), "name": ""}
    return found


def test_the_users_keys_stay(tmp_path: Path) -> None:
    """Without the defaults of all others; comments and layout go."""
    text = "hooks: [fp16]  # half\nstages: [train: {steps: 40}, evaluate]\n"
    assert written(tmp_path, HEAD + text, HOOKS, SYNC) == (
        "# Tuned.\n#\nmodel:\n  mlp:\n    inputs: 64\n    hidden: [32]\n    outputs: 10\ndata: digits\n"
        "optimizer:\n  sgd:\n    lr: 0.1\nhooks: [int8]\nstages:\n  - train:\n      steps: 40\n  - evaluate\n"
        "sync:\n  local_sgd:\n    every: 4\n"
    )


@pytest.mark.parametrize(
    ("text", "changes", "lines"),
    [
        (
            "hooks:\n  - fp16  # first\n\n# stages follow\nstages:\n  - train: {steps: 40}\n",
            [HOOKS],
            ["hooks: [int8]"],
        ),
        ("ddp: {static_graph: true}\nstages: [train: {steps: 40}]\n", [CAP], ["  bucket_cap_mb: 5"]),
        ("ddp: {}\nstages: [train: {steps: 40}]\n", [CAP], ["ddp:", "  bucket_cap_mb: 5"]),
        (
            "stages:\n  - train: {steps: 40, hooks: [fp16]}\n  - save\n",
            [OWN],
            ["      hooks:", "        - topk:", "            density: 0.1", "  - save"],
        ),
        ("sync: every_step\r\nstages: [train: {steps: 40}]\r\n", [SYNC], ["    every: 4"]),
        ('"hooks": ["fp16"]\nstages: [train: {steps: 40}]\n...\n', [HOOKS], ["hooks: [int8]"]),
        (
            "hooks: &h [fp16]\nstages: [train: {steps: 40, hooks: *h}, train: {steps: 9}]\n",
            [HOOKS],
            ["      hooks: [fp16]", "hooks: [int8]"],
        ),
        ("name: 'on'\nstages: [train: {steps: 40}]\n", [HOOKS], ['name: "on"']),
    ],
)
def test_any_layout_can_be_written_anew(
    tmp_path: Path, text: str, changes: list[tuple[str, Any]], lines: list[str]
) -> None:
    """As the file of a winner, which loads."""
    found = written(tmp_path, HEAD + text, *changes).splitlines()
    for line in lines:
        assert line in found


def test_overrides_are_written_but_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was tuned is the file with its overrides, so these belong to it; no variable's value is there."""
    monkeypatch.setenv("LAB_TOKEN", "hunter2-and-more")
    text = f"{HEAD}stages: [train: {{steps: 40}}]\n"
    found = written(tmp_path, text, HOOKS, overrides=("loader.batch_size=16", "optimizer.sgd.lr=0.5"))
    assert "loader:\n  batch_size: 16\n" in found
    assert "    lr: 0.5\n" in found
    own = text.replace("data: digits", "data: {own.Data: {size: 3, url: 'ftp://me:pass@host/x'}}  # mine")
    token = "data.own.Data.token=${env:LAB_TOKEN}"
    found = written(tmp_path, own, HOOKS, overrides=("data.own.Data.size=4", token))
    kept = 'size: 4\n    url: "ftp://me:pass@host/x"\n    token: "${env:LAB_TOKEN}"\n'
    assert f"data:\n  own.Data:\n    {kept}" in found
    loaded = load(tmp_path / "p.yaml", ("data.own.Data.url=https://me:hunter2@host", token))
    assert overrides_without_secrets(loaded) == [token]
    heading = ["was https://me:hunter2@host,", "hunter2-and-more\u2028seed: 3\nseed: 4"]
    found = tuned_pipeline_yaml(loaded, [token], heading)
    assert "hunter2" not in found
    assert found.startswith("# was https://me:[redacted]@host,\n# ${env:LAB_TOKEN} seed: 3 seed: 4\nmodel:\n")
