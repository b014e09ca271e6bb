"""docs/your-own.md works as it stands: its Python is one file, and each YAML replaces keys of the first."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from tests.engine.running import events, run_pipeline, summary
from tests.ranks import ddprun_here

PAGE = (Path(__file__).parents[2] / "docs" / "your-own.md").read_text(encoding="utf-8")
PYTHON = "\n\n".join(re.findall(r"```python\n# mine\.py\n(.*?)```", PAGE, re.DOTALL))
FIRST, *PIECES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
NAMES = [
    "first",
    "named",
    "smooth",
    "sum",
    "teacher",
    "sam",
    "model",
    "lengths",
    "measured",
    "objects",
    "tuned",
    "images",
    "stream",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's files lie, and its first pipeline has run."""
    found = tmp_path_factory.mktemp("page")
    (found / "mine.py").write_text(PYTHON)
    base: dict[str, Any] = yaml.safe_load(FIRST)
    for name, piece in zip(NAMES, ["", *PIECES], strict=True):
        (found / f"{name}.yaml").write_text(yaml.safe_dump(base | (yaml.safe_load(piece) or {})))
    run(found, "first")
    stored = load_file(found / "first" / "model.safetensors")
    body = {name: value for name, value in stored.items() if name.startswith("body.")}
    save_file(body, found / "body.safetensors")
    return found


def run(folder: Path, name: str) -> None:
    run_pipeline(folder, (folder / f"{name}.yaml").read_text(), 2, name)


@pytest.mark.parametrize("name", NAMES)
def test_every_pipeline_of_the_page_runs(folder: Path, name: str) -> None:
    """To its end, with ranks that read the same data."""
    if name != "first":
        run(folder, name)
    assert summary(folder / name)["status"] == "done"
    assert not [event for event in events(folder / name) if event["event"] == "data_differs"]
    if name == "tuned":
        assert set(load_file(folder / "tuned" / "tuned.safetensors")) == {"head.weight", "head.bias"}


def test_what_is_trusted_is_what_the_page_says(folder: Path) -> None:
    """The module beside the file with `./`; none of torch's methods."""
    environment = {"DDPRUN_TRUSTED": "./mine,torchvision"}
    assert ddprun_here("check", "first.yaml", cwd=folder, environment=environment).code == 0
    assert ddprun_here("first.yaml", cwd=folder, environment={"DDPRUN_TRUSTED": "mine"}).code == 2
    environment = {"DDPRUN_TRUSTED": "torch"}
    refused = ddprun_here("check", "objects.yaml", cwd=folder, environment=environment)
    assert (refused.code, "Sequential.append" in refused.stdout) == (2, True)


def test_the_page_names_every_example(folder: Path) -> None:
    """And no file that is not there. Each needs no more than what it says to install, and torch's types."""
    trusted = {"DDPRUN_TRUSTED": "transformers,datasets,peft,torchvision,torchmetrics,monai,torch,./gan"}
    root = Path(__file__).parents[2]
    there = {f"../examples/{file.name}" for file in (root / "examples").iterdir()}
    assert set(re.findall(r"\(([^)]*examples/[^)]*)\)", PAGE)) == there
    for file in [file for file in there if file.endswith(".yaml")]:
        done = ddprun_here("check", str(root / "docs" / file), cwd=folder, environment=trusted)
        assert done.code == 0, done.stdout
