"""A good file loads to the pipeline that it means."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ddprun.config import (
    Choice,
    DataPair,
    EvaluateStage,
    LoadedPipeline,
    Pipeline,
    PipelineError,
    SaveStage,
    StepStageSettings,
    TrainStage,
    load,
)
from ddprun.config.built_in_options import DigitsOptions, MlpOptions, SyntheticDataOptions
from ddprun.config.load import _folder_safe_name

Load = Callable[..., LoadedPipeline]
PIPELINES = sorted((Path(__file__).parents[2] / "pipelines").glob("*.yaml"))


def test_a_minimal_file_gets_every_default(loaded: Load) -> None:
    """Model, data and optimizer are all that must be said."""
    pipeline = loaded("").pipeline
    assert pipeline.name == "p"
    assert pipeline.loader.batch_size == 64
    assert pipeline.loss.name == "CrossEntropyLoss"
    assert pipeline.hooks == ()
    assert [type(stage) for stage in pipeline.stages] == [TrainStage]
    assert pipeline.train_stages()[0].epochs == 1
    assert pipeline.sync.name == "every_step"


@pytest.mark.parametrize(
    "spelled", ["mlp: {inputs: 64, outputs: 10}", "mlp:\n    inputs: 64\n    outputs: 10"]
)
def test_a_built_in_carries_its_settings(loaded: Load, spelled: str) -> None:
    """The options of a built-in come with every default, as plain data and as a model."""
    model = loaded(f"model:\n  {spelled}\ndata: digits\noptimizer: sgd\n", base=False).pipeline.model
    assert model.settings == MlpOptions(inputs=64, outputs=10)
    assert model.options == {"inputs": 64, "hidden": [], "outputs": 10, "activation": "relu"}
    assert (model.kind, model.name, model.source) == ("model", "mlp", "built-in")


@pytest.mark.parametrize("spelled", ["sgd", "SGD", "{sgd: null}", "{Sgd: {}}", "{sgd: }"])
def test_the_ways_to_choose_without_options_are_one(loaded: Load, spelled: str) -> None:
    """`name`, `name: null` and `name: {}` are the same, in any case for a name of torch's."""
    optimizer = loaded("", f"optimizer={spelled}").pipeline.optimizer
    assert (optimizer.name, dict(optimizer.options), optimizer.source) == ("SGD", {}, "torch")


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("cross_entropy", "CrossEntropyLoss"),
        ("CrossEntropyLoss", "CrossEntropyLoss"),
        ("crossentropy", "CrossEntropyLoss"),
        ("mse_loss", "MSELoss"),
        ("mse", "MSELoss"),
        ("l1_loss", "L1Loss"),
        ("kl_div", "KLDivLoss"),
        ("binary_cross_entropy", "BCELoss"),
        ("bce_loss", "BCELoss"),
        ("binary_cross_entropy_with_logits", "BCEWithLogitsLoss"),
        ("BCEWithLogitsLoss", "BCEWithLogitsLoss"),
        ("multilabel_soft_margin_loss", "MultiLabelSoftMarginLoss"),
    ],
)
def test_a_loss_goes_by_class_and_by_function(loaded: Load, spelled: str, name: str) -> None:
    """A loss may be written as torch's class or as torch's function."""
    assert loaded(f"loss: {spelled}\n").pipeline.loss.name == name


def test_torchs_options_are_those_given(loaded: Load) -> None:
    """Torch fills in its own defaults; what it wants as a tuple is one, and as a float, too."""
    optimizer = loaded("", "optimizer={adamw: {lr: 1, betas: [0.9, 0.95]}}").pipeline.optimizer
    assert optimizer.options == {"lr": 1, "betas": (0.9, 0.95)}
    assert [type(one) for one in optimizer.options.values()] == [float, tuple]


def test_a_dotted_name_keeps_its_options(loaded: Load) -> None:
    """Options of an import path are keyword arguments, whatever they are; nothing is imported."""
    given_options = {"a": [1, {"b": None}], "c": "x"}
    model = loaded(
        "", f"model={{nowhere.installed.Net: {given_options}}}".replace("None", "null")
    ).pipeline.model
    assert (model.source, model.name) == ("dotted", "nowhere.installed.Net")
    assert model.options == given_options


