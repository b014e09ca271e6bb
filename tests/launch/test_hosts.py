"""Several hosts, and what really goes over the wire: in network namespaces that the tests make."""

import contextlib
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.ailing import needs_faketime, skewed
from tests.engine.running import lines, summary
from tests.namespaces import Host, hosts, needs_namespaces
from tests.ranks import Finished, Running, ddprun

pytestmark = [needs_namespaces, pytest.mark.netns]

MLP = "mlp: {inputs: 64, hidden: [64, 64], outputs: 10}"
PIPELINE = """
model:
  mlp: {inputs: 64, hidden: [64, 64], outputs: 10}
data: digits
loader: {batch_size: 16}
optimizer: {sgd: {lr: 0.1, momentum: 0.9}}
stages:
  - train: {steps: 25}
  - train: {steps: 5, hooks: [fp16]}
  - evaluate: {metrics: [accuracy]}
"""


PIPELINES = Path(__file__).parents[2] / "pipelines"


@contextlib.contextmanager
def started_on_two_hosts(
    folder: Path,
    *options: str,
    file: str | Path = "two.yaml",
    setup: tuple[str, str] = ("true", "true"),
    environment: tuple[dict[str, str], dict[str, str]] = ({}, {}),
) -> Iterator[tuple[list[Host], list[Running]]]:
    """Start a file on two hosts with two ranks each; gives the hosts, and what runs there."""
    with hosts(2) as made, contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                Running(
                    file,
                    *options,
                    "--nnodes=2",
                    "--nproc-per-node=2",
                    "--rdzv-endpoint=node0:29400",
                    "--rdzv-id=two",
                    "--run-dir=two",
                    cwd=folder,
                    host=host,
                    setup=commands,
                    environment=variables,
                )
            )
            for host, commands, variables in zip(made, setup, environment, strict=True)
        ]
        yield made, started


def on_two_hosts(folder: Path, *options: str, **more: Any) -> list[tuple[int, str]]:
    """Run a file on two hosts (`started_on_two_hosts`); gives (exit code, stderr) of each."""
    with started_on_two_hosts(folder, *options, **more) as (_, started):
        finished = [running.wait(100) for running in started]
    return [(one.code, one.stderr) for one in finished]


def second_interface(number: int) -> str:
    """Give a host an interface that leads nowhere, and take it for the host's own: its name leads to it."""
    name, address = f"node{number}", f"10.99.0.{number + 1}"
    return (
        "ip link add dead0 type veth peer name dead1 && ip link set dead0 up && "
        f"ip addr add {address}/24 dev dead0 && "
        f"sed 's/.* {name}$/{address} {name}/' /etc/hosts >{name}.hosts && cat {name}.hosts >/etc/hosts"
    )


def test_two_hosts_end_with_the_loss_of_one(tmp_path: Path) -> None:
    """2 hosts x 2 ranks and 1 host x 4 ranks: the same loss and metrics, to the last bit.

    Each host's own name leads to an interface through which nobody can be reached, so hosts use the one that
    leads to the other. Host 1 sees an empty folder of its own where host 0 keeps the run: its records come to
    rank 0, and none is lost.
    """
    (tmp_path / "two.yaml").write_text(PIPELINE)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "two.yaml").write_text(PIPELINE)
    without_disk = f"{second_interface(1)} && mount --bind {elsewhere} {tmp_path} && cd {tmp_path}"
    for code, stderr in on_two_hosts(tmp_path, setup=(second_interface(0), without_disk)):
        assert code == 0, stderr
    one = ddprun("two.yaml", "--nproc-per-node", "4", "--run-dir", "one", cwd=tmp_path)
    assert one.code == 0, one.stderr
    ours, theirs = summary(tmp_path / "two"), summary(tmp_path / "one")
    assert ours["loss"] == theirs["loss"] is not None
    assert ours["metrics"] == theirs["metrics"]
    buckets = lines(tmp_path / "two", "buckets")
    leaving = {line["rank"] for line in buckets if line["between_hosts_bytes"]}
    assert len(leaving) == 2, "in a ring over two hosts one rank of each sends to the other host"
    assert not any(line["between_hosts_bytes"] for line in lines(tmp_path / "one", "buckets"))
    assert not (elsewhere / "two" / "steps").exists()
    for records in (buckets, lines(tmp_path / "two", "steps")):
        found = sorted((line["rank"], line["step"]) for line in records)
        assert found == [(rank, step) for rank in range(4) for step in range(1, 31)]


