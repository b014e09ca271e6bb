"""`ddprun doctor`."""

import os
import sys

import click

from ddprun import screen
from ddprun.cli.run import torchrun_flags


@click.command(options_metavar="[OPTIONS]")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="How findings are printed: for a reader, or as a JSON object.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1, max=3600),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the other hosts, and for a collective.",
)
def doctor(form: str, timeout_s: float, **flags: str | int | float | bool | None) -> int:
    """Tell whether this host is fit to run, or all hosts of a launch together.

    With torchrun's own flags, on every host, or under srun or torchrun, hosts meet as those of a run do, and
    the first one prints what was found and what to do. Exit code 0 if there is no problem, 1 if there is.
    """
    from ddprun.cli import diagnosed, printing
    from ddprun.cli.run import given
    from ddprun.doctor.run import visit
    from ddprun.launch.launcher import LauncherError

    try:
        seen = visit(given(flags), timeout_s)
    except LauncherError as error:
        click.echo(f"ddprun doctor: {error}", err=True)
        return 2
    if seen.report is not None:
        if form == "json":
            click.echo(diagnosed.as_json(seen.report))
        else:
            click.echo(diagnosed.text(seen.report, printing.colored(sys.stdout)))
    if seen.fault:
        click.echo(f"ddprun doctor: {seen.fault}", err=True)
    if seen.stuck:
        screen.flush()
        os._exit(seen.code)  # threads may hang in collectives whose peers are gone
    return seen.code


torchrun_flags(doctor)
