"""A loss that is a module: trained, sent, kept and switched to evaluation together with the model."""

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from ddprun.config import PipelineError, load
from ddprun.engine import build, objective
from ddprun.engine.compiling import compile_model
from ddprun.engine.objective import Objective, Precision
from ddprun.engine.worker import run_worker
from ddprun.explain.explain import explain
from ddprun.explain.text import render_text
from ddprun.host.code_folders import add_import_folder
from ddprun.telemetry.reader import RecordedRun
from ddprun.track import StepInfo, curves
from tests.checkpoint import runs
from tests.engine.running import SAMPLES, events, lines, run_pipeline, run_to_end, summary, weights
from tests.ranks import as_processes, ddprun_here

MODULE = """
import os

RANK = int(os.environ.get("RANK", "0"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.unused = nn.Linear(6, 4).double(), nn.Linear(2, 2).double()
        self.steps = 0

    def forward(self, inputs):
        return self.body(inputs) + 0 * self.unused.weight.sum() * self.unused.bias.sum()

    def get_extra_state(self):
        return {"version": 2}  # which nobody reads


class Branches(Net):
    def forward(self, inputs):
        return self.body(inputs)


class Centres(nn.Module):
    '''Logits are negative distances to a centre of each class, over a temperature.'''

    def __init__(self, margin=True):
        super().__init__()
        self.with_margin = margin
        self.centres = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.margin = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, output, target):
        distances = (output[:, None] - self.centres).square().sum(2)
        if self.with_margin:
            distances = distances + self.margin.sum() * nn.functional.one_hot(target, 3)
        return nn.functional.cross_entropy(-distances * self.temperature, target)


class Dropping(nn.Module):
    '''Nothing to train, and other numbers in evaluation.'''

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, output, target):
        return nn.functional.cross_entropy(self.drop(output), target)


class Moving(nn.Module):
    '''Running means of classes, and a number that only a state of its own holds.'''

    def __init__(self):
        super().__init__()
        self.register_buffer("means", torch.zeros(3, 4, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.calls = 0.0

    def forward(self, output, target):
        if self.training:
            self.calls += 1
            with torch.no_grad():
                self.means.index_add_(0, target, 0.01 * output)
        logits = self.scale * output @ self.means.clone().T + self.calls / 100
        return nn.functional.cross_entropy(logits, target) + logits.square().mean()

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Drifting(Centres):
    '''One rank changes a parameter by itself.'''

    def forward(self, output, target):
        if self.training and RANK == 1:
            with torch.no_grad():
                self.temperature.add_(0.25)
        return super().forward(output, target)


class FloatSamples(Samples):
    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return inputs.float(), target


class Floats(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 4)

    def forward(self, inputs):
        return self.body(inputs)


class Head(Floats):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.head(self.body(inputs))


class Clashing(Net):
    def __init__(self):
        super().__init__()
        self.loss = Centres()


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output):
        return self.factor * output


def plain(output, target):
    return nn.functional.cross_entropy(output, target)


def contrast(output, target, scale):
    return nn.functional.cross_entropy(scale(output), target)
"""
PIPELINE = """
model: own.Net
data: {train: own.Samples, evaluate: own.Samples}
loader: {batch_size: SIZE, shuffle: false}
loss: LOSS
optimizer: {sgd: {lr: 0.1, momentum: 0.9}}
checkpoint: {every: 3, keep: 2}
stages:
  - train: {steps: 8}
  - save
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(SAMPLES + MODULE)
    return tmp_path


def text(loss: str, size: int = 4, more: str = "", model: str = "own.Net") -> str:
    return PIPELINE.replace("LOSS", loss).replace("SIZE", str(size)).replace("own.Net", model) + more


def kept(run_dir: Path, kind: str = "parameters") -> dict[str, torch.Tensor]:
    """Tensors of the last checkpoint, by name."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    found: dict[str, torch.Tensor] = {}
    for file in sorted(newest.glob("*.safetensors")):
        named = load_file(file).items()
        found |= {
            name.removeprefix(f"{kind}/"): value for name, value in named if name.startswith(f"{kind}/")
        }
    return found


