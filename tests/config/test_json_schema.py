"""The JSON Schema that editors use says what `check` says."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from ddprun.config import torch_signatures
from ddprun.config.catalog import CATALOG_KINDS, entries_of_kind, json_schema
from ddprun.config.choices import CHOICE_KINDS, parse_choice
from ddprun.config.sections import parse_buffers
from ddprun.config.stages import OVERRIDABLE_KEYS, STAGES, parse_stage
from ddprun.config.yaml_reader import read_pipeline_file
from ddprun.plugins import CLUSTERS

PIPELINES = Path(__file__).parents[2] / "pipelines"
SCHEMA = json_schema()
SAMPLES: dict[str, Any] = {
    "files": "{stdlib}/*.py",
    "memory": "1",
    "tmp": "1",
    "schedule": "cosineannealinglr",
    "optimizer": "sgd",
    "alpha": 0.5,
    "turns": [{"name": "one", "match": "a.*"}, {"name": "other", "match": ["b.*"], "every": 2}],
    "mutate": {"noise": {"std": 0.1}},
    "update": "evolution_strategies",
}


def accepts(definition: str, value: Any) -> bool:
    if definition == "cluster":
        ((name, value),) = value.items()
        definition = SCHEMA["properties"][name]["$ref"].removeprefix("#/$defs/")
    schema = {"$ref": f"#/$defs/{definition}", "$defs": SCHEMA["$defs"]}
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def check_accepts(kind: str, value: Any) -> bool:
    try:
        if kind == "cluster":
            ((name, options),) = value.items()
            CLUSTERS.load(name).Options.model_validate(options)
        else:
            parse_stage(value) if kind == "stage" else parse_choice(kind, value)
    except (ValidationError, ValueError):
        return False
    return True


def test_each_default_is_allowed() -> None:
    """Editors write it where a key is completed."""
    for path, schema in sections(SCHEMA):
        if "default" in schema and path[-1:] != ("properties",):
            alone = {key: value for key, value in schema.items() if key != "default"}
            jsonschema.Draft202012Validator({**alone, "$defs": SCHEMA["$defs"]}).validate(schema["default"])


def sections(schema: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """All mappings in a schema, with the keys that lead there."""
    if isinstance(schema, dict):
        yield path, schema
    for key, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if isinstance(value, dict | list):
            yield from sections(value, (*path, str(key)))


def test_it_is_a_schema() -> None:
    """It is valid under draft 2020-12's own schema, and every reference in it leads somewhere."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for reference in references(SCHEMA):
        assert reference.removeprefix("#/$defs/") in SCHEMA["$defs"]
    assert '"definition":' not in json.dumps(SCHEMA)


def references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for item in schema.values():
            yield from references(item)
    elif isinstance(schema, list):
        for item in schema:
            yield from references(item)