def test_hosts_of_one_name_are_refused(tmp_path: Path) -> None:
    """By all ranks, before they make process groups that would lead nowhere."""
    (tmp_path / "two.yaml").write_text(PIPELINE)
    (one, said), (two, other) = on_two_hosts(tmp_path, setup=("true", "hostname node0"))
    assert (one, two) == (2, 2), said + other
    told = "ranks 0-3 are on several hosts that are all called node0; give each host a name"
    assert (said + other).count(told) == 1  # by rank 0's host
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("quickstart", [], marks=pytest.mark.slow),
        (
            "hierarchical",
            ["--set=sync.hierarchical_sgd.hosts=null", "--set=hooks=[{hierarchical: {across: [int8]}}]"],
        ),
    ],
)
def test_the_pipelines_that_come_with_it(tmp_path: Path, name: str, options: list[str]) -> None:
    """On two hosts as their first lines say, with the loss of one host, which the file may cut in two."""
    file = PIPELINES / f"{name}.yaml"
    for code, stderr in on_two_hosts(tmp_path, *options, file=file):
        assert code == 0, stderr
    one = ddprun(file, "--nproc-per-node", "4", "--run-dir", "one", cwd=tmp_path)
    assert one.code == 0, one.stderr
    ours, theirs = summary(tmp_path / "two"), summary(tmp_path / "one")
    assert (ours["status"], ours["world_size"], ours["loss"]) == ("done", 4, theirs["loss"])
    assert ours["metrics"] == theirs["metrics"]


@needs_faketime
def test_hosts_whose_clocks_are_apart_do_not_train_alone(tmp_path: Path) -> None:
    """Torchelastic takes a host for lost whose signs of life seem old, and would go on without it."""
    (tmp_path / "two.yaml").write_text(PIPELINE)
    told = on_two_hosts(tmp_path, "--max-restarts=1", environment=({}, skewed(10)))
    assert all(code for code, _ in told), told
    text = "".join(stderr for _, stderr in told)
    assert "1 of at least 2 hosts; the others were considered lost, as when clocks are seconds apart" in text
    assert "Traceback" not in text
    assert not (tmp_path / "two" / "summary.json").exists()


def test_an_interface_that_is_not_there_is_named(tmp_path: Path) -> None:
    """With those that are."""
    (tmp_path / "two.yaml").write_text(PIPELINE)
    told = on_two_hosts(tmp_path, environment=({}, {"GLOO_SOCKET_IFNAME": "eth7"}))
    assert [code for code, _ in told] == [2, 2]
    text = "".join(stderr for _, stderr in told)
    assert text.count("node1: GLOO_SOCKET_IFNAME is eth7, but the interfaces here are e0, lo") == 1
    assert "Traceback" not in text


def test_two_hosts_join_by_kubeflows_variables(tmp_path: Path) -> None:
    """No flag is given: what torchrun would take from PET_…, ddprun takes, too."""
    (tmp_path / "two.yaml").write_text(PIPELINE)
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "node0"}
    with hosts(2) as made, contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                Running(
                    "two.yaml",
                    "--run-dir=two",
                    cwd=tmp_path,
                    host=host,
                    environment=variables | {"PET_MASTER_PORT": "29400", "PET_NODE_RANK": str(number)},
                )
            )
            for number, host in enumerate(made)
        ]
        finished = [running.wait(100) for running in started]
    assert [one.code for one in finished] == [0, 0], finished
    assert "ddprun: started by Kubeflow Trainer's variables (PET_…): host 0 of 2" in finished[0].stderr
    assert summary(tmp_path / "two")["world_size"] == 4


