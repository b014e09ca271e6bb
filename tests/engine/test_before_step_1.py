"""What a run can know before step 1 it says before step 1: each case on two ranks, with its own code."""

import re
from pathlib import Path

import pytest

from ddprun import EXIT_BAD_INPUT
from ddprun.config import load
from ddprun.explain.explain import explain
from tests.engine.running import events, lines, run_to_end, summary, weights

MODULE = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Data(torch.utils.data.Dataset):
    def __init__(self, soft=False, size=33):  # 4 batches of 4 on 2 ranks, and one sample
        self.soft, self.size = soft, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        features = torch.randn(6, generator=torch.Generator().manual_seed(index))
        target = torch.tensor(index % 3)
        return features, nn.functional.one_hot(target, 3).float() if self.soft else target


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([Data()[index] for index in range(12)])


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))

    def forward(self, features):
        return (features.to(torch.complex128) @ self.weight).abs().float()


def normed(channels):
    shape = (channels, 6 // channels)
    return nn.Sequential(nn.Unflatten(1, shape), nn.BatchNorm1d(channels), nn.Flatten(), nn.Linear(6, 3))


class Gathering(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.normed = normed(channels)

    def forward(self, features):
        training = torch.tensor(float(self.training))
        torch.distributed.all_reduce(training)
        assert training in (0, 2), "ranks call it in the same passes"
        return self.normed(features)


class Lazy(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))


def twice(batch):
    features, target = batch
    return torch.cat([features, features], 1), target


class Forces(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)

    def forward(self, features):
        features = features.clone().requires_grad_()
        output = super().forward(features)
        (slopes,) = torch.autograd.grad(output.sum(), features, create_graph=True)
        return output + slopes[:, :3]


def penalty(output, target):
    loss = nn.functional.cross_entropy(output, target)
    (slopes,) = torch.autograd.grad(loss, output, create_graph=True)
    return loss + slopes.square().sum()


class OddState(torch.optim.SGD):
    def state_dict(self):
        return {"inner": super().state_dict()}


class Wrapper(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, inner=torch.optim.SGD):
        self.inner = inner(params, lr, momentum=momentum)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step()


class WithState(Wrapper):
    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


class AsksForLoss(torch.optim.SGD):
    def step(self, loss):
        return super().step()


class WarmUp(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, steps):
        self.after = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        super().__init__(optimizer)

    def get_lr(self):
        return self.base_lrs


class KeepsObjects(torch.optim.SGD):
    def step(self):
        super().step()
        self.state[self.param_groups[0]["params"][0]]["seen"] = object()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, features):
        inner = checkpoint(self.first, features.requires_grad_(), use_reentrant=True)
        return self.last(inner)


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.at_times = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, features):
        output = self.always(features)
        return output + self.at_times(features) if features.sum() > 0 else output


class WithoutGradients(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)

    def forward(self, features):
        with torch.no_grad():
            return super().forward(features)


def broken(output, target):
    raise KeyError("threshold")


class TwoNumbers:
    def update(self, output, target):
        self.seen = len(target)

    def compute(self):
        return torch.zeros(2)

    def merge_state(self, others):
        self.seen += sum(one.seen for one in others)
