"""`ddprun explain` as a command: its text, its JSON, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddprun.cli import main
from tests.cli.test_processes import WATCHED, python
from tests.config.bad import FOLDER, matches, read

Out = pytest.CaptureFixture[str]

GOOD = """
model:
  mlp: {inputs: 64, hidden: [600, 600], outputs: 10}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.02, momentum: 0.9}}
ddp: {bucket_cap_mb: 1}
launch: {nproc_per_node: 4}
"""
OWN_STREAM = """
import torch


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(8, 8), 0)] * 100)
"""
POISON = "raise AssertionError('imported')\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "explained.yaml"
    path.write_text(GOOD)
    return path


def said(file: Path, capsys: Out, *args: str) -> str:
    assert main(["explain", str(file), *args]) == 0
    return capsys.readouterr().out


def to_json_data(file: Path, capsys: Out, *args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(file, capsys, *args, "--format", "json"))
    return found


def folded(text: str) -> str:
    """Without line breaks and columns."""
    return " ".join(text.split())


def test_the_text_of_a_plain_pipeline(file: Path, capsys: Out) -> None:
    """Buckets with names and bytes; what is sent in forward, in backward and after the step; the loss."""
    out = said(file, capsys, "--set", "stages=[{train: {steps: 5}}]", "--set", "hooks=[fp16]")
    for line in (
        "explained: 4 ranks on 1 host",
        "  Model         mlp: 6 parameters, 405,610 values, 1.62 MB; no buffers",
        "stages[0]: train for 5 steps, sync: every_step, hooks: [fp16]",
        "                bucket  dtype     values    bytes  sent per rank  parameters",
        "                     0  float32  366,610  1.47 MB         1.1 MB  5.bias, 5.weight and 2 more",
        "                     1  float32   39,000   156 kB         117 kB  1.bias, 1.weight",
        "                Each bucket: all_reduce of float16 among all 4 ranks (811 kB).",
        "  After a step  Nothing is sent.",
        "                every step           1.22 MB    4.87 MB            0 B",
        "                the stage: 5 steps   6.08 MB    24.3 MB            0 B",
    ):
        assert line in out.splitlines(), line
    for words in (
        "No parameters are sent in a forward pass, in this stage or any other.",
        "auto: the model has no buffers. None are sent in this stage. DDP's own broadcast would send 0 B",
        "Gradients are averaged over all 4 ranks, in every step, in 2 buckets",
        "It is not averaged: each rank has the loss of its own samples; gradients are averaged",
        "The log's mean loss is computed separately",
    ):
        assert words in folded(out), words
    assert max(map(len, out.splitlines())) <= 110


PERIODS = {
    "{local_sgd: {every: 8}}": (
        "Step 8 of every 8: the changes of parameters",
        "steps 1, 2, 3 … 7 of every 8 0 B",
    ),
    "{local_sgd: {every: 200}}": ("None: ranks exchange no messages before the stage's end.",),
    "{hierarchical_sgd: {within: 2, across: 8, hosts: 2}}": (
        "Steps 2, 4, 6 of every 8: the changes of parameters, averaged over the 2 ranks of each host",
        "Step 8 of every 8: the changes of parameters, averaged over all 4 ranks",
    ),
    "{hierarchical_sgd: {across: 8, hosts: 2}}": (
        "Gradients are averaged over the 2 ranks of each host, in every step",
        "Each rank's changes stay its own until ranks synchronise.",
    ),
    "{diloco: {every: 6, fragments: 2, overlap_steps: 1}}": (
        "Step 3 of every 6: the changes of parameters, averaged over all 4 ranks (buckets 1 to 2)",
        "is applied exactly 1 step later",
    ),
    "{broadcast: {every: 5, source: 2}}": ("Step 5 of every 5: the parameters of rank 2, as they are",),
    "{broadcast: {every: 1}}": ("Every step: the parameters of rank 0, as they are",),
    "{average: {every: 1}}": ("Every step: the changes of parameters",),
    "independent": (
        "Nothing is sent.",
        "For every step each rank sends the others its loss",
        "averaged over all 4 ranks",
    ),
}


@pytest.mark.parametrize("sync", PERIODS)
def test_the_text_of_each_policy(sync: str, file: Path, capsys: Out) -> None:
    """It says in which steps what is sent, and among whom."""
    out = said(file, capsys, "--set", "stages=[{train: {steps: 100}}]", "--set", f"sync={sync}")
    for words in PERIODS[sync]:
        assert words in folded(out), words


def test_stages_around_steps(file: Path, capsys: Out) -> None:
    """A stage that leaves ranks apart says so, and stages without steps say what they send."""
    stages = "[{train: {steps: 5, sync: independent}}, average, {forward: {steps: 2}}, evaluate, save]"
    out = folded(said(file, capsys, "--set", f"stages={stages}"))
    assert "Ranks stay as they are: the next stage starts from that." in out
    assert "stages[1]: average The parameters as they are, averaged over all 4 ranks." in out
    assert "stages[3]: evaluate Nothing is sent before it." in out


def test_hooks_in_several_rounds(file: Path, capsys: Out) -> None:
    """Each collective is told, with the ranks that take part in it."""
    hooks = "hooks=[{hierarchical: {hosts: 2, across: [fp16]}}]"
    out = said(file, capsys, "--set", hooks)
    assert "- all_to_all of float32 among the 2 ranks of each host" in out
    assert "- all_reduce of float16 among the 2 ranks of one local rank on every host" in out
    assert "hooks: [{hierarchical: {across: [fp16], hosts: 2}}]" in out


def test_codes_that_a_run_chooses(file: Path, capsys: Out) -> None:
    """Are counted as they are at first, which is said."""
    stages = ("--set", "stages=[{train: {steps: 5}}]")
    chosen = folded(said(file, capsys, *stages, "--set", "hooks=[auto_bits]"))
    plain = folded(said(file, capsys, *stages, "--set", "hooks=[int8]"))
    told = "The bytes here are those of int8, with which it begins, without its measurements."
    assert told in chosen
    assert told not in plain
    assert chosen.partition("Backward")[2] == plain.partition("Backward")[2]


def test_pairs_of_ranks(file: Path, capsys: Out) -> None:
    """Other ones in each exchange, in one line and one table; of an odd number, one rank stays alone."""
    stages = ("--set", "stages=[{train: {steps: 50}}]", "--set", "sync={gossip: {every: 3}}")
    for ranks in ("3", "4"):
        out = folded(said(file, capsys, *stages, "--set", f"launch.nproc_per_node={ranks}"))
        steps = "Steps 3, 6, 9 … 24 of every 24"
        assert f"{steps}: the parameters as they are, averaged over the ranks of each group." in out
        assert out.count("all_reduce of float32 among the ranks of each group") == 1
        assert "averaged over all" in out.partition("End")[2]


def test_noop(file: Path, capsys: Out) -> None:
    """Nothing is said to be averaged if nothing is sent."""
    stages = "stages=[{train: {steps: 4}}, {train: {steps: 4, sync: {local_sgd: {every: 2}}}}]"
    out = folded(said(file, capsys, "--set", stages, "--set", "hooks=[noop]"))
    assert "Gradients go through the hooks, but to no other rank, in every step, in 2 buckets" in out
    assert "noop sends no gradients, so ranks diverge." in out
    assert "Step 2 of every 2: nothing, because the hook is noop." in out
    assert "Gradients are averaged" not in out
    assert "so once more: the parameters as they are, averaged over all 4 ranks." in out


PIPELINES = sorted((Path(__file__).parents[2] / "pipelines").glob("*.yaml"))


@pytest.mark.parametrize("file", PIPELINES, ids=lambda file: file.stem)
def test_every_pipeline_that_is_shipped(file: Path, capsys: Out) -> None:
    """It is explained whole, and sends something."""
    for stage in to_json_data(file, capsys)["stages"]:
        assert stage["whole"] is not None
        assert stage["whole"]["all_ranks"] > 0 or stage["kind"] in ("evaluate", "save")


BUFFERS = {
    "auto": "None are sent in this stage. They are sent before evaluate and save.",
    "every_forward": "They are sent before the first forward pass of a step. They are also sent before",
    "{every: 3}": "They are sent after a step, as below. They are also sent before evaluate and save.",
    "never": "None are sent in this stage. Each rank keeps its own. DDP's",
}


@pytest.mark.parametrize("setting", BUFFERS)
def test_what_becomes_of_buffers(setting: str, tmp_path: Path, capsys: Out) -> None:
    """The verdict is found by value, and what follows from it under the setting is said."""
    file = tmp_path / "cnn.yaml"
    file.write_text("model: {cnn: {inputs: [1, 8, 8], outputs: 10}}\ndata: digits\noptimizer: sgd\n")
    out = folded(said(file, capsys, "--set", f"buffers={setting}"))
    facts = "1.running_mean, 1.running_var and 2 more, 384 bytes"
    assert f"4 of 6 buffers change in training ({facts}), and training never reads them." in out
    assert BUFFERS[setting] in out
    assert "DDP's own broadcast would send 400 B in each step." in out


def test_evaluations_inside_a_stage_and_the_moving_average(file: Path, capsys: Out) -> None:
    """How many there are and what each sends, by whether ranks are apart; what the average takes."""
    stages = "stages=[{train: {steps: STEPS, sync: {local_sgd: {every: 4}}, evaluate: {every: 6}}}]"
    out = folded(said(file, capsys, "--set", stages.replace("STEPS", "25")))
    assert (
        "After every 6 steps, and at the end: 5 evaluations. 2 of them: the parameters as they are, " in out
    )
    assert "over all 4 ranks; 3 of them: nothing. Then each rank has its own values again." in out
    # ranks' averages differ even where their weights do not
    averaged = ("--set", stages.replace("STEPS", "25"), "--set", "ema=0.9")
    out = folded(said(file, capsys, *averaged))
    assert "4 of them: the parameters as they are, averaged over all 4 ranks; 1 of them: nothing." in out
    found = to_json_data(file, capsys, *averaged)
    assert found["model"]["ema_bytes"] == 405_610 * 4
    assert [one["times"] for one in found["stages"][0]["evaluations"]] == [4, 1]
    out = folded(said(file, capsys, "--set", stages.replace("STEPS", "6")))
    assert "and at the end: 1 evaluation. Each sends nothing." in out


READS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(64, 10)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.line(x - self.mean) * self.scale
"""


