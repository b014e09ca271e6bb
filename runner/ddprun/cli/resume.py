"""`ddprun resume`."""

import json
from pathlib import Path

import click

from ddprun.cli.run import start, torchrun_flags


@click.command(options_metavar="[OPTIONS]")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Change a value, as in --set stages[0].train.steps=2000; what is in the checkpoint cannot change.",
)
def resume(run: Path, overrides: tuple[str, ...], **flags: str | int | float | bool | None) -> int:
    """Go on with a run from its newest whole checkpoint.

    RUN is the run's folder. A checkpoint that is damaged is named and not used. Another number of ranks goes
    on in the same order of samples.
    """
    try:
        folder = Path(json.loads((run / "run.json").read_text())["pipeline_folder"])
    except (OSError, ValueError, KeyError, TypeError):
        message = "it has no run.json" if run.is_dir() else "there is no such folder"
        click.echo(f"ddprun: {run} is not the folder of a run: {message}", err=True)
        return 2
    return start(run / "pipeline.yaml", overrides, run, flags, folder, resuming="yes")


torchrun_flags(resume)
