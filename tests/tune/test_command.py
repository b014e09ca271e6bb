"""`ddprun tune` as a command: short runs, the winner's file, and Ctrl-C."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from ddprun.cli import main
from ddprun.config import load
from tests.ranks import Finished, Running, ddprun

Out = pytest.CaptureFixture[str]

SLOW = """
import time

from ddprun_hooks import Hook


class Slow(Hook):
    async def __call__(self, payload, comm):
        time.sleep(0.03)
        return await comm.reduce(payload.tensor)
"""
PIPELINE = """# digits, slowly
model: {mlp: {inputs: 64, hidden: [32], outputs: 10}}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.1}}
hooks: [slow.Slow]  # on purpose
stages:
  - train: {steps: 60}
  - evaluate
launch: {nproc_per_node: 2}
"""
VARY = ("--vary=hooks=[[], [{topk: {density: 0.001}}]]", "--vary=sync=[every_step]")
TUNE = ("tune", "p.yaml", *VARY, "--minutes=8", "--floor=cosine=0.99")


def made(folder: Path, text: str = PIPELINE) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "p.yaml").write_text(text)
    (folder / "slow.py").write_text(SLOW)
    return folder


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """The folder of a search that has found something, and what it said."""
    folder = made(tmp_path_factory.mktemp("tuned") / "work")
    return folder, ddprun(*TUNE, "--format=json", cwd=folder)


@pytest.fixture
def folder(tuned: tuple[Path, Finished], tmp_path: Path) -> Path:
    """A copy of that folder, without the winner's file."""
    found = Path(shutil.copytree(tuned[0], tmp_path / "work"))
    (found / "p.tuned.yaml").unlink()
    return found


def measured(folder: Path) -> str:
    """The run that told the costs."""
    (found,) = folder.glob("runs/tune/*/costs")
    return str(found.relative_to(folder))


def test_a_slow_hook_is_found(tuned: tuple[Path, Finished]) -> None:
    """By real runs: the winner is faster than the twin's noise, and what is below the floor is out."""
    _, done = tuned
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["winner"] == {"hooks": []}
    by_hooks = {str(one["changes"]["hooks"]): one for one in found["candidates"]}
    assert set(by_hooks) == {"[]", "[{'topk': {'density': 0.001}}]"}
    best, lossy = by_hooks["[]"]["measured"], by_hooks["[{'topk': {'density': 0.001}}]"]["measured"]
    assert best["verdict"] == "faster"
    assert best["times_file_low"] > 1.2
    assert best["out"] is None
    assert re.fullmatch(r"its cosine is 0\.\d{4}, the floor 0\.99", lossy["out"])
    assert found["written"] == "p.tuned.yaml"
    assert "round 1: " in done.stderr


def test_the_winner_runs(tuned: tuple[Path, Finished], capsys: Out) -> None:
    """Its file has the user's keys, passes `ddprun check`, and runs as it is."""
    folder, _ = tuned
    file = folder / "p.tuned.yaml"
    lines = file.read_text().splitlines()
    assert lines[0].startswith("# Written by `ddprun tune p.yaml` on ")
    heading = [line for line in lines if line.startswith("#")]
    assert heading[-2:] == ["# Changed:", "# - hooks: [] (was [slow.Slow])"]
    assert list(load(file).root.data()) == list(load(folder / "p.yaml").root.data())
    assert main(["check", str(file)]) == 0
    capsys.readouterr()
    assert load(file).pipeline.train_stages()[0].steps == 60
    done = ddprun("p.tuned.yaml", "--set", "stages=[train: {steps: 2}]", cwd=folder)
    assert done.code == 0, done.stderr


def test_an_interrupt(tmp_path: Path) -> None:
    """Exit code 130 in the midst of a round; the costs can be used again, by the option that is named."""
    made(tmp_path)
    with Running(*TUNE, cwd=tmp_path) as running:
        end = time.monotonic() + 90
        while not any(path.stat().st_size for path in tmp_path.glob("runs/tune/*/round-1/*/steps/*.jsonl")):
            assert running.process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        os.kill(running.process.pid, signal.SIGINT)
        done = running.wait(60)
    assert done.code == 130, done.stderr
    assert "Traceback" not in done.stderr
    option = re.search(r"interrupted; (--from \S+) uses the costs that were measured\n", done.stderr)
    assert option is not None
    assert not (tmp_path / "p.tuned.yaml").exists()
    known = ("--vary=hooks=[[slow.Slow]]", VARY[1], *option[1].split())
    again = ddprun("tune", "p.yaml", *known, cwd=tmp_path)
    assert again.code == 0, again.stderr
    assert "a short run measures" not in again.stderr