def test_ranks_of_two_hosts_join_by_rank_and_world_size(tmp_path: Path) -> None:
    """Each is started by itself, and nobody tells it which others are on its host."""
    (tmp_path / "two.yaml").write_text(PIPELINE)
    with hosts(2) as made, contextlib.ExitStack() as stack:
        started = []
        for rank, host in enumerate([made[0], made[1], made[0], made[1]]):
            variables = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
            running = Running("two.yaml", "--run-dir=two", cwd=tmp_path, host=host, environment=variables)
            started.append(stack.enter_context(running))
        finished = [running.wait(100) for running in started]
    assert [one.code for one in finished] == [0] * 4, finished
    told = "ddprun: started by a launcher that sets RANK and WORLD_SIZE: rank 0 of 4\n"
    assert [told in one.stderr for one in finished] == [True, False, False, False]
    buckets = lines(tmp_path / "two", "buckets")
    assert {line["rank"] for line in buckets if line["between_hosts_bytes"]} == {0, 1, 2, 3}, (
        "the ring crosses"
    )


def test_hierarchical_takes_the_launchers_hosts(tmp_path: Path) -> None:
    """2 hosts x 2 ranks: the same bits as one host split in two; between hosts goes what the formula says."""
    hooks = "hooks: [{hierarchical: {HOSTS within: [shared_memory], across: [int8]}}]"
    (tmp_path / "two.yaml").write_text(PIPELINE.replace("stages:", hooks.replace("HOSTS", "") + "\nstages:"))
    for code, stderr in on_two_hosts(tmp_path):
        assert code == 0, stderr
    (tmp_path / "one.yaml").write_text(
        PIPELINE.replace("stages:", hooks.replace("HOSTS", "hosts: 2,") + "\nstages:")
    )
    one = ddprun("one.yaml", "--nproc-per-node", "4", "--run-dir", "one", cwd=tmp_path)
    assert one.code == 0, one.stderr
    ours, theirs = summary(tmp_path / "two"), summary(tmp_path / "one")
    assert ours["loss"] == theirs["loss"] is not None
    assert ours["metrics"] == theirs["metrics"]
    (bucket,) = {line["numel"] for line in lines(tmp_path / "two", "buckets")}
    for line in lines(tmp_path / "two", "buckets"):
        if line["hooks"] == ["hierarchical"]:
            assert [leg["group"] for leg in line["legs"]] == ["within.0", "across.0", "across.1", "within.1"]
            assert line["wire_bytes"] == line["between_hosts_bytes"]  # nothing is sent inside a host
            assert abs(line["between_hosts_bytes"] / (bucket / 2 * 1.0156) - 1) < 0.1  # whole blocks


def test_uneven_hosts_and_shared_memory_between_hosts_are_bad_input(tmp_path: Path) -> None:
    """One message, on the screen of the first host, which says how the ranks lie. No restart is tried."""
    stack = "hooks: [shared_memory]\nstages:"
    (tmp_path / "two.yaml").write_text(PIPELINE.replace("stages:", stack))
    told = on_two_hosts(tmp_path, "--max-restarts=3")
    assert [code for code, _ in told] == [2, 2]
    text = "".join(stderr for _, stderr in told)
    assert len(re.findall("sums over the ranks of one host, but these are on node[01], node[01]", text)) == 1
    assert "restart" not in text
    assert "Traceback" not in text


