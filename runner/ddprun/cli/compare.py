"""`ddprun compare`."""

import csv
import io
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ddprun.screen import is_terminal

_COLUMNS = {
    "variant": "",
    "steps_per_s": "steps/s",
    "times_first": "times the first",
    "exposed_share": "exposed",
    "wire_bytes_per_step": "sent a step",
    "cosine": "fidelity",
    "loss": "loss",
    "verdict": "",
}


@click.command()
@click.argument("pipelines", metavar="PIPELINE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--vary",
    metavar="KEY=[A, B]",
    multiple=True,
    help="Compare a key's values: --vary 'hooks=[[], [fp16]]'. Several times: all combinations.",
)
@click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value in all of them."
)
@click.option("--noop", is_flag=True, help="Also the first one with nothing sent: the upper bound.")
@click.option("--fidelity", is_flag=True, help="Compare gradients with the exact mean once a turn.")
@click.option("--steps", type=click.IntRange(min=1), help="Steps of each run; by default what the file says.")
@click.option(
    "--turn",
    type=click.IntRange(min=2),
    default=20,
    show_default=True,
    help="Steps that a run takes at a time.",
)
@click.option(
    "--control/--no-control",
    default=True,
    help="Run the first one twice, to know what is noise.",
    show_default=True,
)
@click.option("--nproc-per-node", help="Ranks, as in `ddprun run`.")
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), help="Folder for what is left behind."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "csv", "markdown"]),
    default="text",
    show_default=True,
    help="Of the table.",
)
def compare(
    pipelines: tuple[Path, ...],
    vary: tuple[str, ...],
    overrides: tuple[str, ...],
    noop: bool,
    fidelity: bool,
    steps: int | None,
    turn: int,
    control: bool,
    nproc_per_node: str | None,
    output: Path | None,
    form: str,
) -> int:
    """Compare pipelines, or one with several settings, on this machine: speed, traffic, loss.

    The runs take turns of a few steps, so that whatever disturbs the machine disturbs all alike. A page with
    all of them is written beside the table. Exit code 0; 1 if a run failed; 2 if something is wrong before.
    """
    from ddprun.cli import printing
    from ddprun.compare import compare as comparing
    from ddprun.config import PipelineError, load
    from ddprun.config.faults import Fault
    from ddprun.config.overrides import alternatives
    from ddprun.report.report import report as page

    keys, faults = [], []
    for number, text in enumerate(vary, start=1):
        found = alternatives(text, "--vary", number)
        if isinstance(found, Fault):
            faults.append(found)
        else:
            keys.append((found[0], [json.dumps(value, ensure_ascii=False) for value in found[1]]))
    if faults:
        click.echo(printing.text(faults, printing.colored(sys.stderr)), err=True)
        return 2
    everywhere = [*overrides, *([f"timings.fidelity_every={turn}"] if fidelity else [])]
    chosen = comparing.variants(pipelines, everywhere, keys, noop=noop, twin=control)
    try:
        if steps is not None or noop:
            chosen = [
                _fitted(variant, load(variant.pipeline, variant.overrides), steps) for variant in chosen
            ]
        loaded = [load(variant.pipeline, variant.overrides) for variant in chosen]
        loaded[0].check_environment()
    except PipelineError as error:
        click.echo(printing.text(error.faults, printing.colored(sys.stderr)), err=True)
        return 2
    _warn(loaded)
    folder = output if output is not None else Path("runs") / "compare" / time.strftime("%Y%m%d-%H%M%S")
    if folder.exists() and any(folder.iterdir()):
        raise click.ClickException(f"the folder {folder} is not empty: name another with --output")
    arguments = ["--nproc-per-node", nproc_per_node] if nproc_per_node is not None else []
    tell = _Progress()
    try:
        sides = comparing.run_all(chosen, folder, turn, arguments, tell)
    except KeyboardInterrupt:
        return 130
    finally:
        tell.end()
    table = comparing.rows(sides)
    _echo(table, form)
    done = [side.digest for side in sides if side.digest is not None]
    if done:
        heads = list(_COLUMNS.values())
        lead = heads, [_cells(row) for row in table]
        text = page(done, lead, [s.variant.name for s in sides if s.digest is not None])
        (folder / "report.html").write_bytes(text.encode(errors="replace"))
        click.echo(f"ddprun: {folder / 'report.html'}", err=True)
    failed = [side for side in sides if not side.done]
    for side in failed:
        log = side.folder.with_suffix(".log")
        click.echo(f"ddprun: {side.variant.name} failed with exit code {side.code}; see {log}", err=True)
    return 1 if failed else 0