def test_nothing_is_changed_where_nothing_gains(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """No real run is started, no file is written, and the exit code is 0."""
    monkeypatch.chdir(folder)
    (folder / "p.yaml").write_text(PIPELINE.replace("[slow.Slow]", "[]"))
    arguments = ["tune", "p.yaml", "--vary=hooks=[[slow.Slow]]", VARY[1], f"--from={measured(folder)}"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "other settings" not in err, "the measured run's other hooks are no matter"
    assert "Change nothing: no other candidate is predicted to be better." in out
    assert not (folder / "p.tuned.yaml").exists()


@pytest.mark.parametrize(
    ("hooks", "sync", "words"),
    [
        (
            "[]",
            "[{local_sgd: {every: 4}}]",
            "within --minutes, ranks would synchronise too few times with sync={local_sgd: ",
        ),
        ("[slow.Slow]", "[every_step]", "--minutes leaves no time for more runs"),
    ],
)
def test_no_time_for_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out, hooks: str, sync: str, words: str
) -> None:
    """Why nothing was run is told, and what is predicted is shown."""
    monkeypatch.chdir(folder)
    (folder / "p.yaml").write_text(PIPELINE.replace("[slow.Slow]", hooks))
    arguments = ["tune", "p.yaml", "--vary=hooks=[[]]", f"--vary=sync={sync}", f"--from={measured(folder)}"]
    assert main([*arguments, "--minutes=0.001"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"Change nothing: {words}" in out
    assert not (folder / "p.tuned.yaml").exists()


def test_hosts_that_are_not_here(folder: Path) -> None:
    """By prediction alone, which is said; over a slow link what sends less wins."""
    done = ddprun(
        "tune",
        "p.yaml",
        "--set=hooks=[]",
        *VARY,
        f"--from={measured(folder)}",
        *("--nnodes=2", "--nproc-per-node=2", "--link=100kbit", "--latency=1ms", "--output=slow.yaml"),
        cwd=folder,
        fresh=True,
    )
    assert done.code == 0, done.stderr
    assert "4 ranks on 2 hosts, 100 kbit/s, 1 ms between hosts\n" in done.stdout
    assert "by prediction alone: the 2 hosts do not take part (give --rdzv-endpoint on each)." in done.stdout
    assert (
        "Winner, with lossy hooks: hooks=[{topk: {density: 0.001}}]. By prediction, a step takes "
        in done.stdout
    )
    assert "What that costs in learning was not measured." in done.stdout
    heading = " ".join((folder / "slow.yaml").read_text().replace("\n# ", " ").split())
    assert "Nothing was run with it, because the 2 hosts do not take part" in heading
    assert load(folder / "slow.yaml").pipeline.hooks[0].name == "topk"


def test_a_winner_that_cannot_be_written_is_told_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """With exit code 1. The temporary file's name would be longer than a name may be."""
    monkeypatch.chdir(folder)
    hosts = ("--nnodes=2", "--nproc-per-node=2", "--link=100kbit")
    output = f"{'x' * 250}.yaml"
    arguments = ("--set=hooks=[]", *VARY, f"--from={measured(folder)}", *hosts, f"--output={output}")
    assert main(["tune", "p.yaml", *arguments]) == 1
    out, err = capsys.readouterr()
    assert "Winner, with lossy hooks: hooks=[{topk: {density: 0.001}}]. By prediction, a step takes " in out
    assert "It is written to" not in out
    assert f"cannot write {output}: File name too long\n" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vary=hooks=[[fp17]]"], 'did you mean "fp16"'),
        (["--vary=seed=[1, 2]"], '"seed" cannot be tuned; keys: sync, hooks, ddp.bucket_cap_mb, accumulate'),
        (["--vary=hooks=fp16"], "hooks: is not a list of values"),
        (["--vary=sync=[every_step]", "--vary=sync=[every_step]"], '"sync" is given twice'),
        (["--floor=cosine=2"], "a cosine floor is above 0 and at most 1"),
        (["--floor=speed=2"], "write cosine=0.99 or loss=+1%"),
        (["--minutes=0"], "0.0 is not in the range 0<x<=10080"),
        (["--minutes=inf"], "inf is not in the range 0<x<=10080"),
        (["--minutes=nan"], "nan is not a finite number"),
        (["--link=fast"], '"fast" is not a rate'),
        (["--link=1Mbit"], "it is a link between hosts, and there is one: set more with --nnodes"),
        (["--nnodes=2", "--floor=loss=1%"], "floors need real runs, and the 2 hosts do not take part"),
        (["--output=p.yaml"], "p.yaml already exists"),
        (["--output=out.txt"], "out.txt does not end in .yaml"),
        (["--output=no/out.yaml"], "there is no folder no"),
        (["--output=/proc/sys/out.yaml"], "cannot be written: no file can be made in /proc/sys"),
        (["--from=nowhere"], "Directory 'nowhere' does not exist"),
        (["--set=stages=[forward: {steps: 2}]"], "no stage trains: there is nothing to tune"),
        (["--set=hoks=[]"], 'did you mean "hooks"'),
        (["--set=sync={local_sgd: {every: {seconds: 1}}}"], "sync: has rounds, which cannot be predicted"),
        (
            ["--from=.", "--set=stages=[train: {steps: 4}, train: {steps: 4, freeze: ['1.*']}]"],
            "stages[1].train.freeze: stages freeze different parameters, so one cannot be predicted",
        ),
    ],
)
def test_bad_input_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out, arguments: list[str], words: str
) -> None:
    """Exit code 2, and nothing is made."""
    monkeypatch.chdir(made(tmp_path))
    assert main(["tune", "p.yaml", *arguments]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert out == ""
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_too_little_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    """What is too short is named."""
    monkeypatch.chdir(made(tmp_path))
    assert main(["tune", "p.yaml", "--minutes=0.01"]) == 1
    assert "had 1 s, a third of --minutes, which is too short" in capsys.readouterr().err


def test_a_run_that_tells_no_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    """A folder that is no run's is named, and the exit code is 2."""
    monkeypatch.chdir(made(tmp_path))
    (tmp_path / "empty").mkdir()
    assert main(["tune", "p.yaml", "--from=empty"]) == 2
    assert "empty" in capsys.readouterr().err


def test_a_rendezvous_that_is_none_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """The flag is named, and the exit code is 2."""
    monkeypatch.chdir(made(tmp_path))
    assert main(["tune", "p.yaml", "--nnodes=2", "--rdzv-endpoint=127.0.0.1:x"]) == 2
    told = capsys.readouterr().err
    assert "--rdzv-endpoint" in told
    assert "'127.0.0.1:x' is not HOST:PORT, with a port up to 65535" in told