"""
PIPELINE = """
model: MODEL
data: {train: TRAIN, evaluate: HELD_OUT}
loader: {batch_size: 4, drop_last: DROP_LAST}
loss: LOSS
optimizer: OPTIMIZER
hooks: []
ddp: DDP
stages: [{train: LENGTH}, EVALUATE]
checkpoint: {every: 2}
"""
USUAL = {
    "MODEL": "{mlp: {inputs: 6, outputs: 3}}",
    "TRAIN": "mine.Data",
    "HELD_OUT": "mine.Data",
    "DROP_LAST": "false",
    "LOSS": "cross_entropy",
    "OPTIMIZER": "{sgd: {lr: 0.1, momentum: 0.9}}",
    "LENGTH": "{epochs: 1}",
    "DDP": "{}",
    "EVALUATE": "evaluate",
}


def run(folder: Path, resuming: bool = False, /, **changes: str) -> tuple[list[int], str]:
    """Exit codes, and what was printed."""
    (folder / "mine.py").write_text(MODULE)
    text = changes.pop("text", PIPELINE)
    for name, value in {**USUAL, **changes}.items():
        text = text.replace(name, value)
    return run_to_end(folder, text, resuming=resuming)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"MODEL": "mine.Complex", "EVALUATE": "save"},
            r'stages\[1\]\.save: "weight" is complex128, which a safetensors file cannot hold; ',
        ),
        (
            {"OPTIMIZER": "{mine.AsksForLoss: {lr: 0.1}}"},
            r"optimizer: its step\(\) is called without arguments: missing a required argument: 'loss'",
        ),
        (
            {"OPTIMIZER": "{mine.OddState: {lr: 0.1}}"},
            r"optimizer: its state_dict\(\) holds inner; a checkpoint needs torch's form: ",
        ),
        (
            {"OPTIMIZER": "{mine.Wrapper: {lr: 0.1}}"},
            r'optimizer: a checkpoint would leave out the state of "inner", the SGD inside it; have its ',
        ),
        (
            {"OPTIMIZER": "{mine.Wrapper: {lr: 0.1, inner: torch.optim.SGD}}"},
            r'inner: "torch.optim.SGD" is passed on as a string; {ref: torch.optim.SGD} passes the object it',
        ),
        (
            {"OPTIMIZER": "{mine.Wrapper: {lr: 0.1, inner: {torch.optim.SGD: {}}}}"},
            r"missing a required argument: 'params'; it takes .*; {ref: torch.optim.SGD} passes torch.optim",
        ),
        (
            {"OPTIMIZER": "{sgd: {lr: 0.1}}\nschedule: {mine.WarmUp: {steps: 9}}"},
            r"schedule: no checkpoint can be taken: schedule\.after is of type torch\.optim\.lr_scheduler\."
            r"CosineAnnealingLR, which .*; give it a state_dict and .*; `checkpoint: {keep: 0}` takes none",
        ),
        (
            {"MODEL": "mine.Forces"},
            r"stages\[1\]\.evaluate: the model or the loss asks for gradients, which an evaluation ",
        ),
        (
            {"LOSS": "mine.penalty"},
            r"asks for gradients, which an evaluation does not record; write evaluate: \{gradients: true\}",
        ),
        (
            {"LOSS": "mine.penalty", "LENGTH": "{epochs: 1, evaluate: {every: 2}}"},
            r"stages\[0\]\.train\.evaluate: the model or the loss asks for gradients",
        ),
        (
            {"EVALUATE": "{evaluate: {metrics: [mine.TwoNumbers]}}"},
            r"stages\[1\]\.evaluate\.metrics\[0\].*: compute gives shape \(2,\); expected one number",
        ),
        (
            {"HELD_OUT": "{mine.Data: {soft: true}}", "EVALUATE": "{evaluate: {metrics: [accuracy]}}"},
            r"metrics\[0\]: accuracy compares class numbers, and the targets are float32 \(4, 3\); ",
        ),
    ],
)
def test_it_is_told_with_its_place(tmp_path: Path, changes: dict[str, str], told: str) -> None:
    """No step is made, and nothing but the place and what to do is printed."""
    codes, said = run(tmp_path, **changes)
    assert codes == [EXIT_BAD_INPUT] * 2, said
    assert re.search(told, said), said
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "steps").exists()


def test_what_only_steps_add_to_the_state_is_told_at_the_first_checkpoint(tmp_path: Path) -> None:
    codes, said = run(tmp_path, OPTIMIZER="{mine.KeepsObjects: {lr: 0.1}}")
    assert codes == [EXIT_BAD_INPUT] * 2, said
    assert "checkpoint: no checkpoint can be taken: optimizer.state.0.seen is of type object, which" in said
    assert "Traceback" not in said


def test_a_metric_that_raises_does_so_before_step_1(tmp_path: Path) -> None:
    """With its traceback: it is the user's."""
    codes, said = run(tmp_path, EVALUATE="{evaluate: {metrics: [mine.broken]}}")
    assert codes == [1, 1]
    assert "before the first stage" in said
    assert "KeyError: 'threshold'" in said
    assert not (tmp_path / "run" / "steps").exists()


