"""`ddprun catalog` and `ddprun schema`: what a pipeline may say."""

import json
from pathlib import Path
from typing import Any

import click

from ddprun.cli.run import format_option

_KINDS = (
    *("model", "data", "loss", "optimizer", "schedule", "sync", "hook", "mutate", "update", "metric"),
    *("collate", "sampler", "weight", "tracker", "stage", "cluster"),
)


@click.command()
@click.argument("kind", type=click.Choice(_KINDS), required=False)
@format_option("text", "json")
def catalog(kind: str | None, form: str) -> int:
    """Everything that a pipeline can choose, with options, types and defaults; of one KIND or of all."""
    from ddprun.config import catalog as listed
    from ddprun.config.choices import KINDS

    kinds = [kind] if kind else list(_KINDS)
    if form == "json":
        click.echo(json.dumps([entry for name in kinds for entry in listed.catalog(name)], indent=1))
        return 0
    for index, name in enumerate(kinds):
        if index:
            click.echo()
        click.echo(listed.GROUPS[name])
        for entry in listed.catalog(name):
            click.echo(f"  {entry['name']}: {entry['description']}")
            for option in entry["options"]:
                click.echo(f"      {_option(option)}")
        if name in KINDS and KINDS[name].dotted:
            click.echo(f"  package.module.name: {KINDS[name].dotted}; its options are keyword arguments")
    return 0


def _option(option: dict[str, Any]) -> str:
    if option["required"]:
        default = "required"
    elif option["default"] is None:
        default = "default null"
    else:
        value = option["default"]
        default = f"default {value if isinstance(value, str) else json.dumps(value)}"
    text = f"  {option['description']}" if option["description"] else ""
    return f"{option['name']}: {option['type']}; {default}.{text}"


@click.command()
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Write it to a file.")
def schema(output: Path | None) -> int:
    """Print the JSON Schema of pipeline files, for editors to complete and check as you type."""
    from ddprun.config.json_schema import json_schema

    text = json.dumps(json_schema(), indent=1) + "\n"
    if output is None:
        click.echo(text, nl=False)
        return 0
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.UsageError(
            f"{output} cannot be written: {(error.strerror or str(error)).lower()}"
        ) from None
    return 0
