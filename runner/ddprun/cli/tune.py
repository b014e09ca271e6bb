"""`ddprun tune`."""

import json
import os
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddprun import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_SUCCESS, InputError
from ddprun.cli import printing
from ddprun.cli.run import (
    FiniteRange,
    FlagValue,
    add_rendezvous_flags,
    as_bad_parameter,
    forecast_options,
    format_option,
    override_option,
    rendezvous_flags,
)
from ddprun.config import LoadedPipeline, PipelineError, load
from ddprun.config.overrides import key_of, parse_alternatives
from ddprun.config.yaml_writer import flow_yaml
from ddprun.predict import MeasurementRunError
from ddprun.predict.links import Links, parse_links
from ddprun.run_files import replace_atomically
from ddprun.standard_streams import say
from ddprun.tune import TuneError

if TYPE_CHECKING:
    from ddprun.compare.hosts import HostCoordinator
    from ddprun.tune.search import SearchOutcome, SearchRequest
    from ddprun.tune.selection import QualityFloors

_MAX_MINUTES = 7 * 24 * 60  # a week


@add_rendezvous_flags
@click.command()
@click.argument("pipeline", metavar="PIPELINE", type=click.Path(path_type=Path))
@override_option("Override a value, as in `ddprun run`; it is written to the winner's file, too.")
@click.option(
    "--vary",
    metavar="KEY=[A, B]",
    multiple=True,
    help="Try these values of a key in place of its usual ones: --vary 'hooks=[[], [fp16]]'. Keys: sync, "
    "hooks, ddp.bucket_cap_mb, and accumulate, which otherwise keeps its value.",
)
@forecast_options
@click.option(
    "--floor",
    "floors",
    metavar="NAME=VALUE",
    multiple=True,
    help="What a winner must meet: cosine=0.99, the least cosine similarity of its gradients to the exact "
    "ones; loss=+1%, how far its loss may be above the file's.",
)
@click.option(
    "--minutes",
    type=FiniteRange(min=0, min_open=True, max=_MAX_MINUTES),
    default=10.0,
    help="How long the search may take.",
)
@click.option(
    "--output",
    metavar="FILE.yaml",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where the winner is written; by default beside PIPELINE, as NAME.tuned.yaml.",
)
@click.option(
    "--runs",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs") / "tune",
    help="Folder for the short runs.",
)
@format_option("text", "json", text="Text, or one JSON object with every candidate.")
def tune(
    pipeline: Path,
    overrides: tuple[str, ...],
    vary: tuple[str, ...],
    nnodes: int | None,
    nproc_per_node: int | None,
    link: str | None,
    latency: str | None,
    measured: Path | None,
    floors: tuple[str, ...],
    minutes: float,
    output: Path | None,
    runs: Path,
    form: str,
    **flags: FlagValue,
) -> int:
    """Find the sync policy, hooks and bucket size with which a pipeline trains fastest.

    All candidates are predicted from a short run on this machine. The best few then take turns with the
    unchanged file, and the winner is written as a pipeline file. "Change nothing" is an answer, too. Exit
    code 0; 2 if the input is wrong; 1 if a run of the unchanged file fails, or the winner cannot be written;
    130 after Ctrl-C. On several hosts, run the same command on each with --nnodes and --rdzv-endpoint.
    """
    with as_bad_parameter("--link or --latency"):
        links = None if link is None and latency is None else parse_links(link, latency)
    loaded = load(pipeline, overrides)
    from ddprun.predict.costs import check_predictable

    check_predictable(loaded)
    loaded.check_environment()
    printing.print_faults(loaded.warnings)
    output = output if output is not None else pipeline.with_name(f"{pipeline.stem}.tuned.yaml")
    _check_output(output, loaded)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what matters comes as an error
    from ddprun.compare.hosts import join_hosts_and_run
    from ddprun.host.device import default_rank_count
    from ddprun.tune.search import SearchRequest
    from ddprun.tune.selection import parse_quality_floors

    with as_bad_parameter("--floor"):
        parsed_floors = parse_quality_floors(floors)
    hosts = nnodes or loaded.pipeline.launch.host_range[1]
    rendezvous = rendezvous_flags(flags, hosts)
    _check_links_and_floors(hosts, rendezvous is not None, links, parsed_floors)
    tried = _parse_vary_options(loaded, vary)
    request = SearchRequest(
        loaded, nnodes, nproc_per_node, links, measured, tried, parsed_floors, minutes, runs
    )
    if rendezvous is not None:
        ranks = nproc_per_node or loaded.pipeline.launch.nproc_per_node or default_rank_count(loaded)
        rendezvous["nproc_per_node"] = str(ranks)
    return join_hosts_and_run("tune", rendezvous, [loaded.digest()], partial(_search, request, output, form))


