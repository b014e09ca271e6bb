"""docs/pipeline.md says what the schema says."""

import re
from pathlib import Path

from pydantic import BaseModel

from ddprun.spec import Pipeline, load
from ddprun.spec.resolved import plain
from ddprun.spec.scalars import write
from ddprun.spec.schema import Ddp, Launch, Loader, Timings

TEXT = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")


def defaults() -> dict[str, str]:
    """Every key and its default, as the page writes them."""
    sections: dict[str, type[BaseModel]] = {
        "loader": Loader,
        "ddp": Ddp,
        "launch": Launch,
        "timings": Timings,
    }
    found: dict[str, str] = {}
    for key, field in Pipeline.model_fields.items():
        if key in sections:
            found |= {
                f"{key}.{name}": shown(item.default) for name, item in sections[key].model_fields.items()
            }
        else:
            found[key] = "" if field.is_required() else shown(field.default)
    return found | {"name": "the file's name", "stages": "`[train: {epochs: 1}]`"}


def shown(value: object) -> str:
    value = plain(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return (
        "[]"
        if value == []
        else write(value)
        if isinstance(value, (str, int, float, type(None)))
        else str(value)
    )


def test_every_key_is_on_the_page_with_its_default() -> None:
    """The table of keys is complete, in the schema's words for defaults, and names no key that is gone."""
    rows = dict(
        re.findall(
            r"^\| `([a-z_.]+)` \| (.*?) ?\|", TEXT.split("## Keys")[1].split("**Data.**")[0], re.MULTILINE
        )
    )
    assert rows == defaults()


def test_the_example_is_good(tmp_path: Path) -> None:
    """The page's pipeline has neither faults nor warnings."""
    (example,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "p.yaml").write_text(example)
    assert load(tmp_path / "p.yaml").warnings == ()
