"""What a resumed run may have changed in its pipeline, and what not."""

from collections.abc import Callable

import pytest

from ddprun.config import LoadedPipeline, PipelineError
from ddprun.config.resume_changes import check_and_list_changes, learning_rates_changed

Load = Callable[..., LoadedPipeline]

TEXT = """
sync: {local_sgd: {every: 4}}
hooks: [fp16]
stages:
  - train: {steps: 10}
  - evaluate
  - train: {steps: 20}
"""


def compared(
    loaded: Load, *overrides: str, next_stage: int = 2, begun: int | None = 2, text: str = TEXT
) -> list[str]:
    before = loaded(text).as_dict()
    new = loaded(text, *overrides)
    return check_and_list_changes(new, before, next_stage=next_stage, begun_stage=begun)[1]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("stages[2].train.steps=30", "stages[2].train.steps: 20 in the checkpoint, 30 now"),
        ("compile=true", "compile: null in the checkpoint, {mode: default, "),
        ("hooks=[int8]", "hooks[0]: fp16 in the checkpoint, {int8: "),
        ("timings.every=5", "timings.every: 1 in the checkpoint, 5 now"),
        ("optimizer.sgd.lr=0.5", "optimizer: SGD in the checkpoint, {SGD: {lr: 0.5}} now"),
        ("loader.batch_size=8", "loader.batch_size: "),
        ("checkpoint.keep=9", "checkpoint.keep: 3 in the checkpoint, 9 now"),
    ],
)
def test_what_can_change_is_told(loaded: Load, override: str, told: str) -> None:
    """One line for each key."""
    (line,) = compared(loaded, override)
    assert line.startswith(told)


@pytest.mark.parametrize(
    ("override", "place", "words"),
    [
        ("model.mlp.hidden=[8]", "model", "hidden: [8]"),
        ("seed=7", "seed", "7 here, and 0 in the checkpoint"),
        ("data={synthetic: {}}", "data", "the checkpoint's state belongs to it"),
        ("loss=mse_loss", "loss", ""),
        ("precision=bf16", "precision", "bf16 here, and fp32 in the checkpoint"),
        ("loader.shuffle=false", "loader.shuffle", "false here, and true in the checkpoint"),
        ("optimizer={adamw: {}}", "optimizer", "AdamW here, and SGD in the checkpoint"),
        ("sync.local_sgd.every=5", "sync", "the stage has begun with it"),
        ("stages[2].train.sync=every_step", "stages[2].train.sync", "every_step here"),
        ("ddp.bucket_cap_mb=2", "ddp.bucket_cap_mb", "until the stage's end local_sgd keeps state by bucket"),
        ("stages=[{train: {steps: 10}}]", "stages", "are done, or have begun"),
    ],
)
def test_what_cannot_change_is_refused(loaded: Load, override: str, place: str, words: str) -> None:
    """With both values, at its place."""
    with pytest.raises(PipelineError) as caught:
        compared(loaded, override)
    (fault,) = caught.value.faults
    assert fault.path == place
    assert words in fault.problem


@pytest.mark.parametrize("override", ["stages[2].train.sync=every_step", "ddp.bucket_cap_mb=2"])
def test_a_stage_that_has_not_begun_is_free(loaded: Load, override: str) -> None:
    """Its policy too."""
    assert len(compared(loaded, override, next_stage=1, begun=0)) == 1


def test_buckets_that_only_gradients_have_can_change(loaded: Load) -> None:
    """In the middle of a stage."""
    text = TEXT.replace("{local_sgd: {every: 4}}", "every_step")
    told = compared(loaded, "ddp.bucket_cap_mb=2", text=text)
    assert told == ["ddp.bucket_cap_mb: 25.0 in the checkpoint, 2.0 now"]


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("optimizer.sgd.lr=0.5", True),
        ("schedule={ConstantLR: {}}", True),
        ("stages[2].train.steps=30", False),
        ("timings.every=5", False),
    ],
)
def test_when_learning_rates_are_followed_anew(loaded: Load, override: str, changed: bool) -> None:
    """Where the optimizer's settings or the schedule are others; a stage knows its own length."""
    old, new = loaded(TEXT), loaded(TEXT, override)
    assert learning_rates_changed(old.pipeline, new.pipeline, 2) is changed