def test_buffers_that_training_reads(tmp_path: Path, capsys: Out) -> None:
    """They are sent before the first forward pass of a step, and are in the bytes. What does not change is
    compared.
    """
    (tmp_path / "reads_its_buffers.py").write_text(READS)
    file = tmp_path / "reads.yaml"
    file.write_text("model: reads_its_buffers.Net\ndata: digits\noptimizer: sgd\naccumulate: 3\n")
    found = to_json_data(file, capsys, "--nproc-per-node", "2")
    assert found["buffers"]["read_in_training"]
    before, backward = found["stages"][0]["exchanges"]
    assert (before["when"], before["kind"]) == ("before_forward", "buffers")
    assert before["sent"]["all_ranks"] == 64 * 4
    assert backward["sent"]["all_ranks"] == 2 * 650 * 4
    assert found["stages"][0]["mean_step"]["all_ranks"] == 64 * 4 + 2 * 650 * 4
    out = folded(said(file, capsys))
    assert "1 of 2 buffers change in training (mean, 256 bytes), and training may read them." in out
    assert "Ranks compare the unchanged ones when they compare parameters." in out


def test_control_messages_where_exchanges_go_on_beside_training(file: Path, capsys: Out) -> None:
    """A step in which an exchange is applied, the first time after the first cycle."""
    sync = "{diloco: {every: 8, fragments: 2, overlap_steps: 2}}"
    stages = f"stages=[{{train: {{steps: 40, sync: {sync}}}}}]"
    (stage,) = to_json_data(file, capsys, "--set", stages)["stages"]
    assert (stage["cycle"], stage["control_message_steps"]) == (8, [6, 10])
    assert folded(said(file, capsys, "--set", stages)).count("For steps 6, 10, 14, 18 … each rank") == 1
    (stage,) = to_json_data(file, capsys, "--set", stages.replace("40", "9"))["stages"]
    assert stage["control_message_steps"] == [6]


