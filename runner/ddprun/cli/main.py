"""`ddprun`: the group of commands, and how its errors reach the terminal."""

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ddprun import __version__
from ddprun.cli import catalog, check, compare, doctor, explain, init, report, resume, run, schema, submit


class _Commands(click.Group):
    """A group in which `ddprun pipeline.yaml` means `ddprun run pipeline.yaml`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `run` where no command is named."""
        if args and args[0] not in ("--help", "-h", "--version") and self._means_run(args):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Say what was probably meant where a word is neither a command nor a file."""
        word = args[0]
        if self.get_command(ctx, word) is None:
            from ddprun.spec.faults import suggest

            near = suggest(word, self.commands)
            hint = f' (did you mean "{near}"?)' if near else ""
            raise click.UsageError(f'"{word}" is neither a command nor a pipeline file{hint}')
        return super().resolve_command(ctx, args)

    def _means_run(self, args: Sequence[str]) -> bool:
        if args[0] in self.commands:
            return False
        word = _first_word(args)
        if word is None or args[0].startswith("-"):
            return True
        return Path(word).suffix in (".yaml", ".yml") or os.sep in word or Path(word).exists()


def _first_word(args: Sequence[str]) -> str | None:
    """The first argument that is neither an option of `run` nor an option's value."""
    with_value = {
        name
        for option in run.run.params
        if isinstance(option, click.Option) and not option.is_flag
        for name in option.opts
    }
    values = 0
    for arg in args:
        if values:
            values -= 1
        elif not arg.startswith("-"):
            return arg
        elif arg.replace("_", "-") in with_value:
            values = 1
    return None


@click.group(
    cls=_Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda text: text.replace("_", "-"),
    },
    no_args_is_help=True,
)
@click.version_option(__version__, prog_name="ddprun", message="%(prog)s %(version)s")
def cli() -> None:
    """Train a PyTorch model with DistributedDataParallel as a pipeline file says.

    `ddprun PIPELINE` is `ddprun run PIPELINE`. `ddprun init` writes a pipeline to start from.
    """


for _command in (
    run.run,
    resume.resume,
    check.check,
    explain.explain,
    report.report,
    compare.compare,
    init.init,
    catalog.catalog,
    schema.schema,
    submit.submit,
    doctor.doctor,
):
    cli.add_command(_command)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: without the program's name; those of the process if left out.

    Returns:
        The exit code: 0 done, 1 the run failed, 2 bad input, 130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # a terminal that knows few characters shows the others escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        result: Any = cli.main(
            args=None if args is None else list(args), prog_name="ddprun", standalone_mode=False
        )
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return 2
    except click.ClickException as error:
        from ddprun.spec.secrets import Secrets

        message = " ".join(Secrets.of().redact(error.format_message()).split()).rstrip(".")
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "ddprun"
        click.echo(f"{command}: {message[:1].lower()}{message[1:]}; see `{command} --help`", err=True)
        return 2
    except click.Abort:
        return 130
    return result if isinstance(result, int) else 0