WHOLE_BATCH = {
    "plain": "",
    "accumulate": "accumulate: 2\n",
    "average": "sync: {average: {every: 1}}\n",
    "unused parameters": "ddp: {find_unused_parameters: true}\n",
    "static graph": "ddp: {static_graph: true}\n",
}


@pytest.mark.parametrize("more", WHOLE_BATCH.values(), ids=list(WHOLE_BATCH))
def test_ranks_train_it_as_one_process_does_with_the_whole_batch(folder: Path, more: str) -> None:
    """Centres and temperature in fp64. With unused parameters, the model and the loss have some."""
    loss, model = "own.Centres", "own.Net"
    if "unused" in more:
        loss, model = "{own.Centres: {margin: false}}", "own.Branches"
    two = kept(run_pipeline(folder, text(loss, 4, more, model), 2, "two"))
    one = kept(run_pipeline(folder, text(loss, 8, more, model), 1, "one"))
    start = kept(run_pipeline(folder, text(loss, 8, more, model).replace("lr: 0.1", "lr: 0"), 1, "start"))
    names = {"loss.centres", "loss.temperature", "loss.margin"}
    assert set(two) == {*names, "body.weight", "body.bias", "unused.weight", "unused.bias"}
    for name, value in one.items():
        assert (two[name] - value).abs().max() < 1e-12, name
    for name in ("loss.centres", "loss.temperature", "body.weight"):
        assert (one[name] - start[name]).abs().max() > 1e-3, name
    assert set(weights(folder / "two")) == set(two) - names, "the model's own names"


@pytest.mark.parametrize(
    "sync", ["{local_sgd: {every: 3}}", "{diloco: {every: 3, fragments: 2}}", "{broadcast: {every: 2}}"]
)
def test_sync_policies_send_it(folder: Path, sync: str) -> None:
    """Ranks train it apart, and an audit at the stage's end sees that all hold the same."""
    run = run_pipeline(folder, text("own.Centres", more=f"sync: {sync}\naudit: {{every: 1}}\n"), 2)
    audits = [event for event in events(run) if event["event"] == "audit"]
    assert not audits[0]["equal"]
    assert audits[-1]["equal"]


def test_an_audit_sees_that_it_drifts(folder: Path) -> None:
    """By the parameter's name, and the rank."""
    codes, told = run_to_end(folder, text("own.Drifting", more="audit: {every: 2}\n"))
    assert codes == [1, 1]
    assert '"loss.temperature" differs on rank 1' in told


def test_equal_weights_evaluate_to_equal_values(folder: Path) -> None:
    """A loss with dropout drops in training, and never in evaluation."""
    again = "  - evaluate\n" * 3
    pipeline = text("own.Dropping").replace("lr: 0.1", "lr: 0").replace("  - save\n", again)
    run = run_pipeline(folder, pipeline.replace("steps: 8", "steps: 8, evaluate: {every: 2}"), 2)
    found = [event["loss"] for event in events(run) if event["event"] == "evaluated"]
    assert len(found) == 7
    assert len(set(found)) == 1
    first_epoch, second_epoch = (line for line in runs.told(run) if line[:2] in ((0, 1), (0, 7)))
    assert first_epoch[3] != second_epoch[3]


def test_a_resumed_run_ends_with_the_bits_of_the_unbroken_one(folder: Path) -> None:
    """A checkpoint holds parameters, buffers and the extra state of the loss."""
    pipeline = text("own.Moving", more="buffers: before_evaluate\n").replace("  - save\n", "")
    whole = run_pipeline(folder, pipeline, 2, "whole")
    broken = run_pipeline(folder, pipeline.replace("steps: 8", "steps: 4"), 2, "broken")
    (folder / "broken.yaml").write_text(pipeline)
    assert as_processes(2, go_on, folder / "broken.yaml", broken, cwd=folder) == [0, 0]
    assert runs.final(broken) == runs.final(whole)
    assert kept(whole, "buffers")["loss.means"].abs().max() > 0
    assert calls(broken) == calls(whole)
    assert min(calls(whole)) >= 8