def test_what_counts_in_a_step_is_told_before_it(file: Path, capsys: Out) -> None:
    """To the ranks that average gradients with this one; ranks that train apart send none of it."""
    words = "Before each step, ranks tell each other what counts in it (weight_by), and wait for that."
    stages = ["--set", "stages=[{train: {steps: 4}}, {forward: {steps: 2}}]"]
    for weight, sync, times in (
        ("targets", "every_step", 1),
        ("samples", "every_step", 0),
        ("targets", "{local_sgd: {every: 2}}", 0),
    ):
        flags = ["--set", f"weight_by={weight}", "--set", f"sync={sync}"]
        assert folded(said(file, capsys, *stages, *flags)).count(words) == times, (weight, sync)
    flags = ["--set", "weight_by=targets", "--set", "sync={hierarchical_sgd: {across: 8, hosts: 2}}"]
    alone = f"Control {words} They exchange no other messages before the stage's end."
    assert alone in folded(said(file, capsys, *stages, *flags))


def test_counting_samples_of_each_rank_is_told(file: Path, capsys: Out) -> None:
    """A stream that is divided by itself: no rank knows how many samples another one has left."""
    data = "data: own_stream.Stream\nstages: [{train: {steps: 4}}]"
    file.write_text(file.read_text().replace("data: digits", data))
    (file.parent / "own_stream.py").write_text(OWN_STREAM)
    flags = ["--set", "loader={sharded: true, shuffle: false}"]
    flags += ["--set", "sync={hierarchical_sgd: {across: 8, hosts: 2}}"]
    found = folded(said(file, capsys, *flags))
    words = "With an iterable data set, ranks tell each other before each step how many samples each has."
    assert f"Control {words} They exchange no other messages before the stage's end." in found


