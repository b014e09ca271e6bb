"""`ddprun explain`."""

import json
import os
import traceback
from pathlib import Path

import click

from ddprun.cli.completion import PipelineFile
from ddprun.cli.run import format_option, override_option


@click.command()
@click.argument("pipeline", metavar="PIPELINE", type=PipelineFile())
@override_option("Override a value, as in `ddprun run`.")
@click.option("--nnodes", type=click.IntRange(min=1), help="Number of hosts; by default the file's.")
@click.option("--nproc-per-node", type=click.IntRange(min=1), help="Ranks per host; by default as in a run.")
@click.option("--no-import", is_flag=True, help="Import none of your own code; what stays unknown is named.")
@format_option("text", "json", text="For a reader, or one JSON object with every parameter's name.")
def explain(
    pipeline: Path,
    overrides: tuple[str, ...],
    nnodes: int | None,
    nproc_per_node: int | None,
    no_import: bool,
    form: str,
) -> int:
    """Show what a pipeline sends: which buckets, when, among whom, how many bytes. No rank is started.

    Builds the model and the data, and runs forward and backward passes on one batch. Exit code 0; 2 if the
    pipeline cannot run; 1 if code that it names fails.
    """
    from ddprun.cli import printing
    from ddprun.config import PipelineError, load
    from ddprun.config.secrets import Secrets

    secrets = Secrets.of()
    try:
        loaded = load(pipeline, overrides)
        secrets = loaded.secrets
        if not no_import:
            loaded.check_environment()
        printing.print_faults(loaded.warnings)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what matters comes as an error
        from ddprun.explain import explain as explaining

        explained = explaining.explain(
            loaded, hosts=nnodes, ranks_per_host=nproc_per_node, importing=not no_import
        )
    except PipelineError:
        raise
    except Exception as error:  # of the user's own code, such as a model's forward
        message = f"ddprun explain: {type(error).__name__}: {error}\n{traceback.format_exc().rstrip()}"
        click.echo(secrets.redact(message), err=True)
        return 1
    if form == "json":
        click.echo(json.dumps(secrets.redact_all(explained.as_object()), indent=2, ensure_ascii=False))
    else:
        from ddprun.explain.text import text

        click.echo(secrets.redact(text(explained)))
    return 0
