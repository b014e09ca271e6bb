"""A report's page taken apart, for tests, and runs to make pages of."""

import json
import re
import zlib
from base64 import b85decode
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from ddprun.report import html
from ddprun.report.digest import RunDigest
from tests.report.made_up import make

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """What a page is made of; every element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.anchors: list[str] = []
        self.text: list[str] = []
        self.charts: list[dict[str, str | None]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag != "a":
            self.addresses += [value for key, value in attrs if key in ("src", "href", "action") and value]
        elif (target := found.get("href")) is not None and target.startswith("#"):
            self.anchors.append(target[1:])
        if (name := found.get("id")) is not None:
            self.ids.append(name)
        if found.get("class") == "chart":
            self.charts.append(found)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" not in self.open and "style" not in self.open:
            self.text.append(data)


def charts_in(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="text/plain" id="charts">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    charts: dict[str, Any] = json.loads(zlib.decompress(b85decode(found[1].replace(",", "<"))))
    return charts


def page_of(*digests: RunDigest) -> str:
    return html.render_page(html.name_by_folder(digests))


def words(page: str) -> str:
    return " ".join(" ".join(Page(page).text).split())


def everything(folder: Path) -> Path:
    """A run of three stages with a change of hooks, with evaluations and all that may be recorded."""
    stacks = ((), ("int8",), ("int8",))
    return make(
        folder, steps=60, stages=stacks, fidelity_every=4, groups=True, evaluated=(20, 40, 60), late=1
    )


def over_steps(charts: dict[str, Any]) -> list[dict[str, Any]]:
    found = [chart for one in charts.values() for chart in one.values()]
    return [chart for chart in found if chart["layout"]["xaxis"]["title"]["text"] == "step"]


def observed(folder: Path) -> Path:
    """The run as one of a script: `ddprun.observe` has no pipeline, and knows nothing of buffers before."""
    events = folder / "events.jsonl"
    kept = [line for line in events.read_text().splitlines(keepends=True) if '"buffers", "rank"' not in line]
    events.write_text("".join(kept).replace('"digest": "0", ', ""))
    return folder


def rewrite(folder: Path, kind: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change every record of a kind."""
    for file in (folder / kind).iterdir():
        records = [json.loads(line) for line in file.read_text().splitlines()]
        for record in records:
            change(record)
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def with_hooks(folder: Path, us_per_byte: float) -> Path:
    """A run over a link, through a hook that sends a quarter, for so much work for each byte that is sent."""

    def change(record: dict[str, Any]) -> None:
        record |= {"hooks": ["int8"], "bytes": 4 * record["wire_bytes"]}
        record["encode_us"] = round(us_per_byte * record["wire_bytes"])

    rewrite(folder, "buckets", change)
    events = folder / "events.jsonl"
    events.write_text(events.read_text().replace('"hooks": []', '"hooks": ["int8"]'))
    return folder
