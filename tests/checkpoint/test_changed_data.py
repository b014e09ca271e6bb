"""Data that is not what it was when a run was broken off."""

import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from ddprun.engine.build import HeldOutData
from ddprun.engine.fingerprints import DatasetFingerprints, fingerprint
from tests.engine.running import events, lines
from tests.ranks import Finished, ddprun

MODULE = """
import random
from pathlib import Path

import torch


class Samples(torch.utils.data.Dataset):
    \"\"\"As many samples as a file says, with the number that it says in each.\"\"\"

    def __init__(self, name="train", noise=None):
        length, self.content = Path(name).read_text().split()
        self.length, self.noise, self.generator = int(length), noise, torch.Generator()
        self.generator.seed()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        features = torch.full((4,), float(index))
        features[0] = float(self.content)
        if self.noise == "torch":
            features += torch.rand(4)
        elif self.noise == "own":
            features += torch.rand(4, generator=self.generator)
        return features, index % 2


class Shard(Samples):
    \"\"\"Each rank's own part.\"\"\"

    def __init__(self):
        import torch.distributed as dist

        super().__init__()
        self.length //= dist.get_world_size()


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for index in range(int(Path("train").read_text().split()[0])):
            yield torch.full((4,), float(index)), index % 2


def seen(samples):
    \"\"\"A collate function that writes down which samples a batch is made of.\"\"\"
    with Path("seen").open("a") as file:
        for features, _ in samples:
            print(int(features[1]), file=file)
    return torch.utils.data.default_collate(samples)
"""

AUGMENTED = "{samples.Samples: {noise: torch}}"
PIPELINE = """
model: {mlp: {inputs: 4, hidden: [4], outputs: 2}}
data: {train: DATA}
loader: {batch_size: 5, collate: samples.seen}
optimizer: {sgd: {lr: 0.01}}
stages:
  - train: {LENGTH}
"""


def begin(
    folder: Path, length: str = "steps: 5", data: str = "samples.Samples", text: str = PIPELINE
) -> None:
    """Run it on 2 ranks over 100 samples to the end of its stage."""
    (folder / "samples.py").write_text(MODULE)
    for name in ("train", "test", "more"):
        (folder / name).write_text("100 1.0")
    (folder / "p.yaml").write_text(text.replace("LENGTH", length).replace("DATA", data))
    done = ddprun("p.yaml", "--run-dir=run", "--nproc-per-node=2", cwd=folder)
    assert done.code == 0, done.stderr
    (folder / "seen").unlink(missing_ok=True)


def go_on(folder: Path, length: str, *more: str, ranks: int = 2) -> Finished:
    """Resume it with a longer stage."""
    wanted = ("--set", f"stages[0].train.{length}", f"--nproc-per-node={ranks}")
    done = ddprun("resume", "run", *wanted, *more, cwd=folder)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def told(done: Finished) -> list[str]:
    return [line for line in done.stderr.splitlines() if "has changed" in line]


@pytest.mark.parametrize(
    ("data", "now", "difference"),
    [
        ("samples.Samples", "160 1.0", "160 samples here, and 100 in the checkpoint"),
        ("{samples.Samples: {noise: own}}", "40 1.0", "40 samples here, and 100 in the checkpoint"),
        (AUGMENTED, "100 2.0", "100 samples, as in the checkpoint, but different ones"),
    ],
)
def test_other_data_in_the_middle_of_an_epoch_is_refused(
    tmp_path: Path, data: str, now: str, difference: str
) -> None:
    """By name, with both lengths; `--set` accepts it, and the run comes to its end."""
    begin(tmp_path, data=data)
    (tmp_path / "train").write_text(now)
    done = go_on(tmp_path, "steps=16")
    assert done.code == 2, done.stderr
    assert f'"samples.Samples": data: {difference}' in done.stderr
    assert "data.train" in done.stderr
    assert not lines_after(tmp_path, 5)
    done = go_on(tmp_path, "steps=16", "--set", "checkpoint.on_changed_data=continue")
    assert done.code == 0, done.stderr
    assert told(done) == [f"data has changed: {difference}"]
    (event,) = [one for one in events(tmp_path / "run") if one["event"] == "data_changed"]
    assert (event["name"], event["how"], event["mid_epoch"]) == ("data", difference, True)
    assert max(line["step"] for line in lines(tmp_path / "run", "steps")) == 16


def lines_after(folder: Path, step: int) -> list[dict[str, Any]]:
    return [line for line in lines(folder / "run", "steps") if line["step"] > step]


@pytest.mark.parametrize(("before", "after"), [("steps: 10", "steps=26"), ("epochs: 1", "epochs=2")])
def test_data_that_grows_between_two_epochs_is_told_and_read(tmp_path: Path, before: str, after: str) -> None:
    """Each sample of the epoch that follows once, the new ones and the old."""
    begin(tmp_path, before)
    (tmp_path / "train").write_text("160 1.0")
    done = go_on(tmp_path, after)
    assert done.code == 0, done.stderr
    assert told(done) == ["data has changed: 160 samples here, and 100 in the checkpoint"]
    assert sum(line["samples"] for line in lines_after(tmp_path, 10)) == 160
    seen = Counter(map(int, (tmp_path / "seen").read_text().split()))
    assert set(seen) == set(range(160))
    first = 2 * 2 * 5  # each rank looks at a batch before its first step, once or more
    assert sum(count - 1 for count in seen.values()) <= 2 * first


@pytest.mark.parametrize("data", [AUGMENTED, "{samples.Samples: {noise: own}}"])
def test_data_that_is_the_same_goes_on(tmp_path: Path, data: str) -> None:
    """Whatever it draws at random, and from where."""
    begin(tmp_path, data=data)
    done = go_on(tmp_path, "steps=8")
    assert (done.code, told(done)) == (0, []), done.stderr


