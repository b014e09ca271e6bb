"""`ddprun check`."""

import json
import sys
from pathlib import Path

import click

from ddprun import EXIT_BAD_INPUT, EXIT_SUCCESS
from ddprun.cli import printing
from ddprun.cli.run import format_option, override_option
from ddprun.config import PipelineError, PipelineFault, load


@click.command()
@click.argument("pipelines", metavar="PIPELINE…", nargs=-1, required=True, type=click.Path(path_type=Path))
@override_option("Override a value, as in `ddprun run`.")
@format_option(
    *("text", "json", "github"),
    text="How errors are printed: as text, as a JSON list, or as GitHub annotations.",
)
@click.option(
    "--resolved", is_flag=True, help="Print the whole pipeline as it will run, with each value's origin."
)
def check(pipelines: tuple[Path, ...], overrides: tuple[str, ...], form: str, resolved: bool) -> int:
    """List every error in pipeline files, without running them or importing the code behind import paths.

    Exit code 0 if every file can run (warnings do not count), 2 if not.
    """
    if resolved and (len(pipelines) > 1 or form != "text"):
        raise click.UsageError("--resolved takes one pipeline and no --format")
    faults: list[PipelineFault] = []
    for path in pipelines:
        try:
            loaded = load(path, overrides)
            found, good = loaded.warnings, True
        except PipelineError as error:
            found, good = error.faults, False
        faults += found
        if form != "text":
            continue
        printing.print_faults(found, sys.stderr if resolved else sys.stdout)
        if good:
            click.echo(loaded.resolved_yaml() if resolved else f"{path}: ok", nl=not resolved)
    if form == "json":
        found_data = [printing.fault_to_json_data(fault) for fault in faults]
        click.echo(json.dumps(found_data, indent=2, ensure_ascii=False))
    elif form == "github":
        for fault in faults:
            click.echo(printing.github_annotation(fault))
    return EXIT_BAD_INPUT if any(fault.severity == "error" for fault in faults) else EXIT_SUCCESS