@pytest.mark.parametrize("path", sorted(PIPELINES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_pipelines_are_valid(path: Path) -> None:
    """What `check` takes the schema takes too."""
    root, _ = read_pipeline_file(path)
    assert root is not None
    jsonschema.validate(root.data(), SCHEMA, cls=jsonschema.Draft202012Validator)


def test_the_shipped_schema_is_up_to_date() -> None:
    """`pipelines/pipeline.schema.json` is what `ddprun schema` prints; write it anew with --output if not."""
    shipped = json.loads((PIPELINES / "pipeline.schema.json").read_text(encoding="utf-8"))
    if shipped["$comment"] != SCHEMA["$comment"]:
        pytest.skip(f"another torch is installed than the shipped schema is for: {shipped['$comment']}")
    assert shipped == json.loads(json.dumps(SCHEMA))


def options() -> Iterator[tuple[str, str, str]]:
    for kind in CATALOG_KINDS:
        for entry in entries_of_kind(kind):
            for option in entry["options"]:
                yield kind, entry["name"], option["name"]


def minimal(entry: dict[str, Any]) -> dict[str, Any]:
    """What must be given at least."""
    needed = {option["name"]: sample(option) for option in entry["options"] if option["required"]}
    return {"steps": 1} if entry["kind"] == "stage" and entry["name"] in ("train", "forward") else needed


def sample(option: dict[str, Any]) -> Any:
    """A value that an option must take: its default if that is a value, else one of its type."""
    default, words = option["default"], option["type"]
    expression = isinstance(default, str) and ("number" in words or "list" in words)
    if option["name"] in SAMPLES:
        return SAMPLES[option["name"]]
    if default is not None and not expression:
        return default
    if match := re.match(r"a list(?: of (\d+))?", words):
        return [1] * int(match.group(1) or 2)
    return 3 if "number" in words else "x" if words.startswith("a string") else None


@pytest.mark.parametrize(("kind", "name", "option"), list(options()))
def test_every_option_is_taken_by_both(kind: str, name: str, option: str) -> None:
    """Each option of the catalog is one for `check` and for the schema, and what is none there is refused."""
    (entry,) = (entry for entry in entries_of_kind(kind) if entry["name"] == name)
    (found,) = (item for item in entry["options"] if item["name"] == option)
    given = minimal(entry) | {option: sample(found)}
    if option == "epochs":
        given.pop("steps", None)
    if option == "outer_eps":  # of Adam alone
        given |= {"outer": "adam", "outer_lr": 0.01}
    if option == "ttl_s":  # of a Job alone
        given["kind"] = "job"
    assert check_accepts(kind, {name: given}), given
    assert accepts(kind, {name: given}), given
    assert not check_accepts(kind, {name: minimal(entry) | {"no_such_option": 1}})
    assert not accepts(kind, {name: minimal(entry) | {"no_such_option": 1}})


@pytest.mark.parametrize("kind", [*CHOICE_KINDS, "stage"])
def test_bare_names_are_taken_by_both_alike(kind: str) -> None:
    """A name may stand alone for both, or, where an option is required, for neither."""
    names = [entry["name"] for entry in entries_of_kind(kind)]
    assert bool(names) == (kind not in ("transform", "collate", "sampler"))  # of which nothing is built in
    for name in [
        *names,
        *(name.lower() for name in names),
        "nonsense",
        "a.b",
        "a..b",
        3,
        None,
        [],
        {},
        {"a": 1, "b": 2},
    ]:
        assert check_accepts(kind, name) == accepts(kind, name), name


@pytest.mark.parametrize(
    ("value", "good"),
    [
        ("auto", True),
        ("never", True),
        ({}, True),
        ({"when": "before_evaluate"}, True),
        ({"when": "auto", "reduce": "mean"}, True),
        ({"reduce": "mean"}, True),
        ({"every": 3}, True),
        ({"every": 3, "reduce": "mean"}, True),
        ("every", False),
        ("sometimes", False),
        ({"when": "sometimes"}, False),
        (None, False),
        (["auto"], False),
        ({"every": 0}, False),
        ({"every": 1.5}, False),
        ({"every": 3, "reduce": "sum"}, False),
        ({"auto": {"reduce": "mean"}}, False),
    ],
)
def test_buffers_are_taken_by_both_alike(value: Any, good: bool) -> None:
    """`buffers` has two forms; what is neither is neither for `check` nor for the schema."""
    try:
        parse_buffers(value)
    except (ValidationError, ValueError):
        taken = False
    else:
        taken = True
    assert taken == good
    schema = {**SCHEMA["properties"]["buffers"], "$defs": SCHEMA["$defs"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(value) == good


def test_a_stage_has_no_defaults_of_its_own() -> None:
    """What a stage does not name holds from above, so an editor must not show a default there."""
    mapping = SCHEMA["$defs"]["stage"]["anyOf"][-1]["properties"]
    for stage in ("train", "forward"):
        assert not any("default" in mapping[stage]["properties"].get(key, {}) for key in OVERRIDABLE_KEYS)


def test_torch_names_are_known_in_their_usual_spellings() -> None:
    """Torch's own, lower case, and for a loss the function's."""
    for spelled in ("CrossEntropyLoss", "crossentropyloss", "cross_entropy", "binary_cross_entropy"):
        assert accepts("loss", spelled)
    for name in torch_signatures.offered_class_names("optimizer"):
        assert accepts("optimizer", name)
        assert accepts("optimizer", name.lower())


@pytest.mark.parametrize("stage", STAGES)
def test_stages_are_described(stage: str) -> None:
    """Editors show what each stage and each of its keys does."""
    mapping = SCHEMA["$defs"]["stage"]["anyOf"][-1]["properties"][stage]
    described = mapping.get("anyOf", [mapping])[0]
    assert described["description"]
    assert all(item.get("description") for item in described["properties"].values())


def test_every_key_is_described() -> None:
    """No key of the file is without a word about it."""
    for name in ("Loader", "Ddp", "Launch", "Timings", "Audit"):
        assert all(item["description"] for item in SCHEMA["$defs"][name]["properties"].values())
    assert all(item["description"] for item in SCHEMA["properties"].values())
