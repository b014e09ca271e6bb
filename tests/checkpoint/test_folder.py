"""A checkpoint is whole or not there, and damage is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ddprun.checkpoint import folder
from ddprun.checkpoint.codec import DamagedError, encode_state
from ddprun.checkpoint.folder import FileRecords
from ddprun_hooks.comm.control_channel import ControlChannel
from ddprun_hooks.comm.groups import RankGroup
from ddprun_hooks.testing import run_ranks
from tests.hooks.test_stacks import assert_same

STATE: dict[str, Any] = {"step": 7, "weights": torch.arange(5.0)}


def described(root: Path, step: int, ranks: int, files: FileRecords) -> folder.Checkpoint:
    return folder.Checkpoint(
        path=root / folder.checkpoint_name(step),
        step=step,
        world_size=ranks,
        nonfinite=None,
        layout="",
        files=files,
    )


def write(root: Path, step: int = 7, token: str = "t", ranks: int = 2) -> folder.Checkpoint:
    files: FileRecords = {}
    for name in ["shared", *map(folder.rank_part_name, range(ranks))]:
        files |= folder.write_part(
            folder.unfinished_checkpoint_path(root, step, token), name, encode_state(STATE)
        )
    checkpoint = described(root, step, ranks, files)
    folder.commit(folder.unfinished_checkpoint_path(root, step, token), checkpoint, files)
    return checkpoint


def verify_all(root: Path, step: int) -> folder.Checkpoint:
    found = folder.open_checkpoint(root, step)
    folder.verify(found, found.files)
    return found


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """And its name appears at the very end."""
    files = folder.write_part(
        folder.unfinished_checkpoint_path(tmp_path, 7, "t"), "rank-00000", encode_state(STATE)
    )
    assert folder.steps_in(tmp_path) == []
    files |= folder.write_part(
        folder.unfinished_checkpoint_path(tmp_path, 7, "t"), "shared", encode_state(STATE)
    )
    checkpoint = described(tmp_path, 7, 1, files)
    folder.commit(folder.unfinished_checkpoint_path(tmp_path, 7, "t"), checkpoint, files)
    assert folder.steps_in(tmp_path) == [7]
    found = verify_all(tmp_path, 7)
    assert_same(folder.read_part(found, "rank-00000"), STATE)
    assert found.bytes == sum(
        path.stat().st_size for path in found.path.iterdir() if path.name != "manifest.json"
    )


def test_the_same_step_again_takes_the_place(tmp_path: Path) -> None:
    """A run that went back over a step writes it anew."""
    write(tmp_path, token="a")
    (folder.open_checkpoint(tmp_path, 7).path / "shared.json").write_text("damaged")
    write(tmp_path, token="b")
    verify_all(tmp_path, 7)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_older_ones_are_deleted(tmp_path: Path) -> None:
    """By step, and what writing has left behind too."""
    for step in (500, 1500, 1000, 123_456_789):
        write(tmp_path, step)
    folder.write_part(
        folder.unfinished_checkpoint_path(tmp_path, 2000, "dead"), "shared", encode_state(STATE)
    )
    (tmp_path / "notes").mkdir()
    folder.prune(tmp_path, 2)
    folder.recover_interrupted_writes(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00001500", "step-123456789"]
    assert folder.steps_in(tmp_path) == [123_456_789, 1500]


def test_what_a_killed_run_has_left_of_a_deletion_keeps_nothing_from_being_deleted(tmp_path: Path) -> None:
    """A folder of that name, not empty, was in the way of the next one's rename for ever."""
    for step in (7, 8):
        write(tmp_path, step=step, token=str(step))
    (tmp_path / f".{folder.checkpoint_name(7)}.old").mkdir()
    (tmp_path / f".{folder.checkpoint_name(7)}.old" / "shared.json").write_text("half deleted")
    folder.prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == [folder.checkpoint_name(8)]