def test_the_object(file: Path, capsys: Out) -> None:
    """All names are in it, and numbers are bytes."""
    stages = "stages=[{train: {steps: 20, sync: {local_sgd: {every: 8}}}}]"
    found = to_json_data(file, capsys, "--set", stages, "--nnodes", "2", "--nproc-per-node", "2")
    size = 405_610 * 4
    held = {"parameters": 6, "numel": 405_610, "bytes": size, "trained": 6, "trained_bytes": size}
    assert found["model"] == {"name": "mlp", "ema_bytes": None, **held}
    assert (found["v"], found["ranks"], found["hosts"]) == (1, 4, 2)
    assert found["start"] == {"per_rank": 3 * size / 4, "all_ranks": 3 * size, "between_hosts": size}
    (stage,) = found["stages"]
    assert [pattern["steps"] for pattern in stage["patterns"]] == [[8], [1, 2, 3, 4, 5, 6, 7]]
    assert (stage["cycle"], stage["control_message_steps"]) == (8, [8])
    each, end = stage["exchanges"]
    assert (each["kind"], each["when"], each["among"], each["ranks"]) == ("delta", "after_step", "all", 4)
    assert [name for bucket in each["buckets"] for name in bucket["params"]] == [
        f"{layer}.{kind}" for layer in (1, 3, 5) for kind in ("weight", "bias")
    ]
    assert each["sent"] == {"per_rank": 1.5 * size, "all_ranks": 6 * size, "between_hosts": 3 * size}
    assert stage["mean_step"]["all_ranks"] == 6 * size / 8
    assert stage["end"] == [end["exchange"]]
    assert stage["whole"]["all_ranks"] == 3 * 6 * size
    leg = each["buckets"][0]["legs"][0]
    assert leg["op"], leg["dtype"] == ("all_reduce", "float32")


NOT_LOOKED_AT = ("more-ranks-than-gpus", "nothing-held-out")
BAD_RUNS = [file for file in sorted((FOLDER / "run").glob("*.yaml")) if file.stem not in NOT_LOOKED_AT]