def calls(run_dir: Path) -> list[float]:
    """What the extra state of each rank's loss counts."""
    trees = [json.loads(file.read_text()) for file in run_dir.glob("checkpoints/step-*8/rank-*.json")]
    return [tree["extra"]["loss._extra_state"]["calls"] for tree in trees]


def go_on(file: Path, run_dir: Path) -> int:
    return run_worker(load(file), run_dir, resuming="yes")


def as_before(file: Path, run_dir: Path) -> int:
    """A run of code that does not train the loss."""
    with (
        mock.patch.object(build, "loss_joins_model", return_value=False),
        mock.patch.object(objective, "loss_joins_model", return_value=False),
    ):
        return run_worker(load(file), run_dir)


def test_a_checkpoint_of_other_parameters_is_refused(folder: Path) -> None:
    """At the model, with one that the checkpoint lacks, and the reason."""
    (folder / "p.yaml").write_text(text("own.Centres"))
    assert as_processes(1, as_before, folder / "p.yaml", folder / "run", cwd=folder) == [0]
    codes, told = run_to_end(folder, text("own.Centres"), 1, resuming=True)
    assert codes == [2], told
    assert 'model: parameter "loss.centres" is only in the model: the code has changed since (' in told


def test_it_can_be_frozen_and_have_options_of_its_own(folder: Path) -> None:
    """By names that begin with `loss.`."""
    more = "freeze: [loss.centres]\ngroups: [{match: loss.temperature, lr: 0}]\n"
    run = run_pipeline(folder, text("own.Centres", more=more), 2)
    start = kept(run_pipeline(folder, text("own.Centres").replace("lr: 0.1", "lr: 0"), 2, "start"))
    changed = {name for name, value in kept(run).items() if not torch.equal(value, start[name])}
    assert changed == {"body.weight", "body.bias", "loss.margin"}


def joined(folder: Path, pipeline: str) -> tuple[Any, Any]:
    """What a run of it would train, and its objective."""
    (folder / "p.yaml").write_text(pipeline)
    loaded = load(folder / "p.yaml")
    add_import_folder(folder)
    torch.manual_seed(0)
    model, loss = build.build_model(loaded), build.build_loss(loaded)
    computes = Objective(loaded, loss, Precision("fp32", torch.device("cpu")))
    return build.join_loss_and_freeze(loaded, model, loss, torch.device("cpu"), None), computes


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("freeze: ['loss.center']\n", 'no parameter is called "loss.center"'),
        ("freeze: ['*']\n", "no parameter is left to train"),
        ("", 'a "loss.centres" of its own, which is also the name of a part of the loss'),
    ],
)
def test_names_that_do_not_fit_are_a_fault(folder: Path, more: str, problem: str) -> None:
    """Patterns without a parameter, and a model with a part that is called like the loss's."""
    pipeline = text("own.Centres", more=more, model="own.Net" if more else "own.Clashing")
    with pytest.raises(PipelineError, match=re.escape(problem)):
        joined(folder, pipeline)


@pytest.mark.parametrize("loss", ["cross_entropy", "{cross_entropy: {label_smoothing: 0.1}}", "own.plain"])
def test_a_loss_without_state_is_called_as_it_is(folder: Path, loss: str) -> None:
    """The model stays alone."""
    model, _ = joined(folder, text(loss))
    assert type(model).__name__ == "Net"


def test_a_function_with_a_module_among_its_options_is_refused(folder: Path) -> None:
    """Nothing would train, send or save that module."""
    with pytest.raises(PipelineError, match="has a module among its options"):
        joined(folder, text("{own.contrast: {scale: {own.Scale: {}}}}"))


def test_weights_of_classes_are_half_in_pure_half_precision(folder: Path) -> None:
    """As the output is, with which torch wants to multiply them."""
    loss = "{cross_entropy: {weight: [1, 2, 3, 4]}}"
    run = run_pipeline(folder, text(loss, more="precision: pure_bf16\n"), 2)
    assert kept(run, "buffers")["loss.weight"].dtype == torch.bfloat16


