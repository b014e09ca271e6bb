"""`--set` replaces one value, wherever it stands."""

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddprun.config import Choice, LoadedPipeline, PipelineError
from ddprun.config.tree import format_path, parse_path

Load = Callable[..., LoadedPipeline]


def test_a_value_is_replaced(loaded: Load) -> None:
    """An override beats the file, and a later one an earlier one."""
    assert loaded("seed: 1\n", "seed=2", "seed=0x3").pipeline.seed == 3


def test_a_whole_section_is_replaced(loaded: Load) -> None:
    """Setting a mapping replaces all of it."""
    pipeline = loaded("loader: {batch_size: 8, workers: 2}\n", "loader={batch_size: 4}").pipeline
    assert (pipeline.loader.batch_size, pipeline.loader.workers) == (4, 0)


def test_a_bare_name_takes_options(loaded: Load) -> None:
    """A choice written bare becomes `name: {options}`, whatever way its name is spelled."""
    assert loaded("", "optimizer.sgd.lr=0.2").pipeline.optimizer.options == {"lr": 0.2}
    assert loaded("", "optimizer.SGD.lr=0.2", "optimizer.sgd.momentum=0.9").pipeline.optimizer.options == {
        "lr": 0.2,
        "momentum": 0.9,
    }


def test_what_the_file_lacks_is_made(loaded: Load) -> None:
    """Sections and choices that the file does not have come into being."""
    pipeline = loaded("", "ddp.bucket_cap_mb=4", "schedule.CosineAnnealingLR.eta_min=0.1").pipeline
    assert pipeline.ddp.bucket_cap_mb == 4
    assert pipeline.schedule is not None
    assert pipeline.schedule.options == {"eta_min": 0.1}


@pytest.mark.parametrize("written", ["CosineAnnealingLR", "{CosineAnnealingLR: {}}"])
def test_a_schedule_has_its_span_beside_it(loaded: Load, written: str) -> None:
    """`over` can be set beside the schedule that the file chooses, and its options beside `over`."""
    text = f"schedule: {written}\nstages: [{{train: {{steps: 4}}}}]\n"
    overrides = ["schedule.over=run", "schedule.cosineannealinglr.eta_min=0"]
    for order in (overrides, overrides[::-1]):
        assert loaded(text, *order).pipeline.schedule == Choice(
            "schedule", "CosineAnnealingLR", {"eta_min": 0}, "torch", sibling_keys={"over": "run"}
        )
    with pytest.raises(PipelineError, match="would be a second choice"):
        loaded(text, "schedule.over=run", "schedule.LinearLR.start_factor=1")


@pytest.mark.parametrize("override", [".seed=1", "..seed=1", "seed..a=1", "seed.=1"])
def test_a_dot_stands_between_two_keys(loaded: Load, override: str) -> None:
    """Anywhere else the path is none."""
    with pytest.raises(PipelineError, match="invalid key path from here on"):
        loaded("", override)


def test_items_of_lists_are_counted_from_0(loaded: Load) -> None:
    """Stages and hooks are reached by index, nested choices too."""
    text = "stages:\n  - train: {steps: 3}\n  - evaluate\nhooks: [fp16, powersgd]\n"
    pipeline = loaded(
        text,
        "stages[0].train.steps=5",
        "stages[1].evaluate.metrics=[accuracy]",
        "hooks[0]=bf16",
        "hooks[1]=topk",
    ).pipeline
    assert pipeline.train_stages()[0].steps == 5
    assert [hook.name for hook in pipeline.hooks] == ["bf16", "topk"]


def test_data_may_be_given_apart(loaded: Load) -> None:
    """`data.train` under a bare name replaces it by a pair."""
    pipeline = loaded("", "data.train=digits").pipeline
    assert pipeline.train_data().options["held_out"] is None


@pytest.mark.parametrize("written", ["my.lab.Net", "{my.lab.Net: {a: 1}}", "{my.lab.Net: }"])
@pytest.mark.parametrize("path", ["model.my.lab.Net.b", 'model."my.lab.Net".b'])
def test_dotted_names_are_found_in_the_path(loaded: Load, written: str, path: str) -> None:
    """An import path in a key path is taken whole, quoted or not."""
    pipeline = loaded("", f"model={written}", f"{path}=2").pipeline
    assert pipeline.model.name == "my.lab.Net"
    assert pipeline.model.options["b"] == 2


def test_an_empty_value_is_null(loaded: Load) -> None:
    """`clip_norm=` sets null, as an empty value in a file does."""
    assert loaded("clip_norm: 1\n", "clip_norm=").pipeline.clip_norm is None


def test_an_equals_sign_may_stand_in_the_value(loaded: Load) -> None:
    """The first = outside of quotes ends the path."""
    pipeline = loaded("", "model={my.Net: {}}", 'model."my.Net".text="a=b"').pipeline
    assert pipeline.model.options == {"text": "a=b"}


def test_an_override_leaves_aliases_of_its_target_alone(loaded: Load) -> None:
    """A value that an alias shares changes only where it is set."""
    text = "stages:\n  - train: &t {steps: 3}\n  - train: *t\n"
    pipeline = loaded(text, "stages[1].train.steps=4").pipeline
    assert [stage.steps for stage in pipeline.train_stages()] == [3, 4]
    text = "hooks: &h [fp16]\nstages: [{train: {steps: 3, hooks: *h}}, {train: {steps: 3}}]\n"
    pipeline = loaded(text, "hooks[0]=bf16").pipeline
    assert [stage.effective_settings(pipeline).hooks[0].name for stage in pipeline.train_stages()] == [
        "fp16",
        "bf16",
    ]


def test_a_fault_points_into_the_override(loaded: Load) -> None:
    """File, line and quoted text of a fault are those of the override."""
    with pytest.raises(PipelineError) as caught:
        loaded("", "seed=1", "optimizer.sgd={lr: fast}")
    (fault,) = caught.value.faults
    assert str(fault).split("\n") == [
        '--set 2:1:20: optimizer.sgd.lr: expected a number, got "fast" (a string)',
        "    optimizer.sgd={lr: fast}",
        "                       ^",
    ]


def test_an_override_mends_the_file(loaded: Load) -> None:
    """What an override replaces is not held against the file."""
    assert loaded("seed: x\n", "seed=1").pipeline.seed == 1


@given(
    st.lists(
        st.text(st.characters(exclude_characters='"', codec="utf-8"), min_size=1) | st.integers(0, 999),
        min_size=1,
    )
)
def test_a_shown_path_reads_back(segments: list[str | int]) -> None:
    """The path that a fault shows can be pasted into --set."""
    path = ["key", *segments]
    assert [segment for segment, _ in parse_path(format_path(path))] == path


@given(st.text('ab.[]"=0 {}:,', max_size=40))
def test_no_override_raises_anything_else(loaded: Load, text: str) -> None:
    """Any text as an override loads, or raises PipelineError."""
    with contextlib.suppress(PipelineError):
        loaded("", text)