@pytest.mark.parametrize("file", BAD_RUNS, ids=lambda file: file.stem)
def test_each_fault_of_a_run_is_told(file: Path, capsys: Out) -> None:
    """As a run of two ranks tells it, with its place."""
    bad = read(file)
    assert main(["explain", str(file), "--nproc-per-node", "2"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    headlines = re.findall(rf"^{re.escape(str(file))}:(.*)$", err, re.MULTILINE)
    assert len(headlines) == 1
    assert matches(bad.expected[0], headlines[0]), headlines[0]
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("hooks=[shared_memory]", 'hooks: "shared_memory" sums over the ranks of one host'),
        ("hooks=[{hierarchical: {hosts: 3}}]", "hooks: two levels with hosts: 3"),
        ("sync={hierarchical_sgd: {across: 8, hosts: 3}}", "hierarchical_sgd.hosts: 3 hosts cannot share"),
        ("sync={broadcast: {every: 2, source: 8}}", "sync.broadcast.source: there is no rank 8"),
        (
            "sync={diloco: {every: 20, fragments: 7}}",
            "sync.diloco.fragments: 7 fragments of 6 trained",
        ),
        ("seed=x", "seed: expected a whole number"),
    ],
)
def test_what_the_ranks_do_not_allow(override: str, words: str, file: Path, capsys: Out) -> None:
    """Flags say how many ranks there are, and the pipeline has to fit them."""
    file.write_text(GOOD.replace("launch: {nproc_per_node: 4}\n", ""))
    assert main(["explain", str(file), "--set", override, "--nnodes", "2", "--nproc-per-node", "4"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "override",
    [
        "hooks=[{hierarchical: {hosts: 5}}]",
        "sync={hierarchical_sgd: {across: 8, hosts: 5}}",
        "sync={broadcast: {every: 2, source: 4}}",
    ],
)
def test_flags_say_how_many_ranks_there_are(override: str, file: Path, capsys: Out) -> None:
    """What the ranks of the file's `launch` would not allow, those of the flags do."""
    assert main(["explain", str(file), "--set", override, "--nproc-per-node", "5"]) == 0
    assert main(["explain", str(file), "--set", override]) == 2


@pytest.mark.parametrize("args", [["--nnodes", "0"], ["--nproc-per-node", "x"], ["--format", "xml"], ["--x"]])
def test_a_misuse(args: list[str], file: Path, capsys: Out) -> None:
    """One line that says what is wrong."""
    assert main(["explain", str(file), *args]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_model_that_fails(tmp_path: Path, capsys: Out) -> None:
    """The error of somebody's own code comes with its traceback, and exit code 1."""
    file = tmp_path / "fails.yaml"
    file.write_text(
        "model:\n  torch.nn.Linear: {in_features: 3, out_features: 2}\ndata: digits\noptimizer: sgd\n"
    )
    assert main(["explain", str(file)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("ddprun: RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert "Traceback" in err
    assert not dist.is_initialized()


@pytest.mark.parametrize("args", [["--help"], ["tests/bad/unknown-hook.yaml"]])
def test_torch_waits(args: list[str]) -> None:
    """Help and faults of the file come without it."""
    done = python("-c", WATCHED, "explain", *args, cwd=Path(__file__).parents[2])
    assert done.stderr.splitlines()[-1] == "heavy:"


def test_as_a_process_under_detailed_debugging(file: Path) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL, in which DDP crashes, nothing crashes: here DDP itself is asked
    for its buckets.
    """
    file.write_text(GOOD.replace("bucket_cap_mb: 1", "bucket_cap_mb: 1, find_unused_parameters: true"))
    done = python("-m", "ddprun", "explain", file, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("explained: 4 ranks on 1 host\n")


TURNS = """
from torch import nn


class Nets(nn.Module):
    def __init__(self):
        super().__init__()
        self.d, self.g = nn.Linear(64, 1), nn.Linear(64, 1)

    def forward(self, x, y, turn=None):
        return {"d": self.d, "g": self.g}[turn](x.flatten(1)).square().mean()
"""


def test_turns_are_told_apart(tmp_path: Path, capsys: Out) -> None:
    """When each sends its buckets, and which they are; `--link` is refused before anything is imported."""
    (tmp_path / "nets_in_turns.py").write_text(TURNS)
    turns = "[{name: d, match: d.*}, {name: g, match: g.*, every: 2}]"
    file = tmp_path / "turns.yaml"
    file.write_text(
        "model: nets_in_turns.Nets\ndata: digits\nloss: model\noptimizer: sgd\nhooks: []\n"
        f"stages: [train: {{steps: 6, turns: {turns}}}]\nlaunch: {{nproc_per_node: 2}}\n"
    )
    out = folded(said(file, capsys))
    when = "those of turn d in every step, in 1 bucket; those of turn g in step 2 of every 2, in 1 bucket"
    assert f"Gradients are averaged over both ranks: {when}, each sent as soon" in out
    for turn, bucket in (("d", 0), ("g", 1)):
        row = f"parameters {bucket} float32 65 260 B 260 B {turn}.bias, {turn}.weight Each bucket: all_reduce"
        head = "averaged over both ranks: bucket dtype values bytes sent per rank"
        assert f"The gradients of turn {turn}, {head} {row} of float32 among both ranks (260 B)." in out
    assert "step 1 of every 2 260 B 520 B 0 B step 2 of every 2 520 B" in out
    (stage,) = to_json_data(file, capsys)["stages"]
    assert [one["turn"] for one in stage["exchanges"]] == ["d", "g"]
    assert [(one["steps"], one["exchanges"]) for one in stage["patterns"]] == [([1], [0]), ([2], [0, 1])]
    (tmp_path / "nets_in_turns.py").write_text(POISON)
    assert main(["explain", str(file), "--link", "1Gbit"]) == 2
    told = f"{file}:6:35: stages[0].train.turns: only steps with one backward pass can be predicted"
    assert told in capsys.readouterr().err
    closure = ("--set=optimizer={LBFGS: {lr: 1}}", "--set=stages=[{train: {steps: 4}}]", "--set=loss=model")
    assert main(["explain", str(file), "--link", "1Gbit", *closure]) == 2
    assert "optimizer: only steps with one backward pass can be predicted" in capsys.readouterr().err
