"""`ddprun catalog` and `ddprun schema`: what a pipeline may say."""

import json
import textwrap
from pathlib import Path
from typing import Any

import click

from ddprun import EXIT_SUCCESS
from ddprun.cli import printing
from ddprun.cli.run import format_option
from ddprun.config.catalog import CATALOG_KINDS, entries_named, entries_of_kind, json_schema
from ddprun_hooks.config.messages import closest_match, format_message

_WIDTH = 100

# How a file names an entry, by kind; others as in `model: mlp`.
_YAML_TEMPLATES = {
    "hook": "hooks: [{}]",
    "tracker": "track: [{}]",
    "stage": "stages: [{}]",
    "mutate": "stages: [{{train: {{steps: …, mutate: {}}}}}]",
    "update": "stages: [{{forward: {{steps: …, update: {}}}}}]",
    "metric": "stages: [{{evaluate: {{metrics: [{}]}}}}]",
}


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in dict.fromkeys(_kinds_and_names()) if name.startswith(incomplete)]


def _kinds_and_names() -> list[str]:
    return [*CATALOG_KINDS, *(name for kind in CATALOG_KINDS.values() for name in kind.names())]


@click.command()
@click.argument("what", metavar="[KIND | NAME]", shell_complete=_complete, required=False)
@format_option("text", "json")
def catalog(what: str | None, form: str) -> int:
    """List everything that a pipeline can choose, with options, types and defaults.

    KIND shows one kind, such as hook; NAME shows one entry in full, such as diloco.
    """
    if what is None or what in CATALOG_KINDS:
        by_kind = {kind: entries_of_kind(kind) for kind in ([what] if what else CATALOG_KINDS)}
        entries = [entry for of_kind in by_kind.values() for entry in of_kind]
        shown = (_format_kind(kind, of_kind) for kind, of_kind in by_kind.items())
    elif entries := entries_named(what):
        shown = (_format_entry(entry) for entry in entries)
    else:
        text = f'"{what}" is neither a kind nor the name of an entry'
        text = format_message(text, suggestion=closest_match(what, _kinds_and_names()))
        raise click.UsageError(f"{text}; kinds: {', '.join(CATALOG_KINDS)}")
    click.echo(json.dumps(entries, indent=1) if form == "json" else "\n\n".join(shown))
    return EXIT_SUCCESS


def _format_kind(kind: str, entries: list[dict[str, Any]]) -> str:
    lines = [kind]
    for entry in entries:
        lines.append(f"  {entry['name']}: {entry['description']}")
        for option in entry["options"]:
            text = f".  {option['description']}" if option["description"] else "."
            lines.append(f"      {option['name']}: {option['type']}; {_default(option)}{text}")
    if dotted := CATALOG_KINDS[kind].dotted_description:
        lines.append(f"  package.module.name: {dotted}; its options are keyword arguments")
    return "\n".join(lines)


def _format_entry(entry: dict[str, Any]) -> str:
    kind, name, options = entry["kind"], entry["name"], entry["options"]
    needed = ", ".join(f"{option['name']}: …" for option in options if option["required"])
    written = f"{name}: {{{needed}}}" if needed or kind == "cluster" else name
    if kind != "cluster":
        written = f"{{{written}}}" if needed else written
        written = _YAML_TEMPLATES.get(kind, f"{kind}: {{}}").format(written)
    source = {"torch": "of torch", "installed": "of an installed package"}.get(entry["source"], "built in")
    lines = [f"{name}: {kind}, {source}", *_wrap_text(entry["description"], 2), f"  Write {written}"]
    for option in options:
        lines += ["", f"  {option['name']}: {option['type']}; {_default(option)}"]
        lines += _wrap_text(option["description"], 6)
    return "\n".join(lines)


def _wrap_text(text: str, indent: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(text, _WIDTH, initial_indent=margin, subsequent_indent=margin)


def _default(option: dict[str, Any]) -> str:
    if option["required"]:
        return "required"
    value = option["default"]
    return f"default {value if isinstance(value, str) else json.dumps(value)}"


@click.command()
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the schema to a file.",
)
def schema(output: Path | None) -> int:
    """Print the JSON Schema of pipeline files, for editors to complete and check as you type."""
    text = json.dumps(json_schema(), indent=1)
    if output is None:
        click.echo(text)
        return EXIT_SUCCESS
    try:
        output.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise printing.write_error(output, error) from None
    return EXIT_SUCCESS
