"""A long run on two hosts, and a fault every 20 seconds: it ends with the bits of an unbroken one."""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from ddprun.checkpoint import folder
from ddprun.checkpoint.folder import steps_in
from tests.checkpoint.runs import final
from tests.engine.running import events, lines, summary
from tests.namespaces import Host, hosts, needs_namespaces
from tests.ranks import Running, ddprun

SECONDS = float(os.environ.get("DDPRUN_SOAK_S", 30 * 60))
EVERY_S = 20.0

pytestmark = [
    needs_namespaces,
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.timeout(300 + 3 * SECONDS),
]

MODULE = """
import os
import time
from pathlib import Path

from torch.utils.data import Dataset

from ddprun.zoo.data import digits

TRAIN, EVALUATE = digits(held_out=0.2, split_seed=0, folder=Path())
PAUSE_S = float(os.environ.get("PAUSE_S", 0))


class Train(Dataset):
    def __len__(self):
        return len(TRAIN)

    def __getitem__(self, index):
        time.sleep(PAUSE_S)
        return TRAIN[index]


def evaluate():
    return EVALUATE
"""

PIPELINE = """
model:
  mlp: {inputs: 64, hidden: [64], outputs: 10}
data: {train: soak.Train, evaluate: soak.evaluate}
loader: {batch_size: 16}
optimizer: {sgd: {lr: 0.01, momentum: 0.9}}
sync: {local_sgd: {every: 4}}
hooks: [int8]
stages:
  - train: {steps: 10000000}
  - evaluate: {metrics: [accuracy]}
checkpoint: {every: 25, keep: 3}
timings: {every: 10}
launch: {nproc_per_node: 2, nnodes: 2, timeout_s: 4, max_restarts: 100000}
"""


class Run:
    """The launchers of both hosts, started again when a fault has taken them."""

    def __init__(self, place: Path, made: list[Host], stack: ExitStack) -> None:
        self.place, self.made, self.stack = place, made, stack
        self.root = place / "run" / "checkpoints"
        self.started: list[Running] = []
        self.told = ""
        self.start(["two.yaml", "--run-dir=run"])

    def start(self, command: list[str]) -> None:
        self.started = [self.one(host, command) for host in self.made]

    def one(self, host: Host, command: list[str]) -> Running:
        meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400", "--rdzv-id=soak"]
        return self.stack.enter_context(
            Running(
                *command,
                *meeting,
                cwd=self.place,
                environment={"GLOO_SOCKET_IFNAME": "e0", "PAUSE_S": "0.001"},
                host=host,
            )
        )

    def ranks(self) -> list[int]:
        return [pid for running in self.started for pid in running.ranks()]

    def keep_going(self) -> None:
        """Start again what has ended: without the host that holds the store, with `resume` on both."""
        gone = [running.process.poll() is not None for running in self.started]
        if not any(gone):
            return
        for running, is_gone in zip(self.started, gone, strict=True):
            if is_gone:
                self.told += running.wait(30).stderr
        if gone == [False, True]:
            self.started[1] = self.one(self.made[1], self.again())
            return
        for running in self.started:
            if running.process.poll() is None:
                running.process.send_signal(signal.SIGKILL)
                self.told += running.wait(30).stderr
        self.start(self.again())

    def again(self) -> list[str]:
        begun = (self.place / "run" / "run.json").exists()
        return ["resume", "run"] if begun else ["two.yaml", "--run-dir=run"]


def kill_a_rank(run: Run, draw: random.Random) -> None:
    with contextlib.suppress(ProcessLookupError, IndexError):
        os.kill(draw.choice(run.ranks()), signal.SIGKILL)


def stop_a_rank(run: Run, draw: random.Random) -> None:
    with contextlib.suppress(ProcessLookupError, IndexError):
        os.kill(draw.choice(run.ranks()), signal.SIGSTOP)


def kill_a_host(run: Run, draw: random.Random) -> None:
    draw.choice(run.started).process.send_signal(signal.SIGKILL)


def cut_the_link(run: Run, draw: random.Random) -> None:
    run.made[1].cut()
    time.sleep(draw.random() * 12)
    run.made[1].mend()


def damage_the_newest(run: Run, draw: random.Random) -> None:
    """A flipped bit in a file, and then a rank is killed."""
    with contextlib.suppress(OSError, IndexError):
        path = draw.choice(list((run.root / folder.checkpoint_name(steps_in(run.root)[0])).iterdir()))
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    kill_a_rank(run, draw)


FAULTS: list[Callable[[Run, random.Random], None]] = [
    kill_a_rank,
    stop_a_rank,
    kill_a_host,
    cut_the_link,
    damage_the_newest,
]


def test_a_fault_every_20_seconds(tmp_path: Path) -> None:
    """Killed and stopped ranks, lost hosts, a link that goes down, damaged checkpoints: the same end."""
    (tmp_path / "soak.py").write_text(MODULE)
    (tmp_path / "two.yaml").write_text(PIPELINE)
    draw = random.Random(0)
    happened: Counter[str] = Counter()
    with hosts(2) as made, ExitStack() as stack:
        run = Run(tmp_path, made, stack)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            until = time.monotonic() + EVERY_S
            while time.monotonic() < until:
                run.keep_going()
                time.sleep(0.2)
            fault = draw.choice(FAULTS)
            fault(run, draw)
            happened[fault.__name__] += 1
            print(f"{fault.__name__}, checkpoints {steps_in(run.root)}", flush=True)
        until = time.monotonic() + 90
        before = steps_in(run.root)[:1]
        while steps_in(run.root)[:1] == before:  # it has got over the last fault
            assert time.monotonic() < until, "nothing goes on after the last fault"
            run.keep_going()
            time.sleep(0.2)
        run.started[0].process.send_signal(signal.SIGINT)
        stopped = [running.wait(60) for running in run.started]
        assert [one.code for one in stopped] == [130, 130], [one.stderr for one in stopped]
        steps = summary(tmp_path / "run")["steps"]
        more = f"--set=stages[0].train.steps={steps + 100}"
        run.start(["resume", "run", more])
        done = [running.wait(300) for running in run.started]
        run.told += "".join(one.stderr for one in [*stopped, *done])
    assert [one.code for one in done] == [0, 0], [one.stderr for one in done]
    assert "Traceback" not in run.told
    flags = [more, "--nnodes=1", "--nproc-per-node=4"]
    whole = ddprun("two.yaml", "--run-dir=whole", *flags, cwd=tmp_path, timeout_s=3600)
    assert whole.code == 0, whole.stderr
    starts = [event for event in events(tmp_path / "run") if event["event"] == "started"]
    print(f"{sum(happened.values())} faults in {SECONDS:g} s: {dict(happened)}")
    print(f"{len(starts)} starts, {steps + 100} steps")
    ours, theirs = summary(tmp_path / "run"), summary(tmp_path / "whole")
    for key in ("loss", "metrics", "samples", "steps"):
        assert ours[key] == theirs[key], key
    assert final(tmp_path / "run") == final(tmp_path / "whole"), "all tensors of all ranks"
    told = [
        [(line["rank"], line["step"], line["loss"]) for line in lines(tmp_path / name, "steps")]
        for name in ("run", "whole")
    ]
    assert told[0] == told[1]
