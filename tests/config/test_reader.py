"""The reader survives any text, and keeps places."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddprun.config import PipelineError, load
from ddprun.config.faults import Source
from ddprun.config.tree import find_nearest
from ddprun.config.yaml_reader import parse_yaml

YAMLISH = st.text(alphabet="ab01: -[]{}?&*!|>'\"%@`#,\\\n\t~.<\0\u2028\ufeffé", max_size=200)


def data_of(text: str) -> Any:
    root, faults = parse_yaml(text, Source.from_text("file", 0, text))
    assert not faults, [fault.headline for fault in faults]
    assert root is not None
    return root.data()


@given(YAMLISH | st.text())
@example('"\\U00110000"')
@example('"\\UFFFFFFFF"')
@example("%YAML 1.99999999999999999999\n---\na")
@example("!<%ff> a")
@example("&a [*a]")
@example("? &a [*a]\n: *a")
@example("a: &a\nb: *a\n*a : 3")
@example("\ufeff\ufeffa: 1")
def test_no_text_makes_the_reader_raise(text: str) -> None:
    """Any text gives a tree, faults, or both, and every fault has its place in the text."""
    source = Source.from_text("file", 0, text)
    _, faults = parse_yaml(text, source)
    for fault in faults:
        assert 1 <= fault.place.line <= len(source.lines) + 1
        assert fault.place.column >= 1
        assert "\n" not in fault.headline.replace("\\n", "")


@settings(max_examples=300)
@given(st.binary(max_size=300) | YAMLISH.map(str.encode))
def test_no_bytes_make_load_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    """`load` raises PipelineError or nothing, whatever the file holds."""
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(raw)
    with pytest.raises(PipelineError) as caught:
        load(path)
    assert str(caught.value)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(
        alphabet=st.characters(
            exclude_categories=["Cs", "Cc"], exclude_characters="\u2028\u2029\ufeff\ufffe\uffff"
        )
    ),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(JSON)
def test_json_means_the_same_as_yaml(value: Any) -> None:
    """YAML 1.2 takes every JSON text for what it is."""
    assert data_of(json.dumps(value, ensure_ascii=False)) == value


def test_aliases_share_and_keep_the_place_of_the_anchor() -> None:
    """A value behind an alias is where its anchor is, so a fault points to the text that is to be mended."""
    text = "a: &x {b: 1}\nc: *x\n"
    root, _ = parse_yaml(text, Source.from_text("file", 0, text))
    assert root is not None
    assert root.data() == {"a": {"b": 1}, "c": {"b": 1}}
    place = find_nearest(root, ("c", "b")).node.place
    assert (place.line, place.column) == (1, 11)


def test_block_scalars_and_folding() -> None:
    """Literal and folded blocks read as YAML says."""
    assert data_of("a: |\n  x\n  y\nb: >-\n  x\n  y\n") == {"a": "x\ny\n", "b": "x y"}


@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r"])
def test_places_count_every_line_break_once(line_break: str) -> None:
    """Lines are counted alike whatever ends them."""
    text = line_break.join(["a: 1", "", "b: [1,", "  2]"])
    root, _ = parse_yaml(text, Source.from_text("file", 0, text))
    assert root is not None
    place = find_nearest(root, ("b", 1)).node.place
    assert (place.line, place.column) == (4, 3)
    assert place.source_line == "  2]"


def test_a_byte_order_mark_is_no_character_of_the_file(tmp_path: Path) -> None:
    """A byte order mark, as Windows editors write it, neither breaks the file nor shifts the columns."""
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfsed: 1\n")
    with pytest.raises(PipelineError) as caught:
        load(path)
    (place,) = (fault.place for fault in caught.value.faults if fault.path == "sed")
    assert (place.line, place.column) == (1, 1)


def test_tags_run_nothing(tmp_path: Path) -> None:
    """No tag constructs an object: the classic attack leaves no trace."""
    trace = tmp_path / "trace"
    path = tmp_path / "evil.yaml"
    path.write_text(f"model: !!python/object/apply:os.mkdir ['{trace}']\n")
    with pytest.raises(PipelineError, match="a pipeline may not have tags"):
        load(path)
    assert not trace.exists()