def test_numbers_become_the_type_of_their_key(loaded: Load) -> None:
    """A whole number where a float is wanted is one."""
    pipeline = loaded("clip_norm: 1\nlaunch: {timeout_s: 60}\n").pipeline
    assert (type(pipeline.clip_norm), type(pipeline.launch.timeout_s)) == (float, float)


def test_data_given_apart_is_used_whole(loaded: Load) -> None:
    """With train and evaluate apart nothing is held out of either."""
    text = "stages: [{train: {epochs: 1}}, evaluate]\n"
    pipeline = loaded(text, "data={train: digits, evaluate: {synthetic: {dtype: float64}}}").pipeline
    assert isinstance(pipeline.data, DataPair)
    assert isinstance(pipeline.data.train.settings, DigitsOptions)
    assert pipeline.data.train.settings.held_out is None
    assert pipeline.data.train.options["held_out"] is None
    assert pipeline.data.evaluate is not None
    assert isinstance(pipeline.data.evaluate.settings, SyntheticDataOptions)
    assert pipeline.data.evaluate.settings.held_out == 0


def test_a_text_file_may_be_one_or_many(loaded: Load) -> None:
    """One pattern and a list of one are the same."""
    text = "model: transformer\noptimizer: sgd\ndata: {text: {files: %s}}\n"
    one = loaded(text % "a.txt", base=False).pipeline.data
    assert isinstance(one, Choice)
    assert one.options["files"] == ["a.txt"]
    assert one == loaded(text % "[a.txt]", base=False).pipeline.data


def test_stages_know_their_place(loaded: Load) -> None:
    """Each stage has a name, an index and the path for faults about it."""
    stages = loaded(
        "stages:\n  - train: {steps: 3}\n  - evaluate\n  - save: {to: x.safetensors}\n"
    ).pipeline.stages
    assert [(stage.name, stage.index, stage.path) for stage in stages] == [
        ("train", 0, "stages[0].train"),
        ("evaluate", 1, "stages[1].evaluate"),
        ("save", 2, "stages[2].save"),
    ]
    assert isinstance(stages[1], EvaluateStage)
    assert isinstance(stages[2], SaveStage)
    assert stages[2].to == "x.safetensors"


def test_a_stage_overrides_what_it_names(loaded: Load) -> None:
    """What a train stage does not name holds from above; null and an empty list are named too."""
    pipeline = loaded(
        "hooks: [fp16]\nclip_norm: 1.0\naccumulate: 2\nschedule: CosineAnnealingLR\n"
        "stages:\n"
        "  - train: {steps: 3}\n"
        "  - train: {epochs: 2, hooks: [], clip_norm: null, schedule: null}\n"
    ).pipeline
    first, second = (stage.effective_settings(pipeline) for stage in pipeline.train_stages())
    assert isinstance(first, StepStageSettings)
    assert (first.steps, first.epochs, [hook.name for hook in first.hooks]) == (3, None, ["fp16"])
    assert (first.clip_norm, first.accumulate) == (1.0, 2)
    assert first.schedule is not None
    assert (second.steps, second.epochs, second.hooks) == (None, 2, ())
    assert (second.clip_norm, second.accumulate, second.schedule) == (None, 2, None)


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("hooks: [fp16]\nstages: [{train: {steps: 3, hooks: []}}]\n", "hooks", "no effect"),
        ("warmup_steps: 1\nstages: [{train: {steps: 3, warmup_steps: 0}}]\n", "warmup_steps", "no effect"),
        ("stages: [save, {train: {steps: 3}}]\n", "stages[0]", "initial weights"),
    ],
)
def test_what_is_harmless_is_a_warning(loaded: Load, text: str, path: str, words: str) -> None:
    """What has no effect but does no harm lets the run go on, and says so."""
    (warning,) = loaded(text).warnings
    assert (warning.path, warning.severity) == (path, "warning")
    assert words in warning.message


