"""`ddprun explain`."""

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddprun import EXIT_SUCCESS, InputError
from ddprun.cli import printing
from ddprun.cli.run import FiniteRange, as_bad_parameter, forecast_options, format_option, override_option
from ddprun.config import PipelineError, load
from ddprun.predict import MeasurementRunError
from ddprun.predict.links import parse_links
from ddprun.standard_streams import say

if TYPE_CHECKING:
    from ddprun.predict.forecast import StageForecast

_MAX_HOSTS = 1 << 20


def _parse_sweep(ctx: click.Context, param: click.Parameter, value: str | None) -> Sequence[int] | None:
    """Parse `--sweep nnodes=A..B`: A, doubled until B is reached, and B."""
    if value is None:
        return None
    found = re.fullmatch(r"nnodes=(\d+)\.\.(\d+)", value)
    if found is None or not 0 < int(found[1]) <= int(found[2]) <= _MAX_HOSTS:
        text = f'"{value}" is not a range of 1 to {_MAX_HOSTS:,} hosts; write nnodes=1..64'
        raise click.BadParameter(text, ctx, param)
    first, last = int(found[1]), int(found[2])
    hosts = []
    while first < last:
        hosts.append(first)
        first *= 2
    return [*hosts, last]


@click.command()
@click.argument("pipeline", metavar="PIPELINE", type=click.Path(path_type=Path))
@override_option("Override a value, as in `ddprun run`.")
@forecast_options
@click.option(
    "--from-link", metavar="RATE", help="The link between the --from run's hosts; by default unlimited."
)
@click.option("--from-latency", metavar="TIME", help="One-way latency of the same link; by default none.")
@click.option("--cores", type=FiniteRange(min=0.1), help="Cores of each host; by default the measured run's.")
@click.option(
    "--sweep", callback=_parse_sweep, metavar="nnodes=A..B", help="Predict for A, 2A, 4A … B hosts."
)
@format_option("text", "json", text="Text, or one JSON object with every parameter's name.")
def explain(
    pipeline: Path,
    overrides: tuple[str, ...],
    nnodes: int | None,
    nproc_per_node: int | None,
    link: str | None,
    latency: str | None,
    measured: Path | None,
    from_link: str | None,
    from_latency: str | None,
    cores: float | None,
    sweep: Sequence[int] | None,
    form: str,
) -> int:
    """Show what a pipeline sends: which buckets, when, among which ranks, and how many bytes.

    Builds the model and the data, and runs forward and backward passes on one batch, without starting ranks.
    With --link, --latency, --from or --sweep, it also predicts how long steps take. The costs of computation
    and hooks are first measured in a short run on this machine, or read from RUN. Exit code 0; 2 if the
    pipeline cannot run; 1 if code that it names, or the short run, fails.
    """
    predicts = any(one is not None for one in (link, latency, measured, sweep))
    if measured is None and (from_link or from_latency):
        raise click.UsageError("--from-link and --from-latency describe the link of a --from run: add --from")
    if cores is not None and not predicts:
        raise click.UsageError("--cores is for a prediction: add --link, --latency, --from or --sweep")
    with as_bad_parameter("--link or --latency"):
        links = parse_links(link, latency)
    with as_bad_parameter("--from-link or --from-latency"):
        measured_links = parse_links(from_link, from_latency)
    loaded = load(pipeline, overrides)
    if predicts:
        from ddprun.predict.costs import check_predictable

        check_predictable(loaded)
    if links.across.takes_time and not sweep and (nnodes or loaded.pipeline.launch.host_range[1]) == 1:
        say("warning: a link between hosts has no effect, since there is one host: set more with --nnodes")
    loaded.check_environment()
    printing.print_faults(loaded.warnings)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what matters comes as an error
    from ddprun.explain import explain as explaining

    predicted: dict[int, StageForecast] = {}
    try:
        explained = explaining.explain(loaded, hosts=nnodes, ranks_per_host=nproc_per_node)
        if predicts:
            from ddprun.predict import forecast as forecasting
            from ddprun.predict.measure import cost_models_of_run, run_measurement

            if measured is None:
                measured = Path("runs") / "explain" / time.strftime("%Y%m%d-%H%M%S")
                run_measurement(loaded, forecasting.stacks_to_measure(explained), measured)
                say(f"--from {measured} reuses its results")
            models = list(cost_models_of_run(measured, measured_links, loaded, cores=cores))
            predicted = forecasting.forecast(explained, models, links, sweep or ())
    except (PipelineError, InputError, click.ClickException):
        raise
    except Exception as error:
        return printing.say_failure(error, (MeasurementRunError,), loaded.secrets)
    if form == "json":
        from ddprun.telemetry.reader import RecordedRun

        found = explained.to_json_data()
        if measured is not None:
            # What tells whether a run is the one that the prediction was fitted to.
            found["measured_run"] = {"run_dir": str(measured), "started": RecordedRun(measured).started.time}
            for stage in found["stages"]:
                of_stage = predicted.get(stage["stage"])
                stage["predicted"] = None if of_stage is None else of_stage.to_json_data()
        click.echo(json.dumps(loaded.secrets.redact_all(found), indent=2, ensure_ascii=False))
    else:
        from ddprun.explain.text import render_text

        lines = {index: one.text_lines() for index, one in predicted.items()}
        click.echo(loaded.secrets.redact(render_text(explained, lines)))
    return EXIT_SUCCESS
