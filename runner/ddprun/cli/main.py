"""`ddprun`: the group of commands, and how its errors reach the terminal."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ddprun import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_SUCCESS, InputError, __version__
from ddprun.cli import (
    catalog,
    check,
    compare,
    doctor,
    explain,
    init,
    observe,
    printing,
    report,
    run,
    submit,
    tune,
)
from ddprun.config import PipelineError
from ddprun.config.secrets import Secrets
from ddprun.standard_streams import failure_of_stdout, protect_standard_streams, say

_RUN_COMMANDS = ("run", "resume")
# Environment variables whose paths this process and its children keep, wherever the user's code goes.
_PATH_VARIABLES = ("TMPDIR", "TEMP", "TMP", "TORCHELASTIC_ERROR_FILE")


class _RunByDefaultGroup(click.Group):
    """A group in which `ddprun pipeline.yaml` means `ddprun run pipeline.yaml`."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. If its output could not be written, as on a full disk, the exit code is a failure.
        Not for `run` and `resume`, whose result does not depend on their last line.
        """
        result = super().invoke(ctx)
        if result or ctx.invoked_subcommand in _RUN_COMMANDS or (failure := failure_of_stdout()) is None:
            return result
        if not isinstance(failure, BrokenPipeError):
            say(f"cannot write to standard output: {failure.strerror}")
        return EXIT_FAILURE

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands, each with a whole sentence: click's own list cuts them at one line."""
        texts = {name: one.get_short_help_str(limit=1000) for name, one in self.commands.items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted(texts.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        files = [] if incomplete.startswith("-") else [CompletionItem(incomplete, type="file")]
        return [*files, *super().shell_complete(ctx, incomplete)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `run` where no command is named."""
        if args and args[0] not in ("--help", "-h", "--version", *self.commands):
            word, file = args[0], Path(args[0])
            if word.startswith("-") or file.suffix in (".yaml", ".yml") or os.sep in word or file.exists():
                args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(
    cls=_RunByDefaultGroup,
    commands=[
        run.run,
        run.resume,
        check.check,
        explain.explain,
        report.report,
        compare.compare,
        tune.tune,
        observe.observe,
        init.init,
        catalog.catalog,
        catalog.schema,
        submit.submit,
        doctor.doctor,
    ],
    context_settings={
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "token_normalize_func": lambda text: text.replace("_", "-"),
    },
    no_args_is_help=True,
)
@click.version_option(__version__, prog_name="ddprun", message="%(prog)s %(version)s")
def cli() -> None:
    """Train a PyTorch model with DistributedDataParallel, as described in a pipeline file.

    `ddprun PIPELINE` is `ddprun run PIPELINE`. `ddprun init` writes a pipeline to start from.
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line, without the program's name; by default that of the process. Gives the exit code."""
    protect_standard_streams()
    for name in _PATH_VARIABLES:
        if path := os.environ.get(name):
            os.environ[name] = os.path.abspath(path)
    try:
        result: Any = cli.main(args=args, prog_name="ddprun", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return EXIT_BAD_INPUT
    except click.ClickException as error:
        message = " ".join(Secrets().redact(error.format_message()).split()).rstrip(".")
        command, hint = "ddprun", ""
        if isinstance(error, click.UsageError):
            message = Secrets().redact_line(message)  # which may quote KEY=VALUE
            command = error.ctx.command_path if error.ctx else command
            hint = f"; see `{command} --help`"
            if "extra argument" in message and "=" in message:
                hint = f"; write --set KEY=VALUE to change a value{hint}"
        if message[1:2].islower():
            message = message[0].lower() + message[1:]
        click.echo(f"{command}: {message}{hint}", err=True)
        return EXIT_BAD_INPUT
    except click.Abort:
        return EXIT_INTERRUPTED
    except InputError as error:
        say(error)
        return EXIT_BAD_INPUT
    except PipelineError as error:
        printing.print_faults(error.faults)
        return EXIT_BAD_INPUT
    return result if isinstance(result, int) else EXIT_SUCCESS
