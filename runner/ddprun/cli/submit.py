"""`ddprun submit`."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ddprun.cluster.job import Job
    from ddprun.config import Loaded

_VARIABLES = {"docker": "docker.env", "kubernetes": "the Secret that kubernetes.env_from names"}
"""Where such a job has its environment variables from."""


@click.command()
@click.argument("pipeline", metavar="PIPELINE", type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(["slurm", "docker", "kubernetes"]), required=True, help="Whom to.")
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
    help="For slurm: how ddprun is called on the hosts; by default this one, on a disk that all share.",
)
def submit(
    pipeline: Path, to: str, overrides: tuple[str, ...], dry_run: bool, follow: bool, program: str | None
) -> int:
    """Hand a pipeline to a cluster; prints the job's id.

    What is asked for stands in the file under `launch` and under the engine's own name. The engine runs it:
    ddprun is no scheduler.
    """
    from ddprun.cli import printing
    from ddprun.cluster.job import ClusterError
    from ddprun.config import PipelineError, load

    try:
        loaded = load(pipeline, overrides)
    except PipelineError as error:
        click.echo(printing.text(error.faults, printing.colored(sys.stderr)), err=True)
        return 2
    if loaded.warnings:
        click.echo(printing.text(loaded.warnings, printing.colored(sys.stderr)), err=True)
    if secret := next((one for one in overrides if loaded.secrets.redact(one) != one), None):
        key = secret.partition("=")[0]
        raise click.UsageError(f"--set {key} holds a secret, which the job would show: write ${{env:NAME}}")
    if to != "slurm" and _holds_secret(loaded):
        text = f"{pipeline} holds a secret, which the job would show: write ${{env:NAME}}"
        raise click.UsageError(f"{text}, and have it set by {_VARIABLES[to]}")
    if program is not None and to != "slurm":
        raise click.UsageError(f"--program says nothing to {to}, where the image has ddprun")
    job = _job(loaded, to, overrides, program)
    if loaded.secrets.redact(job.text) != job.text:
        raise click.UsageError(f"{pipeline} holds a secret under {to}, which the job would show")
    if told := _not_passed_on(loaded, to):
        click.echo(f"ddprun: warning: {told}", err=True)
    if dry_run:
        click.echo(job.text, nl=False)
        return 0
    try:
        number = job.send()
        click.echo(number)
        return _follow(job, number) if follow else 0
    except ClusterError as error:
        raise click.ClickException(loaded.secrets.redact(str(error))) from None


def _follow(job: "Job", number: str) -> int:
    """Show a job's output until it is over; gives the exit code."""
    try:
        outcome = job.follow(number, lambda text: click.echo(text, nl=False, err=True))
    except KeyboardInterrupt:
        click.echo(f"\nddprun: job {number} goes on, and is no longer followed", err=True)
        return 130
    click.echo(f"ddprun: job {number}: {outcome.state}", err=True)
    return 0 if outcome.good else 1


def _holds_secret(loaded: "Loaded") -> bool:
    """Whether the file itself does, which such a job takes along."""
    from ddprun.config.secrets import REDACTED

    text = loaded.path.read_text("utf-8")
    return REDACTED in loaded.resolved() or loaded.secrets.redact(text) != text


def _not_passed_on(loaded: "Loaded", to: str) -> str | None:
    """What to tell about variables that the pipeline takes and the job may not have."""
    asked = loaded.pipeline
    if to == "slurm" or (to == "kubernetes" and asked.kubernetes.env_from is not None):
        return None
    missing = [name for name in loaded.variables() if to == "kubernetes" or name not in asked.docker.env]
    if not missing:
        return None
    return f"{', '.join(missing)}: only what the image sets is in the job; have it set by {_VARIABLES[to]}"


def _job(loaded: "Loaded", to: str, overrides: tuple[str, ...], program: str | None) -> "Job":
    """What is sent to the engine."""
    if to == "docker":
        from ddprun.cluster.docker import DockerJob

        return DockerJob(loaded, overrides)
    if to == "kubernetes":
        from ddprun.cluster.kubernetes import KubernetesJob

        return KubernetesJob(loaded, overrides)
    from ddprun.cluster import slurm

    inside = "ddprun" if loaded.pipeline.slurm.image is not None else str(Path(sys.argv[0]).resolve())
    if program is None and not Path(inside).name.startswith("ddprun"):  # as `python -m ddprun`
        inside = shutil.which("ddprun") or "ddprun"
    return slurm.job_of(loaded, overrides, program or inside, Path("runs").resolve())