def test_more_harmless_things(loaded: Load) -> None:
    """Evaluation data that no stage reads, and positions that no sample reaches, are warnings."""
    (warning,) = loaded("", "data={train: digits, evaluate: digits}").warnings
    assert warning.path == "data.evaluate"
    text = "model: {transformer: {context: 128}}\ndata: {text: {files: a, context: 64}}\noptimizer: sgd\n"
    (warning,) = loaded(text, base=False).warnings
    assert warning.path == "model.transformer.context"


def test_warnings_come_with_the_errors(loaded: Load) -> None:
    """A file with errors tells its warnings too, in the order of the file."""
    with pytest.raises(PipelineError) as caught:
        loaded("hooks: [fp16]\nstages: [{train: {steps: 3, hooks: []}}]\nseed: x\n")
    assert [fault.severity for fault in caught.value.faults] == ["warning", "error"]


def test_a_fault_of_the_run_has_its_place(loaded: Load) -> None:
    """A fault that only a run can see points to the key, or to the nearest key above it that the file has."""
    found = loaded("loader: {batch_size: 8}\n", "hooks=[fp16]", "optimizer.sgd.lr=0.1")
    fault = found.fault("loader.batch_size", "too few samples", "at most 4")
    assert (fault.place.line, fault.place.column) == (5, 22)
    assert fault.place.source_line == "loader: {batch_size: 8}"
    assert fault.message == "too few samples; at most 4"
    assert found.fault("loader.workers", "x").place.line == 5
    assert found.fault("hooks[0]", "x").headline == "--set 1:1:8: hooks[0]: x"
    assert found.fault("optimizer.SGD.lr", "x").headline == "--set 2:1:18: optimizer.SGD.lr: x"
    assert found.fault("optimizer.SGD.momentum", "x").place.line == 4
    assert found.fault("", "x").place.line == 1


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("digits", "digits"),
        ("my run (2)", "my-run-2-"),
        ("é", "-"),
        (".hidden", "hidden"),
        ("..", "pipeline"),
    ],
)
def test_a_pipeline_is_named_after_its_file(stem: str, name: str) -> None:
    """What a folder cannot be called is replaced."""
    assert _folder_safe_name(Path(f"{stem}.yaml")) == name


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_every_shipped_pipeline_is_good(path: Path) -> None:
    """What is shipped has neither faults nor warnings."""
    assert load(path).warnings == ()


def test_pipelines_are_shipped() -> None:
    """The folder is the right one."""
    assert {path.stem for path in PIPELINES} >= {"quickstart", "exact", "bytes"}


def test_the_digest_is_of_what_is_said(loaded: Load) -> None:
    """Spelling, order, comments and defaults written out do not matter; a value does."""
    plainly = loaded("seed: 0\n").digest()
    assert loaded("# comment\nprecision: fp32\nseed: 0x0\nloss: CrossEntropyLoss\n").digest() == plainly
    assert loaded("seed: 1\n").digest() != plainly
    assert loaded("stages: [{train: {epochs: 1, accumulate: 1}}]\n").digest() != plainly


def test_a_pipeline_is_frozen(loaded: Load) -> None:
    """Nobody changes a pipeline behind another's back."""
    pipeline: Pipeline = loaded("").pipeline
    with pytest.raises(ValueError, match="frozen"):
        pipeline.seed = 3


def test_a_fault_of_a_key_that_nobody_wrote_has_no_place(loaded: Load) -> None:
    """A quoted line would show something else."""
    found = loaded("ddp: {bucket_cap_mb: 1}\n")
    assert str(found.fault("stages[0].train.epochs", "x")) == f"{found.path}: stages[0].train.epochs: x"
    assert found.fault("ddp.find_unused_parameters", "x").place.line == 5
    assert found.is_given("ddp.bucket_cap_mb")
    assert not found.is_given("ddp.find_unused_parameters")
    assert not found.is_given("stages[0].train.epochs")
    assert found.is_given("optimizer")