def test_a_stream_is_compared_with_nothing(tmp_path: Path) -> None:
    """It has no length; the resumed run skips to its place."""
    text = PIPELINE.replace("batch_size: 5", "batch_size: 5, shuffle: false")
    begin(tmp_path, data="samples.Stream", text=text)
    (tmp_path / "train").write_text("90 1.0")
    done = go_on(tmp_path, "steps=8")
    assert (done.code, told(done)) == (0, []), done.stderr


HELD_OUT = (
    PIPELINE.replace(
        "data: {train: DATA}",
        """
data: {train: DATA, evaluate: {samples.Samples: {name: test}}}""",
    )
    + """
  - evaluate: {data: {samples.Samples: {name: more}}}
  - train: {steps: 3, data: {samples.Samples: {name: more}}}
"""
)


@pytest.mark.parametrize(
    ("changed", "code", "names"),
    [
        ("test", 2, ["held-out data"]),
        ("more", 0, ["held-out data of stages[1]", "data of stages[2]"]),
    ],
)
def test_every_data_set_is_compared(tmp_path: Path, changed: str, code: int, names: list[str]) -> None:
    """Data held out beside training data counts as that; that of other stages is in no epoch."""
    begin(tmp_path, text=HELD_OUT.replace("stages:\n", "checkpoint: {every: 4}\nstages:\n"))
    newest = tmp_path / "run/checkpoints"
    for step in (8, 5):  # the run as it was at step 4
        for path in newest.glob(f"step-{step:08}"):
            path.rename(tmp_path / path.name)
    (tmp_path / changed).write_text("101 1.0")
    done = go_on(tmp_path, "steps=5")
    assert done.code == code, done.stderr
    difference = "101 samples here, and 100 in the checkpoint"
    if code:
        assert f"{names[0]}: {difference}, in the middle of an epoch;" in done.stderr
    else:
        assert sorted(told(done)) == sorted(f"{name} has changed: {difference}" for name in names)


def test_another_number_of_ranks_has_other_shards(tmp_path: Path) -> None:
    """Rank 0's own part is another one then, which says nothing of the data."""
    text = PIPELINE.replace("batch_size: 5", "batch_size: 5, sharded: true, shuffle: false")
    begin(tmp_path, "epochs: 1", "samples.Shard", text)
    done = go_on(tmp_path, "epochs=2", ranks=1)
    assert (done.code, told(done)) == (0, []), done.stderr


def test_a_checkpoint_of_an_older_version_says_nothing_of_data(tmp_path: Path) -> None:
    """It is resumed as ever."""
    begin(tmp_path)
    (newest,) = (tmp_path / "run/checkpoints").glob("step-*")
    shared = json.loads((newest / "shared.json").read_text())
    assert shared.pop("data")["data"]["length"] == 100
    assert shared["pipeline"]["checkpoint"].pop("on_changed_data") == "stop"
    (newest / "shared.json").write_text(json.dumps(shared))
    manifest = json.loads((newest / "manifest.json").read_text())
    content = (newest / "shared.json").read_bytes()
    described = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"]["shared.json"] = described
    (newest / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "train").write_text("160 1.0")
    done = go_on(tmp_path, "steps=8")
    assert (done.code, told(done)) == (0, []), done.stderr
    assert "resuming after step 5" in done.stderr
    assert "on_changed_data" not in done.stderr, "a key that is new has not changed"


class Given(Dataset[Any]):
    """What a function gives."""

    def __init__(self, length: int, give: Any) -> None:
        self.length, self.give, self.read = length, give, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.give(index)


def test_a_fingerprint_reads_eight_samples_from_the_first_to_the_last() -> None:
    """And nothing that is drawn at random afterwards is another number."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    data = Given(
        1000, lambda index: {"x": [torch.rand(2), np.random.rand(), random.random()], "y": str(index)}
    )
    found = fingerprint(data)
    assert sorted(set(data.read)) == [0, 142, 285, 428, 570, 713, 856, 999]
    assert len(data.read) == 16
    assert len(set(found["digests"])) == 8
    assert found == fingerprint(data)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert repr(np.random.get_state(legacy=False)) == repr(states[2])


def test_a_sample_that_cannot_be_read_is_left_out() -> None:
    """The step that needs it says so; the others count."""

    def give(index: int) -> int:
        if index == 0:
            raise OSError("damaged")
        return index

    found = fingerprint(Given(9, give))["digests"]
    assert found[0] is None
    assert None not in found[1:]


@pytest.mark.parametrize("length", [0, 1, 3, 8])
def test_few_samples_are_read_each(length: int) -> None:
    """There may be none."""
    data = Given(length, float)
    assert fingerprint(data)["length"] == length
    assert sorted(set(data.read)) == list(range(length))


def test_of_data_that_draws_from_elsewhere_only_the_length_counts() -> None:
    """Even if it draws rarely: one sample that differs is enough."""
    own = random.Random(0)
    assert fingerprint(Given(40, lambda index: own.random() < 0.5)) == {"length": 40, "digests": []}


def test_of_a_checkpoint_of_an_earlier_version_only_the_length_counts() -> None:
    """Its digests of images and dataclasses are of their type alone."""
    none: Any = SimpleNamespace(by_name=dict)
    held_out = HeldOutData(Given(9, float), lambda problem, _: ValueError(problem), None)
    found = DatasetFingerprints(none, held_out, {}, rank=0)
    (name, saved), *_ = found.for_checkpoint().items()
    assert not found.find_changes({name: saved})
    other = {**saved, "digests": ["0"] * 8}
    assert found.find_changes({name: other})
    del other["by_value"]
    assert not found.find_changes({name: other})
    assert found.find_changes({name: {**other, "length": 8}})
