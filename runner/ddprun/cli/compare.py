"""`ddprun compare`."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddprun import EXIT_FAILURE, EXIT_SUCCESS
from ddprun.cli import printing
from ddprun.cli.run import FlagValue, add_rendezvous_flags, format_option, override_option, rendezvous_flags
from ddprun.config.overrides import parse_alternatives
from ddprun.config.yaml_writer import flow_yaml
from ddprun.run_files import replace_atomically
from ddprun.standard_streams import say

if TYPE_CHECKING:
    from ddprun.compare.hosts import HostCoordinator
    from ddprun.compare.runs import Variant, VariantRuns

_RUNS_FOLDER = Path("runs") / "compare"
_SEEDS_NOTE = "The comparison is of all seeds, and everything else on this page of the first one."


@add_rendezvous_flags
@click.command()
@click.argument("pipelines", metavar="PIPELINE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--vary",
    metavar="KEY=[A, B]",
    multiple=True,
    help="Compare a key's values: --vary 'hooks=[[], [fp16]]'. If repeated, all combinations are compared.",
)
@override_option("Override a value in all pipelines.")
@click.option(
    "--noop", is_flag=True, help="Also run the first setting without sending gradients, as an upper bound."
)
@click.option("--fidelity", is_flag=True, help="Compare gradients with the exact mean once per turn.")
@click.option("--steps", type=click.IntRange(min=1), help="Steps of each run; by default the file's.")
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=1,
    help="Run everything with this many seeds, one after the other. To compare learning, use several.",
)
@click.option(
    "--turn",
    type=click.IntRange(min=2),
    default=20,
    help="Steps that a run takes before the next run continues.",
)
@click.option(
    "--control/--no-control", default=True, help="Run the first setting twice, to measure the noise."
)
@click.option("--nnodes", type=click.IntRange(min=1), help="Number of hosts; by default the file's.")
@click.option("--nproc-per-node", help="Ranks per host, as in `ddprun run`.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the runs, their logs and report.html; by default runs/compare/TIME.",
)
@format_option("text", "json", "csv", "markdown", text="How the table is printed.")
def compare(
    pipelines: tuple[Path, ...],
    vary: tuple[str, ...],
    overrides: tuple[str, ...],
    noop: bool,
    fidelity: bool,
    steps: int | None,
    seeds: int,
    turn: int,
    control: bool,
    nnodes: int | None,
    nproc_per_node: str | None,
    output: Path | None,
    form: str,
    **flags: FlagValue,
) -> int:
    """Compare pipelines, or several settings of one: speed, traffic, learning.

    The runs take turns of a few steps, so that whatever disturbs the machine affects all of them
    equally. A table is printed, and a page with all runs is written. On several hosts, run the same command
    on each with --nnodes and --rdzv-endpoint. Exit code 0; 1 if a run failed; 2 if the input is wrong.
    """
    from ddprun.compare import runs as comparing
    from ddprun.compare.hosts import join_hosts_and_run
    from ddprun.launch.launcher import parse_rank_count

    if nproc_per_node is not None:
        parse_rank_count(nproc_per_node)
    keys = [(key, list(map(flow_yaml, values))) for key, values in parse_alternatives(vary, "--vary")]
    shared_overrides = [*overrides, *([f"timings.fidelity_every={turn}"] if fidelity else [])]
    all_variants = comparing.make_variants(pipelines, shared_overrides, keys, noop=noop, twin=control)
    variants, loaded = zip(*(comparing.load_variant(one, steps) for one in all_variants), strict=True)
    for one in loaded:
        one.check_environment()
    own = [one for variant, one in zip(variants, loaded, strict=True) if not (variant.twin or variant.noop)]
    printing.print_faults(dict.fromkeys(fault for one in own for fault in one.warnings))
    first_seed = loaded[0].pipeline.seed
    if seeds > 1 and any(one.pipeline.seed != first_seed for one in loaded):
        text = "the runs already differ in their seed: take it out of --vary and the files"
        raise click.BadParameter(text, param_hint="--seeds")
    run_seeds = [None] if seeds == 1 else [*range(first_seed, first_seed + seeds)]
    for key in ("seed", "data"):
        if any(getattr(one.pipeline, key) != getattr(loaded[0].pipeline, key) for one in loaded[1:]):
            say(f"warning: {key} is not the same in all runs: do not compare losses")
    hosts = nnodes or loaded[0].pipeline.launch.host_range[1]
    rendezvous = rendezvous_flags({**flags, "nproc_per_node": nproc_per_node}, hosts)
    if rendezvous is None and hosts > 1:
        text = f"{hosts} hosts need --rdzv-endpoint, and the same command on each; for this one, --nnodes 1"
        raise click.BadParameter(text, param_hint="--nnodes")
    ranks = [] if nproc_per_node is None else ["--nproc-per-node", nproc_per_node]
    work = partial(_compare, variants, run_seeds, output, turn, ranks, form)
    # The id under which a run's hosts meet has the last parts of its folder.
    inputs = [[one.digest() for one in loaded], run_seeds, turn, output and output.parts[-2:]]
    return join_hosts_and_run("compare", rendezvous, inputs, work)


def _compare(
    variants: Sequence["Variant"],
    seeds: Sequence[int | None],
    output: Path | None,
    turn: int,
    arguments: Sequence[str],
    form: str,
    hosts: "HostCoordinator | None",
) -> int:
    """Run the variants, and show on the first host what differs; gives the exit code."""
    from ddprun.compare import runs as comparing
    from ddprun.compare.hosts import HostMessage

    def run_all(folder: Path) -> Sequence["VariantRuns"]:
        return comparing.run_variants(
            variants, seeds, folder, turn, arguments, printing.make_progress_printer(), hosts
        )

    if hosts is not None and not hosts.is_first:
        return hosts.follow_first_host(lambda message: run_all(output or _RUNS_FOLDER / message.folder))
    name = time.strftime("%Y%m%d-%H%M%S")
    folder = output or _RUNS_FOLDER / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise printing.write_error(folder, error) from None
    if any(folder.iterdir()):
        raise click.ClickException(f"the folder {folder} is not empty: name another with --output")
    if hosts is not None:
        hosts.send_to_others(HostMessage(folder=name))
    return _print_and_write_report(run_all(folder), folder, len(seeds), form)


def _print_and_write_report(sides: Sequence["VariantRuns"], folder: Path, seeds: int, form: str) -> int:
    from ddprun.compare import learning
    from ddprun.compare import runs as comparing
    from ddprun.report import blocks, html

    rows = comparing.comparison_rows(sides)
    click.echo(comparing.render_rows(rows, form), nl=False)
    first_seeds = [(side.variant.name, side.digests[0]) for side in sides if side.digests]
    if first_seeds:
        shown: list[blocks.Block] = [blocks.Table(*one) for one in comparing.speed_and_learning_tables(rows)]
        if seeds > 1:
            shown.append(blocks.Text(_SEEDS_NOTE, "note"))
        page_path = folder / "report.html"
        page = html.render_page(first_seeds, (learning.comparison_sentences(rows), shown))
        try:
            with replace_atomically(folder, page_path.name) as file:
                file.write(page.encode(errors="replace"))
            say(page_path)
        except OSError as error:
            say(printing.write_error(page_path, error).message)
    failed = [(side, run) for side in sides for run in side.runs if not run.completed]
    for side, run in failed:
        say(f"{side.variant.name} failed with exit code {run.exit_code}; see {comparing.log_path(run)}")
    return EXIT_FAILURE if failed else EXIT_SUCCESS
