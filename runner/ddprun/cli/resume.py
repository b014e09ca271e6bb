"""`ddprun resume`."""

from pathlib import Path

import click

from ddprun.cli.run import start, torchrun_flags
from ddprun.run_files import open_file, read_object

_MAX_BYTES = 1 << 20


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
    """Resume a run from its newest intact checkpoint.

    RUN is the run's folder. A damaged checkpoint is named and not used. With another number of ranks the
    order of samples stays the same.
    """
    try:
        folder = Path(read_object(run, "run.json", _MAX_BYTES)["pipeline_folder"])
        open_file(run, "pipeline.yaml").close()  # refuses a pipe, which would be waited for
    except (OSError, ValueError, KeyError, TypeError) as error:
        click.echo(f"ddprun: {run} is not the folder of a run: {_problem(run, error)}", err=True)
        return 2
    return start(run / "pipeline.yaml", overrides, run, flags, folder, resuming="yes")


def _problem(run: Path, error: Exception) -> str:
    if not run.is_dir():
        return "there is no such folder"
    if isinstance(error, FileNotFoundError):
        return f"it has no {Path(error.filename).name}"
    if isinstance(error, OSError):
        return str(error.strerror)
    return "its run.json is damaged"


torchrun_flags(resume)