def test_compiling_leaves_it_as_it_is(folder: Path) -> None:
    """The model, or blocks by their names in it, are compiled; the loss is called as before."""
    batch = torch.randn(3, 6).double(), torch.tensor([0, 1, 2])
    for blocks, names in (("null", [""]), ("[body]", ["body"])):
        model, objective = joined(folder, text("own.Centres", more=f"compile: {{blocks: {blocks}}}\n"))
        plain = objective(model, batch).loss
        loaded = load(folder / "p.yaml")
        with torch._dynamo.config.patch(
            optimize_ddp=True, recompile_limit=8, accumulated_recompile_limit=256
        ):
            compiler, compiled = compile_model(loaded, model, backend="aot_eager")
            assert torch.equal(objective(model, batch).loss, plain)
        torch._dynamo.reset()
        assert list(compiled) == names
        assert compiler.graphs


def test_explain_knows_its_parameters(folder: Path) -> None:
    """They are in the model's size, and in the buckets that a run makes."""
    pipeline = text("own.Moving")
    (folder / "run.yaml").write_text(pipeline)
    explained = explain(load(folder / "run.yaml"), hosts=1, ranks_per_host=2)
    (started,) = (one for one in events(run_pipeline(folder, pipeline, 2)) if one["event"] == "started")
    (buckets,) = explained.probe.gradient_buckets.values()
    names = [[param.name for param in bucket.params] for bucket in buckets.layouts]
    assert names == [bucket["params"] for bucket in started["buckets"]]
    assert "loss.scale" in names[0]
    assert "own.Net and its loss: 5 parameters" in render_text(explained)


LINEAR = "{linear_cross_entropy: {in_features: 4, num_classes: 3, bias: true, ignore_index: 2}}"


has_linear_cross_entropy = pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyLoss"), reason="torch 2.13 has it"
)


@has_linear_cross_entropy
def test_the_linear_cross_entropy_is_trained_as_a_head_of_the_model_would_be(folder: Path) -> None:
    """And measured over the targets that count, as a cross-entropy is."""
    own = text(LINEAR, model="own.Floats").replace("own.Samples", "own.FloatSamples")
    own = own.replace("- save", "- evaluate: {metrics: [perplexity]}")
    head = own.replace(LINEAR, "{cross_entropy: {ignore_index: 2}}").replace("own.Floats", "own.Head")
    runs_of_both = run_pipeline(folder, own, 2, "own"), run_pipeline(folder, head, 2, "head")
    ours, theirs = map(kept, runs_of_both)
    for name, value in theirs.items():
        assert (ours[name.replace("head", "loss.linear")] - value).abs().max() < 1e-6, name
    measured = [summary(run)["metrics"] for run in runs_of_both]
    assert measured[0] == pytest.approx(measured[1], rel=1e-6)


@has_linear_cross_entropy
def test_accuracy_is_refused_where_only_the_loss_makes_classes(folder: Path) -> None:
    """The model's output has none, so its largest feature would be taken for one."""
    (folder / "p.yaml").write_text(text(LINEAR).replace("- save", "- evaluate: {metrics: [accuracy]}"))
    with pytest.raises(PipelineError, match="only the loss turns"):
        load(folder / "p.yaml")