ENDING = """
import os
import signal
import time
from pathlib import Path

from torch import nn


class Net(nn.Sequential):
    def __init__(self, node, how):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        self.how, self.calls = how if os.uname().nodename == node else "", 0
        if self.how == "raises":
            raise FileNotFoundError("no weights here")
        if self.how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "takes long":
            Path("taking-long").touch()
            time.sleep(1000)

    def forward(self, inputs):
        self.calls += 1
        if self.how == "raises in a step" and self.calls == 12:
            raise FileNotFoundError("no weights here")
        return super().forward(inputs)
"""


@pytest.mark.parametrize(
    ("node", "how"),
    [("node0", "raises"), ("node1", "raises"), ("node1", "is killed"), ("node0", "raises in a step")],
)
def test_a_rank_that_ends_on_another_host_ends_all_hosts(tmp_path: Path, node: str, how: str) -> None:
    """Also before the ranks are connected: the others wait for its address in the store, and nothing breaks.

    The cause is on the screen of its host. The other host, if it knows that, says nothing of its own.
    """
    (tmp_path / "two.yaml").write_text(PIPELINE.replace(MLP, f"ending.Net: {{node: {node}, how: {how}}}"))
    (tmp_path / "ending.py").write_text(ENDING)
    ended = on_two_hosts(tmp_path)
    assert [code for code, _ in ended] == [1, 1]
    here, other = (ended[index][1] for index in ((0, 1) if node == "node0" else (1, 0)))
    if how == "is killed":
        assert re.search("rank [0-3] was killed by SIGKILL", here)
        assert other == "ddprun: the run has ended on another host\n"
    else:
        assert len(re.findall("rank [0-3] failed .*no weights here", here)) == 1
        assert not re.search("failed|cannot|ended|gone", other), other


def test_a_second_ctrl_c_on_one_host_ends_the_others(tmp_path: Path) -> None:
    """They cannot go on without that host, and wait for its ranks to be connected."""
    (tmp_path / "two.yaml").write_text(PIPELINE.replace(MLP, "ending.Net: {node: node1, how: takes long}"))
    (tmp_path / "ending.py").write_text(ENDING)
    with started_on_two_hosts(tmp_path) as (_, started):
        end = time.monotonic() + 60
        while not (tmp_path / "taking-long").exists() and time.monotonic() < end:
            time.sleep(0.05)
        for _ in range(2):
            started[1].process.send_signal(signal.SIGINT)
            time.sleep(3)  # within one second, the second one would be the same request
        ended = [running.wait(60) for running in started]
    assert [one.code for one in ended] == [1, 130]
    assert ended[0].stderr == "ddprun: the run has ended on another host\n"


LARGE = """
model:
  mlp: {inputs: 64, hidden: [1000, 1000], outputs: 10}   # 4.3 MB
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.01}}
stages:
  - train: {steps: 10}
"""


def test_recorded_bytes_are_those_of_the_interface(tmp_path: Path) -> None:
    """The loopback of a namespace counts what two ranks send: what a long run sends more than a short one is
    what the records say, within 2 %, and with fp16 it is half.
    """
    (tmp_path / "large.yaml").write_text(LARGE)

    def run(steps: int, hooks: str) -> tuple[int, int]:
        """Bytes on the wire and in the records."""
        run_dir = tmp_path / f"{steps}{hooks}"
        options = [f"--set=stages[0].train.steps={steps}", f"--set=hooks={hooks}", f"--run-dir={run_dir}"]
        with hosts(1) as (host,):
            with Running("large.yaml", *options, cwd=tmp_path, host=host) as running:
                done = running.wait()
            assert done.code == 0, done.stderr
            return host.tx_bytes("lo"), summary(run_dir)["wire_bytes"]

    short, in_short = run(1, "[]")
    recorded = {}
    for hooks in ("[]", "[fp16]"):
        sent, recorded[hooks] = run(31, hooks)
        on_the_wire, in_records = sent - short, recorded[hooks] - in_short
        assert in_records > 29 * 4e6 * (1 if hooks == "[fp16]" else 2)
        assert abs(on_the_wire / in_records - 1) < 0.02, (hooks, on_the_wire, in_records)
    assert recorded["[fp16]"] * 2 == recorded["[]"]