@pytest.mark.parametrize(
    ("kind", "momentum", "checkpoint"),
    [("Wrapper", "0", "{every: 2}"), ("Wrapper", "0.9", "{keep: 0}"), ("OddState", "0.9", "{keep: 0}")],
    ids=["no state", "no checkpoint", "no checkpoint of an odd state"],
)
def test_an_optimizer_whose_state_need_not_be_kept_may_be_used(
    tmp_path: Path, kind: str, momentum: str, checkpoint: str
) -> None:
    """The trial step that shows this changes no weight: they are as with plain SGD, bit for bit."""
    found = []
    for name, optimizer in (("plain", "sgd"), ("own", f"mine.{kind}")):
        (tmp_path / name).mkdir()
        options = f"{{{optimizer}: {{lr: 0.1, momentum: {momentum}}}}}"
        changes = {"OPTIMIZER": options, "{every: 2}": checkpoint, "EVALUATE": "save"}
        codes, said = run(tmp_path / name, **changes)
        assert codes == [0, 0], said
        found.append((tmp_path / name / "run" / "model.safetensors").read_bytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("held_out", ["mine.Data", "mine.Stream"])
@pytest.mark.parametrize("changes", [{"MODEL": "mine.Forces"}, {"LOSS": "mine.penalty"}])
def test_an_evaluation_may_record_gradients(tmp_path: Path, changes: dict[str, str], held_out: str) -> None:
    evaluate = "{evaluate: {gradients: true}}"
    codes, said = run(tmp_path, HELD_OUT=held_out, EVALUATE=evaluate, **changes)
    assert codes == [0, 0], said
    assert summary(tmp_path / "run")["metrics"]["loss"] > 0


def test_the_trial_leaves_no_trace(tmp_path: Path) -> None:
    """Neither in the losses of steps nor in what is saved: as without an evaluation."""
    found = []
    for name, evaluate in (("without", "save"), ("with", "{evaluate: {metrics: [accuracy]}}, save")):
        (tmp_path / name).mkdir()
        changes = {"MODEL": "{mine.normed: {channels: 2}}", "LENGTH": "{steps: 4}", "EVALUATE": evaluate}
        codes, said = run(tmp_path / name, **changes)
        assert codes == [0, 0], said
        losses = [(one["step"], one["loss"]) for one in lines(tmp_path / name / "run", "steps")]
        found.append((losses, (tmp_path / name / "run" / "model.safetensors").read_bytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"MODEL": "mine.Forces"},
        {"MODEL": "mine.Lazy", "LOSS": "mine.penalty", "DROP_LAST": "true"},
        {"MODEL": "{mine.normed: {channels: 2}}", "LOSS": "mine.penalty"},
    ],
    ids=["buckets", "lazy parameters", "a last batch of one sample"],
)
def test_passes_before_step_1_record_gradients_as_steps_do(tmp_path: Path, changes: dict[str, str]) -> None:
    """Where the model or the loss computes some itself; in `explain`, too."""
    codes, said = run(tmp_path, EVALUATE="save", **changes)
    assert codes == [0, 0], said
    explained = explain(load(tmp_path / "p.yaml"), hosts=1, ranks_per_host=2)
    (buckets,) = explained.probe.gradient_buckets.values()
    (started,) = [event for event in events(tmp_path / "run") if event["event"] == "started"]
    layout = [[param.name for param in one.params] for one in buckets.layouts]
    assert layout == [bucket["params"] for bucket in started["buckets"]]


def test_batchnorm_over_one_sample(tmp_path: Path) -> None:
    """It is refused where an epoch ends with one, be it of a stage's own data; not where each channel of a
    sample has several values, where such a batch is dropped, or where steps end before it.
    """
    for name, changes in {
        "steps": {"LENGTH": "{steps: 3}", "EVALUATE": "train: {steps: 1, accumulate: 2}"},
        "own": {"LENGTH": "{steps: 3}", "EVALUATE": "train: {steps: 5, data: mine.Data}"},
    }.items():
        (tmp_path / name).mkdir()
        codes, said = run(tmp_path / name, MODEL="{mine.normed: {channels: 6}}", **changes)
        assert codes == [EXIT_BAD_INPUT] * 2, name
        assert "loader.drop_last: the last batch of an epoch is one sample on some rank, and Batch" in said
    for name, changes in {
        "values": {"MODEL": "{mine.normed: {channels: 2}}"},
        "dropped": {"MODEL": "{mine.normed: {channels: 6}}", "DROP_LAST": "true"},
        "short": {"MODEL": "{mine.normed: {channels: 6}}", "LENGTH": "{steps: 3}"},
    }.items():
        (tmp_path / name).mkdir()
        codes, said = run(tmp_path / name, **changes)
        assert codes == [0, 0], said


def test_one_sample_on_one_rank_is_found_by_all(tmp_path: Path) -> None:
    """The last batch is two samples on rank 0 and one on rank 1, and the model calls a collective: so all
    ranks try it, also where it works.
    """
    data = "{mine.Data: {size: 35}}"
    codes, said = run(tmp_path, MODEL="{mine.Gathering: {channels: 6}}", TRAIN=data)
    assert codes == [EXIT_BAD_INPUT] * 2
    assert "loader.drop_last: the last batch of an epoch is one sample on some rank" in said
    (tmp_path / "works").mkdir()
    changes = {"MODEL": "{mine.Gathering: {channels: 2}}", "TRAIN": data}
    codes, said = run(tmp_path / "works", **changes)
    assert codes == [0, 0], said


