"""Whatever happens while checkpoints are written, or to them afterwards: a whole one is there."""

import contextlib
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddprun.checkpoint import folder
from ddprun.checkpoint.folder import steps_in
from tests.checkpoint.runs import final, prepare, run
from tests.engine.running import events, summary
from tests.namespaces import hosts, needs_namespaces
from tests.ranks import Running, ddprun

HOOKS = "[int8]"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the unbroken run ends with."""
    whole = tmp_path_factory.mktemp("whole")
    prepare(whole, "every_step", HOOKS)
    return final(run(whole, 2))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which a rank was killed after two checkpoints."""
    folder = tmp_path_factory.mktemp("killed")
    prepare(folder, "every_step", HOOKS)
    (folder / "kill").write_text("1 70")
    run(folder, 2, may_die=True)
    (folder / "kill").unlink()
    return folder


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "no manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, killed: Path, expected: dict[str, str], damage: str
) -> None:
    """The end is that of the unbroken run all the same, and what was damaged is kept."""
    broken = Path(shutil.copytree(killed, tmp_path / "broken"))
    run_dir = broken / "run"
    newest, before = steps_in(run_dir / "checkpoints")
    path = run_dir / "checkpoints" / folder.checkpoint_name(newest) / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-3] ^= 16
    if damage == "no manifest":
        (path.parent / "manifest.json").unlink()
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-100] if damage == "cut" else data)
    run(broken, 2, resuming=True)
    assert final(run_dir) == expected
    (told,) = [event for event in events(run_dir) if event["event"] == "checkpoint_skipped"]
    assert told["step"] == newest
    assert ("manifest.json" if damage == "no manifest" else path.name) in told["reason"]
    assert [event["step"] for event in events(run_dir) if event["event"] == "resumed"] == [before]
    assert (run_dir / "checkpoints" / f"{folder.checkpoint_name(newest)}.unused").is_dir()


def test_without_any_whole_checkpoint_the_run_ends(tmp_path: Path, killed: Path) -> None:
    """It names the newest, and what is wrong with it; checkpoints and records stay as they are."""
    broken = Path(shutil.copytree(killed, tmp_path / "broken"))
    run_dir = broken / "run"
    for step in steps_in(run_dir / "checkpoints"):
        (run_dir / "checkpoints" / folder.checkpoint_name(step) / "shared.json").write_text("{")
    root = run_dir / "checkpoints"
    newest, before = steps_in(root)
    records = (run_dir / "steps" / "rank-00000.jsonl").read_text()
    done = ddprun("resume", "run", "--nproc-per-node=2", cwd=broken)
    assert done.code == 2
    (line,) = [line for line in done.stderr.splitlines() if "can be used by all ranks" in line]
    assert f"; that of step {newest}: " in line
    assert "shared.json: 1 bytes instead of " in line
    assert "Traceback" not in done.stderr
    assert steps_in(root) == [newest, before]
    assert (run_dir / "steps" / "rank-00000.jsonl").read_text() == records


BIG = "{mlp: {inputs: 64, hidden: [1000], outputs: 10}}"  # about 1 MB of state


KILLING = """
import os
import random
import signal
import threading
import time
from pathlib import Path

import torch


class Samples(torch.utils.data.Dataset):
    \"\"\"Kills its rank some time after a checkpoint of this start has begun to be written.\"\"\"

    def __init__(self):
        victims, delay, when = Path("kill").read_text().split()
        if victims == "all" or victims == os.environ["RANK"]:
            args = (float(delay), when == "after-a-whole-one")
            threading.Thread(target=self.kill, args=args, daemon=True).start()

    def kill(self, delay, needs_whole):
        def names():
            return {path.name for path in Path("run/checkpoints").glob("*")}

        while needs_whole and all(name.startswith(".") for name in names()):
            time.sleep(0.001)
        before = names()
        while names() <= before:
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return torch.randn(1, 8, 8), index % 10
"""


