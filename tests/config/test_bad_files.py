"""Every fault that a file or an override can have comes out, at its place and in its words."""

import time
from pathlib import Path

import jsonschema
import pytest

from ddprun.config import PipelineError, load
from ddprun.config.catalog import json_schema
from ddprun.config.yaml_reader import read_pipeline_file
from tests.config import bad

VALIDATOR = jsonschema.Draft202012Validator(json_schema())


@pytest.mark.parametrize("case", bad.ALL, ids=lambda case: case.path.stem)
def test_exactly_the_expected_faults_come_out(case: bad.Bad) -> None:
    """A bad file gives all of its faults at once, each with place, key path and message, and no other."""
    with pytest.raises(PipelineError) as caught:
        load(case.path, case.overrides)
    told = [fault.headline.removeprefix(f"{case.path}:").strip() for fault in caught.value.faults]
    assert case.expected, "the file expects nothing"
    assert len(told) == len(case.expected), "\n".join(told)
    for expected, line in zip(case.expected, told, strict=True):
        assert bad.matches(expected, line), line


@pytest.mark.parametrize("case", bad.ALL, ids=lambda case: case.path.stem)
def test_every_fault_quotes_its_line(case: bad.Bad) -> None:
    """Under each fault that has a place stands the line itself, and a caret under the column."""
    with pytest.raises(PipelineError) as caught:
        load(case.path, case.overrides)
    for fault in caught.value.faults:
        quoted, column = fault.place.source_line, fault.place.column
        if fault.place.line and quoted.strip():
            head, line, caret = str(fault).split("\n")
            assert head == fault.headline
            assert caret.strip() == "^"
            assert column <= len(quoted) + 1
            above, meant = line[caret.index("^") :][:1], quoted[column - 1 :][:1]
            assert above == (meant if meant.isprintable() or meant == "\t" else "\ufffd")


@pytest.mark.parametrize(
    "case", [case for case in bad.ALL if not case.overrides], ids=lambda case: case.path.stem
)
def test_the_json_schema_refuses_what_it_can_tell(case: bad.Bad) -> None:
    """The schema that editors use refuses what `check` refuses, where JSON Schema can say it at all."""
    root, faults = read_pipeline_file(case.path)
    if faults:
        assert case.schema_refuses is None, "what is no YAML never reaches a schema"
    else:
        assert root is not None
        assert VALIDATOR.is_valid(root.data()) is not case.schema_refuses


def test_there_are_enough_bad_files() -> None:
    """Bad files are found at all; a wrong folder would make every test above pass."""
    assert len(bad.ALL) >= 45


def test_a_missing_file_is_one_fault_with_a_suggestion(tmp_path: Path) -> None:
    """A file that is not there is one fault, which names a file of the folder that was probably meant."""
    (tmp_path / "digits.yaml").write_text("model: mlp\n")
    path = tmp_path / "digit.yaml"
    assert faults_of(path) == [f'{path}: there is no such file (did you mean "{tmp_path / "digits.yaml"}"?)']


def test_a_directory_is_one_fault(tmp_path: Path) -> None:
    """A directory in place of a file is told as such."""
    assert faults_of(tmp_path) == [f"{tmp_path}: this is a directory; name a pipeline file in it"]


def test_a_file_below_a_file_is_one_fault(tmp_path: Path) -> None:
    """Whatever else the system refuses is told in its words, without a traceback."""
    (tmp_path / "a.yaml").write_text("")
    path = tmp_path / "a.yaml" / "b.yaml"
    assert faults_of(path) == [f"{path}: the file cannot be read: not a directory"]


def test_an_unreadable_file_is_one_fault(tmp_path: Path) -> None:
    """A file without read permission is one fault."""
    path = tmp_path / "secret.yaml"
    path.write_text("model: mlp\n")
    path.chmod(0)
    try:
        path.open().close()
    except PermissionError:
        assert faults_of(path) == [f"{path}: the file cannot be read: permission denied"]
    else:
        pytest.skip("this user may read every file (root), so no file is unreadable")


def test_an_unreadable_file_is_one_fault_whoever_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for root, which the system refuses nothing."""
    path = tmp_path / "secret.yaml"

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert faults_of(path) == [f"{path}: the file cannot be read: permission denied"]


@pytest.mark.parametrize(("size", "refused"), [(64 * 1024, False), (64 * 1024 + 1, True)])
def test_a_file_may_be_64_kib_long(tmp_path: Path, size: int, refused: bool) -> None:
    """A file of 64 KiB is read, and one byte more is refused without reading on."""
    path = tmp_path / "long.yaml"
    text = "seed: x\n"
    path.write_text(text + "#" * (size - len(text)))
    told = faults_of(path)
    assert (told == [f"{path}: the file is longer than 64 KiB; at most 64 KiB"]) == refused
    assert any("whole number" in line for line in told) != refused


def test_an_endless_file_is_refused() -> None:
    """A device that never ends is read up to the cap only."""
    assert faults_of(Path("/dev/zero")) == ["/dev/zero: the file is longer than 64 KiB; at most 64 KiB"]


@pytest.mark.parametrize(
    "unit", ["[", "{", "- ", "? ", "a: ", "&a ", "*a ", "[a: ", "!x ", '"', "- a\n", "a:\n "]
)
def test_no_64_kib_take_long(tmp_path: Path, unit: str) -> None:
    """Whatever 64 KiB hold, they are refused within moments, and nothing recurses."""
    path = tmp_path / "long.yaml"
    path.write_text(unit * (64 * 1024 // len(unit)))
    start = time.process_time()
    assert faults_of(path)
    assert time.process_time() - start < 3, "far beyond the 0.3 s it takes on a slow machine"


def faults_of(path: Path) -> list[str]:
    with pytest.raises(PipelineError) as caught:
        load(path)
    return [fault.headline for fault in caught.value.faults]