@pytest.mark.parametrize(("batch", "width"), [("{}", 6), ("{transform: mine.twice}", 12)])
def test_lazy_parameters_have_their_shapes(batch: str, width: int, tmp_path: Path) -> None:
    """In a run, whose ranks start with the same values and BatchNorm's own statistics, and in `explain`."""
    changes = {"DROP_LAST": "true", "EVALUATE": "save", "DDP": f"{{}}\nbatch: {batch}"}
    codes, said = run(tmp_path, MODEL="mine.Lazy", **changes)
    assert codes == [0, 0], said
    saved = weights(tmp_path / "run")
    assert saved["0.weight"].shape == (8, width)
    assert saved["1.num_batches_tracked"] == 4
    layout = next(one for one in events(tmp_path / "run") if one["event"] == "started")["buckets"]
    assert sum(bucket["numel"] for bucket in layout) == 8 * width + 8 + 16 + 8 * 3 + 3
    explained = explain(load(tmp_path / "p.yaml"), hosts=1, ranks_per_host=2)
    assert explained.parameters is not None
    assert sum(one.numel() for one in explained.parameters.values()) == 8 * width + 8 + 16 + 8 * 3 + 3


def test_a_saved_model_is_evaluated_without_training(tmp_path: Path) -> None:
    """One with buffers, whose parameters have shapes only when its weights are read; and `explain` of it."""
    changes = {"MODEL": "mine.Lazy", "DROP_LAST": "true"}
    codes, said = run(tmp_path, EVALUATE="save", **changes)
    assert codes == [0, 0], said
    (tmp_path / "alone").mkdir()
    text = PIPELINE.replace("[{train: LENGTH}, EVALUATE]", "[evaluate, save]")
    text += f"init: {tmp_path / 'run' / 'model.safetensors'}\n"
    codes, said = run(tmp_path / "alone", text=text, **changes)
    assert codes == [0, 0], said
    trained, evaluated = (weights(folder / "run") for folder in (tmp_path, tmp_path / "alone"))
    assert trained.keys() == evaluated.keys()
    assert all(trained[name].equal(evaluated[name]) for name in trained)
    explained = explain(load(tmp_path / "alone" / "p.yaml"), hosts=1, ranks_per_host=2)
    assert [stage.end for stage in explained.stages] == [(), ()]


def test_an_optimizer_that_passes_on_the_inner_ones_state_is_resumed_with_it(tmp_path: Path) -> None:
    """The way out of the refusal: bits as of a run that was not broken off."""
    optimizer = "{mine.WithState: {lr: 0.1}}"
    for name, lengths in (("whole", ["{steps: 8}"]), ("broken", ["{steps: 4}", "{steps: 8}"])):
        (tmp_path / name).mkdir()
        for attempt, length in enumerate(lengths):
            changes = {"OPTIMIZER": optimizer, "LENGTH": length, "EVALUATE": "save"}
            codes, said = run(tmp_path / name, attempt > 0, **changes)
            assert codes == [0, 0], said
    files = [(tmp_path / name / "run" / "model.safetensors").read_bytes() for name in ("whole", "broken")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"MODEL": "mine.WithoutGradients"}, "model: the loss has no gradient: the model or the loss turns"),
        (
            {"MODEL": "mine.Sometimes", "DDP": "{static_graph: true}"},
            "ddp.static_graph: the model takes another way through its parameters than in its first step; ",
        ),
        (
            {"MODEL": "mine.Checkpointed", "DDP": "{find_unused_parameters: true}"},
            "ddp: a backward pass has completed a gradient twice, as reentrant checkpointing does; write",
        ),
    ],
)
def test_what_torch_says_of_a_backward_pass_is_told_with_what_to_do(
    tmp_path: Path, changes: dict[str, str], told: str
) -> None:
    """In one line, where torch's text of a dozen leads to the next error."""
    codes, said = run(tmp_path, **changes)
    assert codes == [EXIT_BAD_INPUT] * 2
    assert told in said
    assert "Traceback" not in said


def test_the_way_out_of_reentrant_checkpointing_works(tmp_path: Path) -> None:
    codes, said = run(tmp_path, MODEL="mine.Checkpointed", DDP="{static_graph: true}")
    assert codes == [0, 0], said


def test_code_that_parses_arguments_at_import_gets_none(tmp_path: Path) -> None:
    """Those of the process are ddprun's own."""
    (tmp_path / "script.py").write_text(
        "import argparse\nfrom mine import Data\nargs = argparse.ArgumentParser().parse_args()\n"
    )
    codes, said = run(tmp_path, HELD_OUT="script.Data")
    assert codes == [0, 0], said


def test_a_module_that_an_installed_one_shadows_is_named(tmp_path: Path) -> None:
    """Python's own glob comes before a file of that name in the pipeline's folder."""
    (tmp_path / "glob.py").write_text("from mine import Data\n")
    codes, said = run(tmp_path, HELD_OUT="glob.Data")
    assert codes == [EXIT_BAD_INPUT] * 2
    where = rf'"glob" is \S+glob\.py, which comes before {tmp_path}/glob\.py: rename yours'
    assert re.search(rf'data\.evaluate: "glob" has no "Data"; {where}', said), said
