"""Everything that can be chosen, as plain data: what `ddprun catalog` prints."""

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
    return [entry_from_model(kind, *named) for named in KINDS[kind].models()]


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


def entry_from_model(kind: str, name: str, model: type[BaseModel] | None, source: str = "built-in") -> Entry:
    """What is named so; `model` is None if it may not be imported here."""
    schema = docs.model_schema(model or NoOptions)
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
    description = schema.get("description", "") if model else "Added by an installed package."
    return {"kind": kind, "name": name, "source": source, "description": description, "options": options}
