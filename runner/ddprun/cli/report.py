"""`ddprun report`."""

from pathlib import Path
from typing import IO

import click

from ddprun import EXIT_SUCCESS
from ddprun.cli import printing
from ddprun.run_files import replace_atomically


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page; by default report.html in the first run's folder.",
)
@click.option(
    "--predicted",
    metavar="FILE",
    type=click.File("rb"),
    help="Output of `ddprun explain PIPELINE --link … --format json`, to show beside the measurements.",
)
@click.option(
    "--steps",
    metavar="FROM:TO",
    help="Steps in trace.json; by default all, or of a long run the last ones.",
)
@click.option("--trace/--no-trace", default=True, help="Write trace.json into each run's folder.")
def report(
    runs: tuple[Path, ...], output: Path | None, predicted: IO[bytes] | None, steps: str | None, trace: bool
) -> int:
    """Write one self-contained HTML page about one run, or several side by side, and each run's trace.json.

    The page opens without a network; trace.json opens in https://ui.perfetto.dev. For one run, the top of
    the page is also printed to stderr. Exit code 0; 2 if a folder is not a run's, or FILE not a prediction.
    """
    from ddprun.report import html
    from ddprun.report import trace as traces
    from ddprun.report.digest import digest_run
    from ddprun.report.predicted_vs_measured import PredictionFile, compare_with_predictions
    from ddprun.telemetry.reader import RecordedRun

    chosen = _parse_step_range(steps)
    target = output if output is not None else runs[0] / "report.html"
    try:
        prediction = PredictionFile.read(predicted) if predicted else None
        found = [RecordedRun(folder) for folder in {one.resolve(): one for one in runs}.values()]
        digests = [digest_run(run) for run in found]
        compared = [compare_with_predictions(one, prediction) for one in digests] if prediction else []
        named = html.name_by_folder(digests)
        page = html.render_page(named, predicted=compared).encode(errors="replace")
        if output is not None:
            output.write_bytes(page)
        else:
            with replace_atomically(target.parent, target.name) as file:
                file.write(page)
        click.echo(str(target))
        for line in html.terminal_summary(named):
            click.echo(line, err=True)
        for run in found if trace else ():
            target = run.folder / "trace.json"
            count = traces.write_chrome_trace(run, target, steps=chosen)
            click.echo(f"{target}: {count:,} of {run.last_step:,} steps", err=True)
    except OSError as error:
        raise printing.write_error(target, error) from None
    return EXIT_SUCCESS


def _parse_step_range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    low, colon, high = text.partition(":")
    if not (colon and low.isdecimal() and high.isdecimal() and int(low) <= int(high)):
        raise click.BadParameter(f'"{text}" is not a range of steps such as 100:200', param_hint="--steps")
    return int(low), int(high)
