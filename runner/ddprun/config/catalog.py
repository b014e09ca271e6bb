"""Everything that can be chosen, as plain data: what `ddprun catalog` prints."""

import ast
from typing import Any

from pydantic import BaseModel

from ddprun.config import docs, signatures
from ddprun.config.choices import CHOICE_KINDS, ChoiceKind
from ddprun.config.stages import STAGES
from ddprun.options import NoOptions
from ddprun.plugins import CLUSTERS

Entry = dict[str, Any]

KINDS = {
    **CHOICE_KINDS,
    "stage": ChoiceKind("stage", options=STAGES),
    "cluster": ChoiceKind("cluster", plugins=CLUSTERS),
}  # what is chosen by a name, whatever a file writes around it


def entries_of_kind(kind: str) -> list[Entry]:
    """Entries of a kind: kind, name, source, description and options, each with name, type, required, default
    and description. Of what would have to be imported, a hook or what is not trusted, there is the name.
    """
    found = KINDS[kind]
    entries = [entry_from_model(kind, name, model) for name, model in found.built_in_options.items()]
    if found.torch_kind:
        names = signatures.offered_class_names(found.torch_kind)
        entries += [_of_torch(kind, found.torch_kind, name) for name in names]
    installed = found.plugins.options_of_installed() if found.plugins else {}
    return entries + [_of_installed(kind, *added) for added in installed.items()]


def entries_named(name: str) -> list[Entry]:
    """The entries of every kind that a file may call so; torch's names in any spelling."""
    found = []
    for kind, known in KINDS.items():
        wanted = {name}
        if known.torch_kind and (torch_name := signatures.find_class(known.torch_kind, name)) is not None:
            wanted.add(torch_name)
        if not wanted.isdisjoint(known.names()):
            found += [entry for entry in entries_of_kind(kind) if entry["name"] in wanted]
    return found


def entry_from_model(kind: str, name: str, model: type[BaseModel]) -> Entry:
    schema = docs.model_schema(model)
    options = [
        {
            "name": key,
            "type": docs.type_words(item, schema.get("$defs", {})),
            "required": key in schema.get("required", ()),
            "default": item.get("default"),
            "description": item.get("description", ""),
        }
        for key, item in schema.get("properties", {}).items()
    ]
    description = schema.get("description", "")
    return {"kind": kind, "name": name, "source": "built-in", "description": description, "options": options}


def _of_installed(kind: str, name: str, model: type[BaseModel] | None) -> Entry:
    """What an installed package adds; `model` is None if it may not be imported here."""
    entry = entry_from_model(kind, name, model or NoOptions) | {"source": "installed"}
    return entry if model else entry | {"description": "Added by an installed package."}


def _of_torch(kind: str, torch_kind: signatures.TorchKind, name: str) -> Entry:
    length = signatures.length_option_to_fill(name) if torch_kind == "schedule" else None
    entry = entry_from_model(kind, name, signatures.torch_options_model(torch_kind, name))
    for option, item in zip(entry["options"], signatures.torch_options(torch_kind, name), strict=True):
        option["default"] = "the stage's steps" if item.name == length else _default_from_source(item.default)
    summary = f"{signatures.docstring_summary(torch_kind, name)}."
    return entry | {"source": "torch", "description": summary}


def _default_from_source(source: str) -> Any:
    """A default of torch's source as a value; an expression such as `1.0 / 3` as it is written."""
    if not source:
        return None
    try:
        value = ast.literal_eval(source)
    except ValueError:
        return source
    return list(value) if isinstance(value, tuple) else value