def _fitted(variant: Any, loaded: Any, steps: int | None) -> Any:
    """A variant with so many steps in its one stage that takes any; with `noop` in every stage."""
    from ddprun.config import PipelineError

    taking = loaded.pipeline.step_stages()
    more: list[str] = []
    if steps is not None:
        if len(taking) != 1:
            text = f"{len(taking)} stages take steps, so it is not known which --steps is for"
            raise PipelineError([loaded.fault("stages", text, "leave --steps out, or name one stage")])
        more.append(_longer(loaded, taking[0], steps))
    if variant.overrides[-1:] == ("hooks=[noop]",):
        own = [stage for stage in taking if "hooks" in stage.model_fields_set]
        more += [f"stages[{stage.index}].{stage.name}.hooks=[noop]" for stage in own]
    return replace(variant, overrides=(*variant.overrides, *more))


def _longer(loaded: Any, stage: Any, steps: int) -> str:
    """The override that gives a stage so many steps, whatever its length was."""
    written = loaded.root.data().get("stages")
    if written is None:
        return f"stages=[{{{stage.name}: {{steps: {steps}}}}}]"
    item = written[stage.index]
    options = dict((item.get(stage.name) or {}) if isinstance(item, dict) else {})
    options.pop("epochs", None)
    return (
        f"stages[{stage.index}]={json.dumps({stage.name: {**options, 'steps': steps}}, ensure_ascii=False)}"
    )


def _warn(loaded: Sequence[Any]) -> None:
    """What makes losses of different runs hard to compare."""
    first = loaded[0].pipeline
    for key in ("seed", "data"):
        if any(getattr(one.pipeline, key) != getattr(first, key) for one in loaded[1:]):
            click.echo(f"ddprun: warning: the runs have not the same {key}: compare no losses", err=True)


class _Progress:
    """One line that is written over on a terminal; elsewhere the first and every tenth."""

    def __init__(self) -> None:
        self._terminal, self._count = is_terminal(sys.stderr), 0

    def __call__(self, text: str) -> None:
        if self._terminal:
            click.echo(f"\r\x1b[Kddprun compare: {text}", err=True, nl=False)
        elif self._count % 10 == 0:
            click.echo(f"ddprun compare: {text}", err=True)
        self._count += 1

    def end(self) -> None:
        if self._terminal:
            click.echo("", err=True)


def _echo(table: Sequence[Mapping[str, Any]], form: str) -> None:
    if form == "json":
        from ddprun.telemetry.writer import finite

        click.echo(json.dumps(finite(list(table)), indent=2, ensure_ascii=False, allow_nan=False))
    elif form == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
        click.echo(text.getvalue(), nl=False)
    elif form == "markdown":
        heads = list(_COLUMNS.values())
        click.echo(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
        for row in table:
            click.echo(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in _cells(row))} |")
    else:
        _print(table)


def _print(table: Sequence[Mapping[str, Any]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=SIMPLE)
    for key, title in _COLUMNS.items():
        shown.add_column(title, justify="left" if key in ("variant", "verdict") else "right")
    for row in table:
        shown.add_row(*map(_escaped, _cells(row)))
    width = None if is_terminal(sys.stdout) else 160
    Console(highlight=False, width=width).print(shown)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [_cell(key, row) for key in _COLUMNS]


def _cell(key: str, row: Mapping[str, Any]) -> str:
    from ddprun.telemetry.progress import data_size

    value = row[key]
    if value is None:
        return "-"
    match key:
        case "steps_per_s":
            return f"{value:.1f} ± {row['spread']:.1f}"
        case "times_first":
            return f"{value:.2f} ({row['times_first_low']:.2f} to {row['times_first_high']:.2f})"
        case "exposed_share":
            return f"{value:.0%}"
        case "wire_bytes_per_step":
            return data_size(value)
        case "cosine":
            return f"{value:.4f}"
        case "loss":
            return f"{value:.4f}"
    return str(value)