PARTS = (
    SAMPLES
    + """

def parts(output, target):
    fit, size = nn.functional.cross_entropy(output, target), output.square().mean()
    return {"loss": fit + 0.1 * size, "fit": fit, "size": size, "weight": 0.1, "output": output}


def right(output, target):
    return (output.argmax(1) == target).double().mean()


def weight(batch):
    with open(f"weights-{torch.distributed.get_rank()}", "a") as told:
        told.write("asked ")
    return len(batch[1])


class Linear(nn.Linear):
    def __init__(self):
        super().__init__(6, 3, dtype=torch.float64)


class Own(Linear):
    '''Leaves a number out of batches whose sum is negative.'''

    def forward(self, inputs, labels):
        found = parts(super().forward(inputs), labels)
        return found if inputs.sum() > 0 else {key: found[key] for key in ("loss", "fit")}


class Measured(Linear):
    def forward(self, inputs, labels):
        found = parts(super().forward(inputs), labels)
        return found if self.training else {"loss": found["loss"], "held": found["fit"] + 0.1 * found["size"]}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (Samples()[index] for index in range(1, 10))


class Pairs(Linear):
    '''A contrastive loss: each sample's first view against the second views of all ranks' samples.'''

    def forward(self, inputs, label):
        views = [super(Pairs, self).forward(inputs), super(Pairs, self).forward(inputs.flip(1))]
        if torch.distributed.get_world_size() > 1:
            views = [torch.cat(torch.distributed.nn.functional.all_gather(view)) for view in views]
        return nn.functional.cross_entropy(views[0] @ views[1].T, torch.arange(len(views[0])))
"""
)
PARTS_TEXT = """
model: made.MODEL
data: {train: made.Samples, evaluate: made.Samples}
loss: made.parts
optimizer: {sgd: {lr: 0.1}}
loader: {batch_size: 7, drop_last: true}
sync: every_step
track: [prometheus]
stages:
  - train: {steps: 6}
  - evaluate
launch: {device: cpu}
"""


@pytest.mark.parametrize("sync", ["every_step", "{local_sgd: {every: 3}}"])
def test_numbers_beside_the_loss_are_curves(sync: str, tmp_path: Path) -> None:
    """Records, summary, trackers, evaluations and the report; as the loss they count since the last exchange,
    and they add up to it.
    """
    (tmp_path / "made.py").write_text(PARTS)
    run = run_pipeline(
        tmp_path, PARTS_TEXT.replace("MODEL", "Linear").replace("sync: every_step", f"sync: {sync}"), 2
    )
    records = lines(run, "steps")
    since = 1 if sync == "every_step" else 3
    for line in records:
        own, means = line["values"], line.get("mean_values")
        assert sorted(own) == ["fit", "size", "weight"]
        assert own["fit"] + 0.1 * own["size"] == pytest.approx(line["loss"])
        assert (means is None) == (line["mean_loss"] is None) == (line["step"] % since > 0)
        if means is not None:
            assert means["fit"] + 0.1 * means["size"] == pytest.approx(line["mean_loss"])
            of_all = [one for one in records if 0 <= line["step"] - one["step"] < since]
            assert means["fit"] == pytest.approx(sum(one["values"]["fit"] for one in of_all) / len(of_all))
    found, last = summary(run), next(one["mean_values"] for one in records if one["step"] == 6)
    assert found["values"] == last
    metrics = found["metrics"]
    assert metrics["fit"] + 0.1 * metrics["size"] == pytest.approx(metrics["loss"])
    assert f'ddprun_value{{name="fit"}} {last["fit"]}' in (run / "metrics.prom").read_text()
    *_, record = RecordedRun(run).step_records(0)
    assert curves(StepInfo(record, {}))["values/fit"] == last["fit"]
    assert ddprun_here("report", str(run), cwd=tmp_path).code == 0
    assert "fit over steps" in (run / "report.html").read_text()


def test_the_weight_of_a_batch_is_asked_for_once(tmp_path: Path) -> None:
    """However many numbers beside the loss and functions of the user's own are weighted by it."""
    asked = []
    for loss, metrics in (("made.parts", "[made.right]"), ("cross_entropy", "[]")):
        (tmp_path / loss).mkdir()
        (tmp_path / loss / "made.py").write_text(PARTS)
        text = PARTS_TEXT.replace("MODEL", "Linear").replace("loss: made.parts", f"loss: {loss}")
        text = text.replace("  - evaluate\n", f"  - evaluate: {{metrics: {metrics}}}\n")
        run_pipeline(tmp_path / loss, text + "weight_by: made.weight\n", 2)
        asked.append((tmp_path / loss / "weights-0").read_text())
    assert asked[0] == asked[1] != ""


