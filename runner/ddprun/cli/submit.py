"""`ddprun submit`."""

import shutil
import sys
from pathlib import Path

import click


@click.command()
@click.argument("pipeline", metavar="PIPELINE", type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(["slurm"]), required=True, help="Whom to.")
@click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override a value, as in --set slurm.nodes=4; the value is YAML. May be given several times.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be sent, and send nothing.")
@click.option(
    "--follow", is_flag=True, help="Show the job's output until it is over; the exit code is 1 if it fails."
)
@click.option(
    "--program",
    metavar="PATH",
    help="How ddprun is called on the hosts; by default this very one, on a disk that all hosts share.",
)
def submit(
    pipeline: Path, to: str, overrides: tuple[str, ...], dry_run: bool, follow: bool, program: str | None
) -> int:
    """Hand a pipeline to a cluster, as its `slurm` and `launch` say; prints the job's id.

    The cluster's own engine runs it: ddprun is no scheduler.
    """
    from ddprun.cli import printing
    from ddprun.cluster import slurm
    from ddprun.spec import PipelineError, load

    try:
        loaded = load(pipeline, overrides)
    except PipelineError as error:
        click.echo(printing.text(error.faults, printing.colored(sys.stderr)), err=True)
        return 2
    if loaded.warnings:
        click.echo(printing.text(loaded.warnings, printing.colored(sys.stderr)), err=True)
    if secret := next((one for one in overrides if loaded.secrets.redact(one) != one), None):
        key = secret.partition("=")[0]
        raise click.UsageError(
            f"--set {key} holds a secret, which the job's script would show: write ${{env:NAME}}"
        )
    inside = "ddprun" if loaded.pipeline.slurm.image is not None else str(Path(sys.argv[0]).resolve())
    if program is None and not Path(inside).name.startswith("ddprun"):  # as `python -m ddprun`
        inside = shutil.which("ddprun") or "ddprun"
    job = slurm.job_of(loaded, overrides, program or inside, Path("runs").resolve())
    if dry_run:
        click.echo(job.script, nl=False)
        return 0
    try:
        number = slurm.submit(job)
        click.echo(number)
        if not follow:
            return 0
        state = slurm.follow(number, job.output, lambda text: click.echo(text, nl=False, err=True))
    except slurm.SlurmError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"ddprun: job {number}: {state}", err=True)
    return 0 if state == "COMPLETED" else 1
