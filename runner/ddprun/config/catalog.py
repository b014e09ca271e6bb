"""Everything that can be chosen, as plain data: what `ddprun catalog` prints."""

import ast
from typing import Any

from pydantic import BaseModel

from ddprun.config import docs, signatures
from ddprun.config.choices import KINDS
from ddprun.config.schema import STAGES
from ddprun.options import NoOptions
from ddprun.plugins import CLUSTERS

Entry = dict[str, Any]

GROUPS = {
    **{name: f"{name}s" for name in KINDS},
    "data": "data",
    "sync": "sync",
    "loss": "losses",
    "mutate": "mutations",
    "update": "updates",
    "collate": "collate functions",
    "stage": "stages",
    "cluster": "clusters",
}
"""Kinds that can be asked for, and their headings."""


def catalog(kind: str) -> list[Entry]:
    """Entries of a kind: kind, name, source, description and options, each with name, type, required, default
    and description.

    A hook that an installed package adds has its name only: more would mean importing it, and with it torch.
    So has what `DDPRUN_TRUSTED` does not allow.
    """
    if kind == "stage":
        return [_of_model("stage", name, model) for name, model in STAGES.items()]
    if kind == "cluster":
        entries = [_of_model(kind, name, CLUSTERS.options(name)) for name in CLUSTERS.built_in()]
        return entries + [_of_installed(kind, *added) for added in CLUSTERS.options_of_installed().items()]
    found = KINDS[kind]
    entries = [_of_model(kind, name, model) for name, model in found.built_in.items()]
    if found.torch:
        entries += [_of_torch(kind, found.torch, name) for name in signatures.names(found.torch)]
    installed = found.plugins.options_of_installed() if found.plugins else {}
    return entries + [_of_installed(kind, *added) for added in installed.items()]


def _of_model(kind: str, name: str, model: type[BaseModel]) -> Entry:
    schema = model.model_json_schema()
    texts = docs.fields(model)
    options = [
        {
            "name": key,
            "type": docs.type_words(item),
            "required": key in schema.get("required", ()),
            "default": item.get("default"),
            "description": texts.get(key, ""),
        }
        for key, item in schema.get("properties", {}).items()
    ]
    description = docs.summary(model)
    return {"kind": kind, "name": name, "source": "built-in", "description": description, "options": options}


def _of_installed(kind: str, name: str, model: type[BaseModel] | None) -> Entry:
    """What an installed package adds; `model` is None if it may not be imported here."""
    entry = _of_model(kind, name, model or NoOptions) | {"source": "installed"}
    return entry if model else entry | {"description": "Added by an installed package."}


def _of_torch(kind: str, torch: signatures.TorchKind, name: str) -> Entry:
    found = signatures.signature(torch, name)
    shown = signatures.functional_name(name) if torch == "loss" else name
    length = signatures.length_option(name) if torch == "schedule" else None
    entry = _of_model(kind, shown, signatures.options_model(torch, name))
    for option, item in zip(entry["options"], found.parameters, strict=True):
        option["default"] = "the stage's steps" if item.name == length else _plain_default(item.default)
    return entry | {"source": "torch", "description": f"{found.summary}."}


def _plain_default(source: str) -> Any:
    """A default of torch's source as a value; an expression such as `1.0 / 3` as it is written."""
    if not source:
        return None
    try:
        value = ast.literal_eval(source)
    except ValueError:
        return source
    return list(value) if isinstance(value, tuple) else value