HANGING = """
model: {halting.Net: {rank: 3}}
data: digits
loader: {batch_size: 16}
optimizer: {sgd: {lr: 0.1}}
stages:
  - train: {steps: 1000000}
launch: {timeout_s: 8}
"""

HALTING = """
import os
import time
from pathlib import Path

from torch import nn


class Net(nn.Sequential):
    def __init__(self, rank):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        self.calls, self.rank = 0, rank

    def forward(self, inputs):
        self.calls += 1
        if self.calls == 8 and os.environ["RANK"] == str(self.rank):
            Path("asleep").write_text(str(time.time()))
            time.sleep(1000)
        return super().forward(inputs)
"""


def hanging_on_two_hosts(folder: Path, rank: int, cut: bool) -> tuple[list[Finished], list[float], float]:
    """Two hosts with two ranks each, of which one hangs, or whose link goes down; how both ended, when, and
    when it began.
    """
    (folder / "two.yaml").write_text(HANGING)
    (folder / "halting.py").write_text(HALTING)
    interface = {"GLOO_SOCKET_IFNAME": "e0"}
    model = f"--set=model={{halting.Net: {{rank: {rank}}}}}"
    with started_on_two_hosts(folder, model, environment=(interface, interface)) as (made, started):
        mark = folder / ("two/steps/rank-00000.jsonl" if cut else "asleep")
        end = time.monotonic() + 60
        while not (mark.exists() and mark.stat().st_size) and time.monotonic() < end:
            time.sleep(0.05)
        if cut:
            made[1].cut()
        since = time.time()
        finished, ended = [], []
        for running in started:
            finished.append(running.wait(60))
            ended.append(time.time())
    return finished, ended, since


def test_a_rank_that_hangs_on_another_host_is_named_on_both(tmp_path: Path) -> None:
    """The launcher of its host says what it is at; one screen of the two shows it, and each rank's log."""
    finished, ended, since = hanging_on_two_hosts(tmp_path, 3, cut=False)
    assert [one.code for one in finished] == [1, 1]
    # Launchers of several hosts stay up for 4 s, so that the store does.
    assert all(one - since < 8 + 5 + 4 for one in ended), [one - since for one in ended]
    told = "".join(one.stderr for one in finished)
    assert told.count("the run hangs (stages[0].train, step 8): rank 3 did not arrive within 8 s\n") == 1, (
        told
    )
    assert told.count("the run hangs") == 1
    assert re.search(r"rank 3 .* is in forward of step 8 .*halting\.py:\d+ in forward", told)
    for rank in (0, 1, 2):
        log = (tmp_path / "two" / "logs" / f"rank-{rank:05}.log").read_text()
        assert "rank 3 did not arrive within 8 s" in log
        assert "halting.py" in log
        assert ("(on node1)" in log) == (rank < 2)


def test_a_link_that_is_down_is_named_on_both_hosts(tmp_path: Path) -> None:
    """Nobody can say what the other host's ranks are at; each host says that, and ends."""
    finished, ended, since = hanging_on_two_hosts(tmp_path, 9, cut=True)
    assert [one.code for one in finished] == [1, 1]
    # Torchelastic on the host without the store would go on to wait for that, and is ended.
    assert all(one - since < 8 + 5 + 4 + 6 for one in ended), [one - since for one in ended]
    for one, there, node in zip(finished, ("ranks 2-3", "ranks 0-1"), ("node1", "node0"), strict=True):
        assert one.stderr.count("the run hangs") == 1, one.stderr
        assert re.search(rf"{there} did not arrive within 8 s, or cannot be reached", one.stderr), one.stderr
        assert f"is on {node}, which does not answer: the host or the link to it is down" in one.stderr
