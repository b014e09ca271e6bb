"""`report.html`: one page about one run or several, which loads nothing from elsewhere.

How it looks is in the folder `page`: the template, the style sheet, and the script that draws.
"""

import json
import os
import re
import zlib
from base64 import b85encode
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ddprun import __version__
from ddprun.report.blocks import Block, Figure, NamedDigests, format_value
from ddprun.report.digest import RunDigest
from ddprun.report.predicted_vs_measured import PredictionComparison
from ddprun.report.sections import headline_facts, make_sections
from ddprun.report.sentences import ending_problem_sentence, sentences_by_stage, time_breakdown_sentence
from ddprun.telemetry.writer import nonfinite_to_none

ComparisonContent = tuple[Sequence[str], Sequence[Block]]
"""What `ddprun compare` says about the runs of a page: sentences, and blocks."""


def render_page(
    runs: NamedDigests,
    comparison: ComparisonContent | None = None,
    predicted: Sequence[Sequence[PredictionComparison]] = (),
) -> str:
    """The page about at least one run. What compares them comes first: `comparison` is what `ddprun compare`
    says of them. `predicted`: for each run, what its stages were predicted to take.
    """
    blocks_by_title: dict[str, list[Block]] = {"Comparison": list(comparison[1]) if comparison else []}
    blocks_by_title |= make_sections(runs, predicted)
    sections = {title: blocks for title, blocks in blocks_by_title.items() if blocks}
    figures = [block for blocks in sections.values() for block in blocks if isinstance(block, Figure)]
    for number, figure in enumerate(figures):
        figure.id = f"chart-{number}"
    environment = Environment(
        loader=PackageLoader("ddprun.report", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["code"] = _backticks_to_code
    charts = {figure.id: figure.charts for figure in figures}
    return environment.get_template("report.html").render(
        title="ddprun: " + (", ".join(name for name, _ in runs) if len(runs) < 3 else f"{len(runs)} runs"),
        endings=_ending_problem_lines(runs),
        words=_summary_sentences(runs, comparison),
        sections=[(title, title.lower().replace(" ", "-"), blocks) for title, blocks in sections.items()],
        facts=_format_headline_facts(runs[0][1]) if len(runs) == 1 and comparison is None else [],
        charts=_compress_to_ascii(
            json.dumps(nonfinite_to_none(charts), allow_nan=False, separators=(",", ":"))
        ),
        plotly=_packed_plotly(),
        version=__version__,
    )


def terminal_summary(runs: NamedDigests) -> list[str]:
    """What is on top of the page, for a terminal; of several runs, how each ended that did not end well."""
    lines = _ending_problem_lines(runs)
    if len(runs) == 1:
        lines.append("; ".join(f"{name}: {value}" for name, value in _format_headline_facts(runs[0][1])))
        for stage, found in sentences_by_stage(runs[0][1]).items():
            lines += [*([f"{stage}:"] if stage else []), *found]
    # Records may be somebody else's: no sequence in them reaches the terminal.
    return ["".join(c if c.isprintable() else "\ufffd" for c in line) for line in lines]


def _ending_problem_lines(runs: NamedDigests) -> list[str]:
    found = [(f"{name}: " * (len(runs) > 1), ending_problem_sentence(digest.run)) for name, digest in runs]
    return [f"{name}{text}" for name, text in found if text is not None]


def _format_headline_facts(digest: RunDigest) -> list[tuple[str, str]]:
    return [(name, format_value(value)) for name, value in headline_facts(digest) if value is not None]


def _summary_sentences(runs: NamedDigests, comparison: ComparisonContent | None) -> dict[str, Sequence[str]]:
    """The sentences on top, by heading: of one run by stage, of several by run."""
    if len(runs) == 1 and comparison is None:
        return dict(sentences_by_stage(runs[0][1]))
    found: dict[str, Sequence[str]] = {"": comparison[0]} if comparison else {}
    for name, digest in runs:
        if digest.times.steps_per_s is not None:
            found[name] = [time_breakdown_sentence(digest.times)]
    about_all = ["`ddprun report RUN` shows more of each: a timeline, stages, communication, and errors."]
    if comparison is None:
        text = "The runs did not take turns, so differences in time may come from the machine"
        about_all.insert(0, f"{text}: `ddprun compare` rules that out.")
    return found | {"All runs": about_all}


@cache
def _packed_plotly() -> Markup:
    return _compress_to_ascii((files("plotly") / "package_data" / "plotly.min.js").read_text("utf-8"))


def _compress_to_ascii(text: str) -> Markup:
    """Compress a text for a script element, whose own end it cannot contain: a fifth is lost to ASCII."""
    return Markup(b85encode(zlib.compress(text.encode(), 9)).replace(b"<", b",").decode())


def _backticks_to_code(text: str) -> Markup:
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def name_by_folder(digests: Sequence[RunDigest]) -> NamedDigests:
    """Name each digest by the end of its folder's path: where paths differ, with a folder above it."""
    paths = [digest.run.folder.resolve() for digest in digests]
    shared = os.path.commonpath([path.parent.parent for path in paths])
    return [(os.path.relpath(path, shared), digest) for path, digest in zip(paths, digests, strict=True)]
