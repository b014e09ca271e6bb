"""`ddprun run` and `ddprun resume`, and the options that several commands take."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ddprun import COMPARE_TURNS_VARIABLE, LAUNCHED_BY_DDPRUN_VARIABLE, InputError
from ddprun.cli import printing
from ddprun.config import load
from ddprun.config.schema import pipeline_with_cluster_keys
from ddprun.config.validation_errors import section_model_of
from ddprun.plugins import CLUSTERS
from ddprun.run_files import ResumeMode, open_file, read_pipeline_folder

FlagValue = str | int | float | bool | None


class FiniteRange(click.FloatRange):
    """Numbers in a range. Click takes `nan` for one of any range, and `inf` for one without a maximum."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not math.isfinite(number := super().convert(value, param, ctx)):
            self.fail(f"{number} is not a finite number", param, ctx)
        return number


TORCHRUN_FLAGS: dict[str, tuple[Any, str]] = {
    "nnodes": (str, "Number of hosts, or MIN:MAX."),
    "nproc-per-node": (str, "Ranks per host: a number, auto, gpu or cpu."),
    "rdzv-backend": (str, "Rendezvous backend, such as c10d or static."),
    "rdzv-endpoint": (str, "Rendezvous endpoint, HOST:PORT."),
    "rdzv-id": (str, "Name of this run at the rendezvous."),
    "rdzv-conf": (str, "Additional rendezvous configuration: key=value,key=value."),
    "node-rank": (click.IntRange(min=0), "Rank of this host, for the static rendezvous."),
    "master-addr": (str, "Address of host 0, for the static rendezvous."),
    "master-port": (click.IntRange(0, 65535), "Port on host 0, for the static rendezvous."),
    "local-addr": (str, "Address of this host."),
    "max-restarts": (click.IntRange(min=0), "How many times ranks are restarted after a failure."),
    "monitor-interval": (FiniteRange(0, 3600, min_open=True), "Seconds between two checks of the ranks."),
    "role": (str, "Name of the ranks' role in logs."),
    "standalone": (bool, "One host with a rendezvous of its own on a free port."),
}
_RENDEZVOUS_FLAGS = ("rdzv-endpoint", "rdzv-id", "rdzv-conf", "local-addr")


def add_torchrun_flags(command: click.Command, names: Iterable[str] = TORCHRUN_FLAGS) -> click.Command:
    """Add torchrun's own flags, spelled with - or with _."""
    for name in names:
        kind, text = TORCHRUN_FLAGS[name]
        is_flag = kind is bool or None  # None: it takes a value
        command.params.append(click.Option([f"--{name}"], type=kind, is_flag=is_flag, help=text))
    return command


def add_rendezvous_flags(command: click.Command) -> click.Command:
    """Add those of torchrun's flags by which several hosts find each other for a comparison."""
    return add_torchrun_flags(command, _RENDEZVOUS_FLAGS)


def rendezvous_flags(flags: Mapping[str, FlagValue], hosts: int) -> dict[str, str] | None:
    """Torchrun's flags by which so many hosts meet; None: no endpoint was given. Raises BadParameter."""
    from ddprun.host.network import host_and_port

    if (endpoint := flags["rdzv_endpoint"]) is None:
        return None
    if hosts == 1:
        raise click.BadParameter("there is one host: set more with --nnodes", param_hint="--rdzv-endpoint")
    with as_bad_parameter("--rdzv-endpoint"):
        host_and_port(str(endpoint))
    given = {name: str(value) for name, value in flags.items() if value is not None}
    return {"nnodes": str(hosts), **given}


def given_flags(flags: Mapping[str, FlagValue]) -> dict[str, str | bool]:
    return {
        name: value if isinstance(value, bool) else str(value)
        for name, value in flags.items()
        if value is not None and value is not False
    }


@contextmanager
def as_bad_parameter(hint: str) -> Iterator[None]:
    """Inside, a ValueError is a fault of what the options named in `hint` say."""
    try:
        yield
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=hint) from None