def test_one_that_was_being_replaced_gets_its_name_back(tmp_path: Path) -> None:
    """Killed between the two renamings: the older of the two is whole, and there."""
    write(tmp_path, token="a").path.rename(tmp_path / ".step-00000007.replaced")
    folder.write_part(folder.unfinished_checkpoint_path(tmp_path, 7, "b"), "shared", encode_state(STATE))
    assert folder.steps_in(tmp_path) == []
    folder.recover_interrupted_writes(tmp_path)
    verify_all(tmp_path, 7)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_a_damaged_one_does_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    """It is set aside, so that it does not push out those that are whole."""
    write(tmp_path, 9)
    folder.set_aside(tmp_path, 9)
    write(tmp_path, 9)
    folder.set_aside(tmp_path, 9)
    write(tmp_path, 8)
    folder.prune(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000008", "step-00000009.unused"]
    assert folder.steps_in(tmp_path) == [8]


def test_what_is_not_seen_is_no_checkpoint(tmp_path: Path) -> None:
    """A rank says that it has written a file, which is not where rank 0 looks, or only in part."""
    files: FileRecords = {}
    for name in ("shared", "rank-00000"):
        files |= folder.write_part(
            folder.unfinished_checkpoint_path(tmp_path, 7, "t"), name, encode_state(STATE)
        )
    path = folder.unfinished_checkpoint_path(tmp_path, 7, "t") / "rank-00000.json"
    path.write_text("{")
    checkpoint = described(tmp_path, 7, 1, files)
    with pytest.raises(OSError, match=r"rank-00000\.json is incomplete here"):
        folder.commit(folder.unfinished_checkpoint_path(tmp_path, 7, "t"), checkpoint, files)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        folder.commit(folder.unfinished_checkpoint_path(tmp_path, 7, "t"), checkpoint, files)
    assert folder.steps_in(tmp_path) == []


@pytest.mark.parametrize("name", ["shared.json", "rank-00001.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "longer"])
def test_damage_is_found_and_named(tmp_path: Path, name: str, damage: str) -> None:
    """A truncated file, a flipped bit, a missing file."""
    path = write(tmp_path).path / name
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "longer":
        path.write_bytes(data + b"\0")
    else:
        data[-2] ^= 1
        path.write_bytes(data)
    with pytest.raises(DamagedError, match=name):
        verify_all(tmp_path, 7)


@pytest.mark.parametrize(
    "change",
    [
        {"v": 99},
        {"step": 8},
        {"world_size": 3},
        {"world_size": 0},
        {"files": {"../../etc/passwd": {"bytes": 1, "sha256": ""}}},
        {"files": {"shared.json": {"bytes": "many", "sha256": ""}}},
        {"files": [1]},
        {"files": {}},
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """A version of tomorrow, another step, files elsewhere."""
    path = write(tmp_path).path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DamagedError, match="manifest"):
        folder.open_checkpoint(tmp_path, 7)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_json_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    """Torn, of another kind, nested without end."""
    path = write(tmp_path).path / "manifest.json"
    path.write_text(text)
    with pytest.raises(DamagedError, match="manifest"):
        folder.open_checkpoint(tmp_path, 7)


def test_a_file_that_cannot_be_read_is_waited_for_by_nobody(tmp_path: Path) -> None:
    """The receiver refuses it, and has the others. Nothing is written to where a link leads."""
    ours, theirs, elsewhere = tmp_path / "ours", tmp_path / "root" / "theirs", tmp_path / "elsewhere"
    ours.mkdir()
    elsewhere.mkdir()
    theirs.parent.mkdir()
    theirs.symlink_to(elsewhere)
    files = folder.write_part(ours, "rank-00000", encode_state(STATE)) | folder.write_part(
        ours, "shared", encode_state(STATE)
    )
    (ours / "rank-00000.json").unlink()

    def body(group: RankGroup) -> str:
        control = ControlChannel(group.process_groups[0])
        if group.rank == 0:
            folder.send_files(control, 1, ours, files)
            return ""
        folder.make_checkpoint_folder(theirs)
        with pytest.raises(OSError, match=r"rank-00000\.json did not arrive complete") as caught:
            folder.receive_files(control, 0, theirs, files)
        return str(caught.value)

    run_ranks(2, body)
    assert list(elsewhere.iterdir()) == []
    assert sorted(path.name for path in theirs.iterdir()) == sorted(files)
    for name in files.keys() - {"rank-00000.json"}:
        assert (theirs / name).read_bytes() == (ours / name).read_bytes()
