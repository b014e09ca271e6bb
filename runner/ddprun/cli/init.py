"""`ddprun init`."""

from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default="pipeline.yaml")
def init(file: Path) -> int:
    """Write a pipeline to start from (pipeline.yaml, or FILE), which runs as it is."""
    from ddprun.config import starter

    try:
        starter.write(file)
    except FileExistsError:
        raise click.UsageError(f"{file} exists already; name another file, or remove it") from None
    except OSError as error:
        raise click.UsageError(
            f"{file} cannot be written: {(error.strerror or str(error)).lower()}"
        ) from None
    click.echo(f"wrote {file}; run it with `ddprun {file}`")
    return 0