@pytest.mark.parametrize("kills", [8, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_ranks_killed_while_checkpoints_are_written(tmp_path: Path, kills: int) -> None:
    """One rank, or all, at random moments, in one run that goes on after each: always a whole newest one."""
    prepare(tmp_path, "every_step", HOOKS, model=BIG)
    (tmp_path / "samples.py").write_text(KILLING)
    text = (tmp_path / "p.yaml").read_text()
    (tmp_path / "p.yaml").write_text(
        text.replace("every: 3", "every: 1").replace("epochs: 2", "steps: 10000000")
    )
    run_dir, root = tmp_path / "run", tmp_path / "run" / "checkpoints"
    draw = random.Random(kills)
    amid, reached = 0, 0
    for number in range(kills):
        victims, delay = draw.choice(["0", "1", "all"]), draw.random() * 0.2
        # The first start is killed as its first checkpoint begins: the next one may have to start anew.
        when = "after-a-whole-one" if number else "at-the-first"
        (tmp_path / "kill").write_text(f"{victims} {delay if number else 0} {when}")
        more = ["--or-resume"] if number else []
        done = ddprun("p.yaml", "--run-dir=run", *more, "--nproc-per-node=2", cwd=tmp_path)
        assert ("resuming after step " in done.stderr) == (reached > 0)
        amid += any(path.name.startswith(".") for path in root.iterdir())
        if not number and not steps_in(root):
            continue
        newest = steps_in(root)[0]
        found = folder.open_checkpoint(root, newest)
        folder.verify(found, found.files)
        for name in ("shared", "rank-00000", "rank-00001"):
            folder.read_part(found, name)
        assert newest >= reached, "what was there stays"
        reached = newest
    print(f"{kills} kills, {amid} of them while a checkpoint was being written; step {reached} reached")
    assert amid > kills / 4
    damaged = [event for event in events(run_dir) if event["event"] == "checkpoint_skipped"]
    assert not damaged


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A file system in memory of so many bytes."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


PLAIN = """
model: {mlp: {inputs: 64, hidden: [500], outputs: 10}}
data: digits
optimizer: adam
loader: {batch_size: 16}
stages: [{train: {steps: 60}}]
checkpoint: {every: 10, keep: 100}
launch: {nproc_per_node: 2}
"""


def test_a_disk_that_fills_up_costs_checkpoints_and_not_the_run(tmp_path: Path) -> None:
    """A warning, once; what is there stays whole, and with more room `resume` goes on from it. The run trains
    to its end, and has failed, since its weights are nowhere.
    """
    (tmp_path / "p.yaml").write_text(PLAIN)
    # Room for one: on a busy machine the second that is written may be the last.
    with small_disk(tmp_path / "disk", "900k") as disk:
        done = ddprun("p.yaml", "--run-dir=disk/run", cwd=tmp_path)
        assert done.code == 1, done.stderr
        assert "Traceback" not in done.stderr
        assert "the checkpoint of step 60, the last one: rank" in done.stderr
        left_out = [line for line in done.stderr.splitlines() if line.endswith("(older ones are kept)")]
        assert sum("No space left on device" in line for line in left_out) == 1, left_out
        steps = steps_in(disk / "run" / "checkpoints")
        assert steps
        assert steps[0] < 60, done.stderr
        for step in steps:
            found = folder.open_checkpoint(disk / "run" / "checkpoints", step)
            folder.verify(found, found.files)
        shutil.copytree(disk / "run", tmp_path / "run")
    resumed = ddprun("resume", "run", cwd=tmp_path)
    assert resumed.code == 0, resumed.stderr
    assert f"resuming after step {steps[0]} from run/checkpoints/" in resumed.stderr
    assert summary(tmp_path / "run")["steps"] == 60


@needs_namespaces
@pytest.mark.netns
def test_ranks_that_disagree_about_the_newest_take_one_that_all_have(tmp_path: Path) -> None:
    """Host 1 sees an older state of the folder of checkpoints, as a network disk may show it."""
    (tmp_path / "p.yaml").write_text(PLAIN)
    done = ddprun("p.yaml", "--run-dir=run", "--set=stages[0].train.steps=40", cwd=tmp_path)
    assert done.code == 0, done.stderr
    root = tmp_path / "run" / "checkpoints"
    before = steps_in(root)[1]  # 30, unless step 20's was still being written
    shutil.copytree(root, tmp_path / "older")
    shutil.rmtree(tmp_path / "older" / folder.checkpoint_name(40))
    flags = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=node0:29400",
        "--rdzv-id=x",
    ]
    with hosts(2) as made, contextlib.ExitStack() as stack:
        setups = ("true", f"mount --bind {tmp_path / 'older'} {root}")
        started = [
            stack.enter_context(
                Running(
                    "resume",
                    "run",
                    "--set=stages[0].train.steps=60",
                    *flags,
                    cwd=tmp_path,
                    environment={"GLOO_SOCKET_IFNAME": "e0"},
                    host=host,
                    setup=setup,
                )
            )
            for host, setup in zip(made, setups, strict=True)
        ]
        both = [running.wait(100) for running in started]
    assert [one.code for one in both] == [1, 1], [one.stderr for one in both]
    text = "".join(one.stderr for one in both)
    assert text.count("skipping the checkpoint of step 40: ") == 1
    assert (root / "step-00000040.unused").is_dir()
    name = folder.checkpoint_name(before)
    assert text.count(f"resuming after step {before} from run/checkpoints/{name}") == 1, text
    # What host 1 writes is not seen by host 0, so that no checkpoint comes of it, nor one of the end.
    assert ": rank 0 cannot write it" in text
    assert steps_in(root)[0] == before
    assert summary(tmp_path / "run")["steps"] == 60