def _search(request: "SearchRequest", output: Path, form: str, hosts: "HostCoordinator | None") -> int:
    from ddprun.launch.host_group import HostsError
    from ddprun.tune import text as outcome_text
    from ddprun.tune.search import Search

    loaded, secrets = request.loaded, request.loaded.secrets
    search = None
    try:
        search = Search(request, printing.make_progress_printer(), hosts)
        if hosts is not None and not hosts.is_first:
            return hosts.follow_first_host(search.run_part_of_round)
        outcome = search.run()
    except KeyboardInterrupt:
        costs = search.costs_run if search is not None else None
        again = f"; --from {shlex.quote(str(costs))} uses the costs that were measured" if costs else ""
        say(f"interrupted{again}")
        return EXIT_INTERRUPTED
    except (PipelineError, HostsError):
        raise
    except InputError as error:
        say(secrets.redact(str(error)))
        return EXIT_BAD_INPUT
    except Exception as error:
        return printing.say_failure(error, (TuneError, MeasurementRunError, OSError), secrets)
    written, code = None, EXIT_SUCCESS
    if outcome.winner is not None:
        try:
            written = _write_winner(outcome, loaded, output)
        except OSError as error:  # what was found is said all the same
            say(secrets.redact(printing.write_error(output, error).message))
            code = EXIT_FAILURE
    if form == "json":
        found = outcome_text.to_json_data(outcome, written)
        click.echo(json.dumps(secrets.redact_all(found), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        click.echo(secrets.redact(outcome_text.render_text(outcome, written)))
    return code


def _parse_vary_options(loaded: LoadedPipeline, vary: Sequence[str]) -> dict[str, list[Any]]:
    """Parse `--vary`; each value must be valid in the pipeline file."""
    from ddprun.tune.candidates import TUNABLE_KEYS

    found: dict[str, list[Any]] = {}
    for key, values in parse_alternatives(vary, "--vary"):
        if key not in TUNABLE_KEYS or key in found:
            text = f'"{key}" {"is given twice" if key in found else "cannot be tuned"}'
            raise click.BadParameter(f"{text}; keys: {', '.join(TUNABLE_KEYS)}", param_hint="--vary")
        for value in values:
            load(loaded.path, (*loaded.overrides, f"{key}={flow_yaml(value)}"))
        found[key] = values
    return found


def _check_links_and_floors(hosts: int, here: bool, links: Links | None, floors: "QualityFloors") -> None:
    """Check that --link and --floor make sense for this number of hosts; `here`: whether they take part."""
    from ddprun.tune.search import find_not_run_reason

    if hosts == 1 and links is not None and links.across.takes_time:
        text = "it is a link between hosts, and there is one: set more with --nnodes, or write within=RATE"
        raise click.BadParameter(text, param_hint="--link or --latency")
    reason = "" if here else find_not_run_reason(hosts, links or Links())
    if reason and (floors.cosine, floors.loss) != (None, None):
        raise click.BadParameter(f"floors need real runs, and {reason}", param_hint="--floor")


def _check_output(output: Path, loaded: LoadedPipeline) -> None:
    """Look whether the winner can be written there, before anything is measured."""
    problem = ""
    if output.suffix not in (".yaml", ".yml"):
        problem = "does not end in .yaml"
    elif output.exists():
        problem = "already exists: remove it, or name another file"
    elif not output.parent.is_dir():
        problem = f"cannot be written: there is no folder {output.parent}"
    elif not os.access(output.parent, os.W_OK | os.X_OK):
        problem = f"cannot be written: no file can be made in {output.parent}; name another folder"
    if problem:
        raise click.BadParameter(f"{output} {problem}", param_hint="--output")
    if output.parent.resolve() != loaded.folder:
        text = f"warning: {output} will be in another folder than {loaded.path}: relative paths and modules "
        say(f"{text}beside the file are not found from there")


def _write_winner(outcome: "SearchOutcome", loaded: LoadedPipeline, output: Path) -> str:
    from ddprun.tune.text import overrides_without_secrets, tuned_pipeline_yaml, winner_file_comment

    assert outcome.winner is not None
    kept = overrides_without_secrets(loaded)
    settings = (word for text in kept for word in ("--set", text))
    heading = winner_file_comment(outcome, shlex.join(["ddprun", "tune", str(loaded.path), *settings]))
    text = tuned_pipeline_yaml(loaded, (*kept, *outcome.winner.candidate.overrides), heading)
    with replace_atomically(output.parent, output.name) as file:
        file.write(text.encode())
    if left_out := [key_of(text) for text in loaded.overrides if text not in kept]:
        say(f"not written, because they hold secrets: --set {', '.join(left_out)}; give them again")
    return str(output)