# Click makes the script that a shell reads (`_DDPRUN_COMPLETE=bash_source ddprun`), which asks ddprun itself.
# https://click.palletsprojects.com/en/stable/shell-completion/
def _complete_setting(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Keys of a pipeline that begin like `incomplete`, with what follows a key."""
    keys = []
    for name, field in pipeline_with_cluster_keys(CLUSTERS.names()).model_fields.items():
        section = section_model_of(field)
        keys += [name] if section is None else [f"{name}.{key}" for key in section.model_fields]
    return [CompletionItem(f"{key}=") for key in sorted(keys) if key.startswith(incomplete)]


def override_option(text: str) -> Callable[[Any], Any]:
    """`--set KEY=VALUE`, as often as one likes."""
    return click.option(
        *("--set", "overrides"),
        metavar="KEY=VALUE",
        multiple=True,
        shell_complete=_complete_setting,
        help=text,
    )


def format_option(*names: str, text: str | None = None) -> Callable[[Any], Any]:
    """`--format`; the first is the default."""
    return click.option("--format", "form", type=click.Choice(names), default=names[0], help=text)


def forecast_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The ranks and the link that a step is predicted for, and the run that it is predicted from."""
    for option in (
        click.option(
            *("--from", "measured"),
            metavar="RUN",
            type=click.Path(path_type=Path, exists=True, file_okay=False),
            help="Predict from an existing run instead of a short one on this machine.",
        ),
        click.option(
            "--latency",
            metavar="TIME",
            help="One-way latency of the link: 5us, 8ms, or within=TIME,across=TIME.",
        ),
        click.option(
            "--link",
            metavar="RATE",
            help="Predict for this link between hosts: 100Mbit, 10GB/s, unlimited, "
            "within=RATE,across=RATE, or what `ddprun doctor --format json` wrote to a file: link.json.",
        ),
        click.option(
            "--nproc-per-node", type=click.IntRange(min=1), help="Ranks per host; by default as in a run."
        ),
        click.option("--nnodes", type=click.IntRange(min=1), help="Number of hosts; by default the file's."),
    ):
        command = option(command)
    return command


@add_torchrun_flags
@click.command(options_metavar="[OPTIONS]")
@click.argument("pipeline", metavar="PIPELINE", type=click.Path(path_type=Path))
@override_option(
    "Override a value, as in --set optimizer.sgd.lr=0.2; the value is YAML. May be given several times."
)
@click.option("--run-dir", type=click.Path(path_type=Path), help="Folder for everything that the run writes.")
@click.option(
    "--or-resume", is_flag=True, help="Resume the run if --run-dir holds one, as `ddprun resume` does."
)
def run(
    pipeline: Path, overrides: tuple[str, ...], run_dir: Path | None, or_resume: bool, **flags: FlagValue
) -> int:
    """Run a pipeline. Under torchrun or srun, join the run as a worker.

    Torchrun's flags have the same meaning as in torchrun, and take precedence over the file's `launch`.
    """
    if or_resume and run_dir is None:
        raise click.UsageError("--or-resume needs --run-dir, the folder of the run to resume if it exists")
    return _load_and_launch(pipeline, overrides, run_dir, flags, "if begun" if or_resume else "no")


@add_torchrun_flags
@click.command(options_metavar="[OPTIONS]")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@override_option(
    "Change a value, as in --set stages[0].train.steps=2000. What the checkpoint depends on cannot change."
)
def resume(run: Path, overrides: tuple[str, ...], **flags: FlagValue) -> int:
    """Resume a run from its newest intact checkpoint.

    RUN is the run's folder. Damaged checkpoints are named and not used. With a different number of ranks,
    the order of samples stays the same.
    """
    try:
        folder = read_pipeline_folder(run)
        open_file(run, "pipeline.yaml").close()  # refuses a pipe, which would be waited for
    except FileNotFoundError as error:
        raise InputError(f"{run} is not the folder of a run: there is no {error.filename}") from None
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else "its run.json is damaged"
        raise InputError(f"{run} is not the folder of a run: {problem}") from None
    return _load_and_launch(run / "pipeline.yaml", overrides, run, flags, "yes", folder)


def _load_and_launch(
    pipeline: Path,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    flags: Mapping[str, FlagValue],
    resuming: ResumeMode,
    folder: Path | None = None,
) -> int:
    """Load a pipeline and launch it, or join a launched run as a rank; gives the exit code. For a resumed
    run, `folder` is the folder of the original pipeline file, to which relative paths refer.
    """
    if LAUNCHED_BY_DDPRUN_VARIABLE in os.environ or COMPARE_TURNS_VARIABLE in os.environ:
        from ddprun.launch.launcher import take_inherited_overrides

        overrides = (*take_inherited_overrides(), *overrides)
    loaded = load(pipeline, overrides, folder)
    from ddprun import launch

    if os.environ.get("RANK", "0") == "0" and LAUNCHED_BY_DDPRUN_VARIABLE not in os.environ:
        printing.print_faults(loaded.warnings)
    return launch.start(loaded, given_flags(flags), run_dir, resuming=resuming)
