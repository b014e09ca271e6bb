"""What a search keeps on disk, and what it believes of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from ddprun.tune.state import FILE, Round, State, next_numbered_folder, resume_or_create_search

INPUTS = "a" * 64
ROUND = {
    "folder": "round-0",
    "candidates": [{"hooks": ["int8"]}],
    "codes": [0, 0, 0],
    "turn_steps": 20,
    "steps": 200,
}


def told(runs: Path, inputs: str = INPUTS) -> tuple[Path, State, list[str]]:
    said: list[str] = []
    folder, state = resume_or_create_search(runs, "p", inputs, said.append)
    return folder, state, said


def test_the_same_inputs_go_on(tmp_path: Path) -> None:
    """In the newest folder that has not finished; other inputs, and what has finished, begin anew."""
    runs = tmp_path / "runs"
    folder, state, _ = told(runs)
    state = state.model_copy(update={"spent_s": 3.5, "rounds": (Round.model_validate(ROUND),)})
    state.write(folder)
    assert told(runs)[:2] == (folder, state)
    other, fresh, _ = told(runs, "b" * 64)
    assert other != folder
    assert fresh == State(inputs="b" * 64)
    assert told(runs)[0] == folder
    state.model_copy(update={"finished": True}).write(folder)
    assert told(runs)[0] not in (folder, other)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b'{"v": 1}',
        b"\xff\xfe",
        b'{"inputs": ' * 2000,
        json.dumps({"inputs": INPUTS, "more": 1}).encode(),
        json.dumps({"inputs": INPUTS, "spent_s": -1}).encode(),
        json.dumps({"inputs": INPUTS, "spent_s": "1"}).encode(),
        json.dumps({"inputs": INPUTS}).encode().replace(b"}", b', "spent_s": NaN}'),
        json.dumps({"inputs": INPUTS, "costs": "../costs-0"}).encode(),
        json.dumps({"inputs": INPUTS, "rounds": [{**ROUND, "folder": "/tmp"}]}).encode(),
        json.dumps({"inputs": INPUTS, "rounds": [{**ROUND, "turn_steps": 0}]}).encode(),
    ],
)
def test_a_damaged_state_is_named_and_not_used(tmp_path: Path, damage: bytes) -> None:
    folder, _, _ = told(tmp_path)
    (folder / FILE).write_bytes(damage)
    with pytest.raises(ValueError, match=r"\w"):
        State.read(folder)
    other, state, said = told(tmp_path)
    assert other != folder
    assert state == State(inputs=INPUTS)
    assert len(said) == 1
    assert f"{folder} is skipped: its {FILE} cannot be used" in said[0]


def test_no_link_is_followed(tmp_path: Path) -> None:
    """Neither in place of a search's folder nor of its state."""
    folder, _, _ = told(tmp_path / "elsewhere")
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / folder.name).symlink_to(folder)
    (runs / "p-0").mkdir()
    (runs / "p-0" / FILE).symlink_to(folder / FILE)
    found, _, said = told(runs)
    assert not found.is_symlink()
    assert found.name not in (folder.name, "p-0")
    assert len(said) == 1


def test_a_state_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends while it writes leaves what was there."""
    folder, state, _ = told(tmp_path)

    def fail(*_: Any, **__: Any) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr("ddprun.tune.state.json.dumps", fail)
    with pytest.raises(KeyboardInterrupt):
        state.model_copy(update={"spent_s": 9.0}).write(folder)
    assert State.read(folder) == state
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_what_an_interrupted_run_left_stays(tmp_path: Path) -> None:
    (tmp_path / "round-0").mkdir()
    assert next_numbered_folder(tmp_path, "round").name == "round-1"
    assert next_numbered_folder(tmp_path, "costs").name == "costs-0"
