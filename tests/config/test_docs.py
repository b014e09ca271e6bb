"""docs/pipeline.md says what the schema says; docs/dev/reliability-tests.md names tests that there are."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

from ddprun.config import load
from ddprun.config.scalars import format_scalar
from ddprun.config.sections import Compile
from ddprun.config.stages import OVERRIDABLE_KEYS, STAGES
from ddprun.config.yaml_writer import to_plain_data
from ddprun.plugins import SYNC_POLICIES, TRACKERS
from ddprun.sync.plan import BufferSettings

TEXT = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")


def shown(value: object) -> str:
    value = to_plain_data(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return (
        "[]"
        if value == []
        else format_scalar(value)
        if isinstance(value, (str, int, float, type(None)))
        else str(value)
    )


def test_the_key_reference_is_that_of_the_schema() -> None:
    """docs/reference.md is as scripts/reference writes it; run that after a change of the schema."""
    script = Path(__file__).parents[2] / "scripts" / "reference"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run scripts/reference\n{done.stderr}"


def test_how_to_compile_is_on_the_page() -> None:
    """Each option with its default."""
    rows = {key.strip("`"): default for key, default, _ in cells("### Compiling")[1:]}
    assert rows == {name: shown(field.default) for name, field in Compile.model_fields.items()}


def cells(section: str) -> list[list[str]]:
    """Rows of the first table after a heading, each as its cells."""
    text = TEXT.split(section)[1].split("\n#")[0]
    rows = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return [row.split(" | ") for row in rows]


def test_every_policy_is_on_the_page_with_its_options() -> None:
    """The table of policies is complete; each is shown with its options and their defaults."""
    wanted = []
    for name, model in SYNC_POLICIES.load_available().items():
        keys = [
            key if field.is_required() else f"{key}: {shown(field.default)}"
            for key, field in model.model_fields.items()
        ]
        wanted.append(f"`{name}: {{{', '.join(keys)}}}`" if keys else f"`{name}`")
    head, *shown_policies = [row[0] for row in cells("## When ranks synchronise")]
    assert head == "policy"
    assert sorted(shown_policies) == sorted(wanted)


def test_every_time_for_buffers_is_on_the_page() -> None:
    """The table of times is complete."""
    found = {row[0].strip("`") for row in cells("### Buffers")[1:]}
    times = get_args(BufferSettings.model_fields["when"].annotation)
    assert found == {*times, "{every: N}"} - {"every"}


def test_every_stage_is_on_the_page_with_its_keys() -> None:
    """The table of stages is complete, and names every key of every stage."""
    rows = {row[0].strip("`"): row[1] for row in cells("**Stages.**")[1:]}
    assert rows.keys() == STAGES.keys()
    for name, stage in STAGES.items():
        inherited = OVERRIDABLE_KEYS if name == "forward" else ()  # "the same keys"
        for key in stage.model_fields:
            assert key in inherited or f"`{key}`" in rows[name], (name, key)


def test_the_examples_are_good(tmp_path: Path) -> None:
    """The page's pipelines have neither faults nor warnings; a part of one goes with what is required."""
    examples = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert len(examples) == 10
    for example in examples:
        needed = {"model": "mylab.nets.Net", "data": "digits", "optimizer": "sgd"}
        given = re.findall(r"^(\w+):", example, re.MULTILINE)
        base = "".join(f"{key}: {value}\n" for key, value in needed.items() if key not in given)
        (tmp_path / "p.yaml").write_text(base + example)
        assert load(tmp_path / "p.yaml").warnings == ()


def test_every_tracker_is_on_its_page_with_its_options() -> None:
    """The table of trackers is complete, and names every option of each."""
    text = (Path(__file__).parents[2] / "docs" / "records.md").read_text(encoding="utf-8")
    wanted = {
        f"`{name}: {{{', '.join(TRACKERS.load(name).Options.model_fields)}}}`"
        for name in TRACKERS.built_in_names()
    }
    assert {row.split(" | ")[0] for row in re.findall(r"^\| (`\w+: \{.*?) \|$", text, re.MULTILINE)} == wanted


def test_every_test_that_reliability_names_is_there() -> None:
    """Each name in the table of promises is a test file, or a test in it."""
    tests = Path(__file__).parents[1]
    page = (tests.parent / "docs" / "dev" / "reliability-tests.md").read_text(encoding="utf-8")
    rows = page.split("## Which test checks which promise")[1].splitlines()
    file, found = tests, 0
    for path, test in re.findall(r"`([\w/]*(?:\.py)?)(?:::(\w+))?`", "\n".join(rows)):
        if not (path.endswith(".py") or test):
            continue
        file, found = (tests / path if path else file), found + 1
        if test:
            assert f"\ndef {test}(" in file.read_text(encoding="utf-8")
        else:
            assert file.is_file()
    assert found > 30
