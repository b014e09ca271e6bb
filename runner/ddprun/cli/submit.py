"""`ddprun submit`."""

from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from ddprun import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_SUCCESS
from ddprun.cli import printing
from ddprun.cli.run import override_option
from ddprun.cluster import Cluster, ClusterError, Submission
from ddprun.cluster.modules import used_local_modules
from ddprun.config import LoadedPipeline, load
from ddprun.config.secrets import REDACTED
from ddprun.plugins import CLUSTERS
from ddprun.standard_streams import say
from ddprun.units import format_bytes
from ddprun_hooks.errors import ImportPathError


class _SubmitCommand(click.Command):
    """Offers every cluster backend, and the flags that each of them takes."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        pipeline, *own = super().get_params(ctx)
        to = click.Option(
            ["--to"], type=click.Choice(CLUSTERS.names()), required=True, help="Where to send the pipeline."
        )
        flags = [
            click.Option([f"--{flag}"], metavar=metavar, help=f"For {name}: {text}")
            for name, cluster in CLUSTERS.load_available().items()
            for flag, (metavar, text) in cluster.flags.items()
        ]
        return [pipeline, to, *own[:-1], *flags, own[-1]]  # --help is the last one


@click.command(cls=_SubmitCommand)
@click.argument("pipeline", metavar="PIPELINE", type=click.Path(path_type=Path))
@override_option(
    "Override a value, as in --set slurm.nodes=4; the value is YAML. May be given several times."
)
@click.option(
    "--with-modules",
    is_flag=True,
    help="Also send the modules beside the pipeline file that the pipeline names.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be sent, and send nothing.")
@click.option(
    "--follow", is_flag=True, help="Show the job's output until it is over; the exit code is 1 if it fails."
)
def submit(
    pipeline: Path,
    to: str,
    overrides: tuple[str, ...],
    with_modules: bool,
    dry_run: bool,
    follow: bool,
    **flags: str | None,
) -> int:
    """Hand a pipeline to a cluster, and print the job's id.

    The file says which resources to request, under `launch` and under the cluster's own name. The cluster
    schedules and runs the job: ddprun is not a scheduler.
    """
    loaded = load(pipeline, overrides)
    try:
        cluster: type[Cluster] = CLUSTERS.load(to)
    except ImportPathError as error:
        raise click.UsageError(str(error)) from None
    printing.print_faults(loaded.warnings)
    if secret := next((text for text in overrides if loaded.secrets.redact(text) != text), None):
        key = secret.partition("=")[0]
        raise click.UsageError(f"--set {key} holds a secret, which the job would show: write ${{env:NAME}}")
    text = loaded.path.read_text("utf-8")
    holds_secret = REDACTED in loaded.resolved_yaml() or loaded.secrets.redact(text) != text
    if cluster.job_contains_pipeline and holds_secret:
        text = f"{pipeline} holds a secret, which the job would show: write ${{env:NAME}}"
        text += f", and have it set by {cluster.variables_source}" if cluster.variables_source else ""
        raise click.UsageError(text)
    given = {name: value for name, value in flags.items() if value is not None}
    if foreign := sorted(given.keys() - cluster.flags.keys()):
        raise click.UsageError(f"--{foreign[0]} is not a flag for --to {to}")
    modules = _collect_modules(loaded, to, cluster, with_modules=with_modules)
    job = cluster(_backend_options(loaded, to, cluster), Submission(loaded, overrides, given, modules))
    if loaded.secrets.redact(job.text) != job.text:
        raise click.UsageError(f"{pipeline} holds a secret under {to}, which the job would show")
    if missing := job.unset_in_job(loaded.referenced_variables()):
        them = "it" if len(missing) == 1 else "them"
        way_out = f"; {cluster.variables_source} passes {them} on" if cluster.variables_source else ""
        names = ", ".join(missing)
        say(f"warning: {names} will not be set in the job unless the image sets {them}{way_out}")
    for text in job.warnings:
        say(f"warning: {text}")
    if dry_run:
        click.echo(job.text, nl=False)
        return EXIT_SUCCESS
    try:
        job_id = job.send()
        click.echo(job_id)
        return _follow_job(job, job_id) if follow else 0
    except ClusterError as error:
        raise click.ClickException(loaded.secrets.redact(str(error))) from None


def _collect_modules(
    loaded: LoadedPipeline, to: str, cluster: type[Cluster], *, with_modules: bool
) -> dict[str, bytes]:
    """The module files beside the pipeline's that the job takes along, by path; warns of others needed."""
    if with_modules and not cluster.max_modules_bytes:
        why = "cannot send modules"
        if not cluster.job_contains_pipeline:
            why = f"needs none sent: its hosts read {loaded.folder} themselves"
        raise click.UsageError(f"--with-modules: --to {to} {why}")
    beside = used_local_modules(loaded) if cluster.job_contains_pipeline else {}
    if not beside:
        return {}
    names = ", ".join(beside)
    if not with_modules:
        way_out = "the image needs them"
        way_out += ", or --with-modules sends them" if cluster.max_modules_bytes else ""
        verb = "is" if len(beside) == 1 else "are"
        say(f"warning: only {loaded.folder} has {names}, which {verb} not sent with the job: {way_out}")
        return {}
    found = {path: file.read_bytes() for files in beside.values() for path, file in files.items()}
    held = sum(map(len, found.values()))
    if held > cluster.max_modules_bytes:
        limit = format_bytes(cluster.max_modules_bytes)
        text = f"{names} hold {format_bytes(held)}, and --to {to} can send at most {limit}"
        raise click.UsageError(f"--with-modules: {text}: put them into the image")
    for path, data in found.items():
        text = data.decode("utf-8", errors="replace")
        if loaded.secrets.redact(text) != text:
            raise click.UsageError(f"--with-modules: {path} holds a secret, which the job would show")
    say(f"also sending {', '.join(found)} ({format_bytes(held)})")
    return found


def _follow_job(job: Cluster, job_id: str) -> int:
    try:
        outcome = job.follow(job_id, lambda text: click.echo(text, nl=False, err=True))
    except KeyboardInterrupt:
        click.echo(f"\nddprun: job {job_id} is still running, and is no longer followed", err=True)
        return EXIT_INTERRUPTED
    say(f"job {job_id}: {outcome.state}")
    return EXIT_SUCCESS if outcome.succeeded else EXIT_FAILURE


def _backend_options(loaded: LoadedPipeline, to: str, cluster: type[Cluster]) -> Any:
    """What the pipeline says under the backend's key; the defaults if it has no such key."""
    try:
        return getattr(loaded.pipeline, to, None) or cluster.Options()
    except ValidationError as error:
        needed = ", ".join(str(item["loc"][0]) for item in error.errors(include_url=False))
        raise click.UsageError(f"{loaded.path} needs the key {to}, with {needed}") from None