def test_a_model_returns_numbers_and_one_that_a_batch_lacks_is_null(tmp_path: Path) -> None:
    """The screen has those of the newest step."""
    (tmp_path / "made.py").write_text(PARTS)
    text = PARTS_TEXT.replace("MODEL", "Own").replace("made.parts", "model").replace("  - evaluate\n", "")
    codes, told = run_to_end(tmp_path, text)
    assert codes == [0, 0]
    found = [line["values"] for line in lines(tmp_path / "run", "steps")]
    assert {line["size"] is None for line in found} == {True, False}
    assert None not in {line["fit"] for line in found}
    shown = r"mean loss [\d.]+, fit [\d.]+, (size [\d.]+, )?"
    assert re.search(shown, told)


@pytest.mark.parametrize("held_out", ["made.Samples", "made.Stream"])
def test_an_evaluation_has_the_numbers_that_it_returns(tmp_path: Path, held_out: str) -> None:
    """Not those of training: whatever is tried before step 1, which a stream is not."""
    (tmp_path / "made.py").write_text(PARTS)
    text = PARTS_TEXT.replace("MODEL", "Measured").replace("loss: made.parts", "loss: model")
    run = run_pipeline(tmp_path, text.replace("evaluate: made.Samples", f"evaluate: {held_out}"), 2)
    metrics = summary(run)["metrics"]
    assert list(metrics) == ["loss", "held"]
    assert metrics["held"] == pytest.approx(metrics["loss"])
    assert all(list(line["values"]) == ["fit", "size", "weight"] for line in lines(run, "steps"))


def test_a_number_renamed_in_the_middle_of_a_round_counts_from_the_next(tmp_path: Path) -> None:
    """Its mean over the round is not known; that of a number that kept its name is, and so is the loss."""
    (tmp_path / "made.py").write_text(PARTS)
    text = PARTS_TEXT.replace("MODEL", "Linear").replace("steps: 6", "steps: 8").replace("  - evaluate\n", "")
    text = text.replace("sync: every_step", "sync: {local_sgd: {every: 4}}\ncheckpoint: {every: 2, keep: 9}")
    whole = lines(run_pipeline(tmp_path, text, 2, "whole"), "steps")
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for later in (tmp_path / "run" / "checkpoints").glob("step-0000000[468]"):
        shutil.rmtree(later)
    (tmp_path / "made.py").write_text(
        PARTS.replace('"size"', '"average"').replace('"fit": fit', '"a": fit, "fit": fit')
    )
    codes, told = run_to_end(tmp_path, text, resuming=True)
    assert codes == [0, 0], told
    for before, now in zip(whole, lines(tmp_path / "run", "steps"), strict=True):
        if before["step"] not in (4, 8):  # where a round ends
            continue
        was, means = before["mean_values"], now["mean_values"]
        assert (now["mean_loss"], means["fit"]) == (before["mean_loss"], was["fit"])
        new = (None, None) if before["step"] == 4 else (was["size"], was["fit"])
        assert (means["average"], means["a"]) == new


def test_a_contrastive_loss_over_all_ranks_is_that_of_all_their_samples(tmp_path: Path) -> None:
    """Two ranks with 4 samples train as one with 8; explain says that it does not count what they gather."""
    (tmp_path / "made.py").write_text(PARTS)
    text = PARTS_TEXT.replace("MODEL", "Pairs").replace("made.parts", "model")
    losses = {}
    for ranks, size in ((2, 4), (1, 8), (1, 4)):
        of_size = text.replace("batch_size: 7", f"batch_size: {size}")
        run = run_pipeline(tmp_path, of_size, ranks, f"run{ranks}{size}")
        losses[ranks, size] = [line["mean_loss"] for line in lines(run, "steps") if line["rank"] == 0]
    assert losses[2, 4] == pytest.approx(losses[1, 8])
    assert losses[1, 4] != pytest.approx(losses[1, 8])
    explained = explain(load(tmp_path / "run24.yaml"), hosts=1, ranks_per_host=2)
    assert "Not counted   What your own code sends by torch.distributed" in render_text(explained)
