"""`ddprun schema`."""

import json
from pathlib import Path

import click


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
