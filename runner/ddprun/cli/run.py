"""`ddprun run`."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddprun import COMPARED, LAUNCHED

if TYPE_CHECKING:
    from ddprun.run_files import Resuming

_TORCHRUN: dict[str, tuple[Any, str]] = {
    "nnodes": (str, "Number of hosts, or MIN:MAX."),
    "nproc-per-node": (str, "Ranks per host: a number, auto, gpu or cpu."),
    "rdzv-backend": (str, "Rendezvous backend, such as c10d or static."),
    "rdzv-endpoint": (str, "Rendezvous endpoint, HOST:PORT."),
    "rdzv-id": (str, "Name of this run at the rendezvous."),
    "rdzv-conf": (str, "More for the rendezvous: key=value,key=value."),
    "node-rank": (click.IntRange(min=0), "Rank of this host, for the static rendezvous."),
    "master-addr": (str, "Address of host 0, for the static rendezvous."),
    "master-port": (click.IntRange(0, 65535), "Port on host 0, for the static rendezvous."),
    "local-addr": (str, "Address of this host."),
    "max-restarts": (click.IntRange(min=0), "How often ranks are started again after a failure."),
    "monitor-interval": (click.FloatRange(min=0), "Seconds between two looks at the ranks."),
    "role": (str, "Name of the ranks' role in logs."),
}


def torchrun_flags(command: click.Command) -> click.Command:
    """Add torchrun's own flags, spelled with - or with _."""
    for name, (kind, text) in _TORCHRUN.items():
        command.params.append(click.Option([f"--{name}"], type=kind, help=text))
    command.params.append(
        click.Option(
            ["--standalone"], is_flag=True, help="One host with a rendezvous of its own on a free port."
        )
    )
    return command


def given(flags: Mapping[str, str | int | float | bool | None]) -> dict[str, str | bool]:
    """Torchrun's own flags that were given."""
    return {
        name: value if isinstance(value, bool) else str(value)
        for name, value in flags.items()
        if value is not None and value is not False
    }


@click.command(options_metavar="[OPTIONS]")
@click.argument("pipeline", metavar="PIPELINE", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override a value, as in --set optimizer.sgd.lr=0.2; the value is YAML. May be given several times.",
)
@click.option("--run-dir", type=click.Path(path_type=Path), help="Folder for what the run leaves behind.")
@click.option(
    "--or-resume", is_flag=True, help="Go on with the run if --run-dir holds one, as `ddprun resume` does."
)
def run(
    pipeline: Path,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    or_resume: bool,
    **flags: str | int | float | bool | None,
) -> int:
    """Run a pipeline. Under torchrun or srun, join the run as a worker.

    Flags that are torchrun's too mean what they mean there, and go before what the file says under `launch`.
    """
    if or_resume and run_dir is None:
        raise click.UsageError("--or-resume needs --run-dir, the folder of the run that may be there")
    return start(pipeline, overrides, run_dir, flags, resuming="if begun" if or_resume else "no")


def start(
    pipeline: Path,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    flags: Mapping[str, str | int | float | bool | None],
    folder: Path | None = None,
    *,
    resuming: "Resuming" = "no",
) -> int:
    """Load a pipeline and launch it, or join; gives the exit code.

    Args:
        pipeline: the file.
        overrides: the `--set` options.
        run_dir: where the run's files go.
        flags: torchrun's own.
        folder: of the file from which a run that is resumed was started; None: what the file names is beside
            the file.
        resuming: whether `run_dir` is the folder of a run that is to go on.
    """
    from ddprun.cli import printing
    from ddprun.config import PipelineError, load

    if LAUNCHED in os.environ or COMPARED in os.environ:
        from ddprun.launch.launcher import inherited_overrides

        overrides = (*inherited_overrides(), *overrides)
    try:
        loaded = load(pipeline, overrides, folder)
        from ddprun import launch

        if loaded.warnings and os.environ.get("RANK", "0") == "0" and LAUNCHED not in os.environ:
            click.echo(printing.text(loaded.warnings, printing.colored(sys.stderr)), err=True)

        return launch.start(loaded, given(flags), overrides, run_dir, resuming=resuming)
    except PipelineError as error:
        click.echo(printing.text(error.faults, printing.colored(sys.stderr)), err=True)
        return 2


torchrun_flags(run)
