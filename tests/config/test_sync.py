"""What a file says about synchronising loads to what the engine reads."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from ddprun.config import (
    AverageStage,
    BroadcastStage,
    BufferSettings,
    ForwardStage,
    LoadedPipeline,
    PipelineError,
    StepStage,
    TrainStage,
    built_in_options,
)
from ddprun.config.yaml_writer import to_plain_data
from ddprun.sync.policies.average import Average
from ddprun.sync.policies.broadcast import Broadcast
from ddprun.sync.policies.diloco import Diloco
from ddprun.sync.policies.every_step import EveryStep
from ddprun.sync.policies.hierarchical_sgd import HierarchicalSgd
from ddprun.sync.policies.independent import Independent
from ddprun.sync.policies.local_sgd import LocalSgd

Load = Callable[..., LoadedPipeline]


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("every_step", EveryStep()),
        ("{local_sgd: {every: 8}}", LocalSgd(every=8, optimizer_state="local")),
        (
            "{hierarchical_sgd: {across: 8}}",
            HierarchicalSgd(within=1, across=8, hosts=None, optimizer_state="local"),
        ),
        ("{hierarchical_sgd: {within: 4, across: 4}}", HierarchicalSgd(within=4, across=4)),
        (
            "{diloco: {every: 30}}",
            Diloco(every=30, outer_lr=0.7, outer_momentum=0.9, fragments=1, overlap_steps=0),
        ),
        (
            "{diloco: {every: 3, fragments: 3, overlap_steps: 2, outer_momentum: 0}}",
            Diloco(every=3, fragments=3, overlap_steps=2, outer_momentum=0.0),
        ),
        ("{broadcast: {every: 8}}", Broadcast(every=8, source=0)),
        ("{average: {every: 8}}", Average(every=8)),
        ("independent", Independent()),
    ],
)
def test_a_policy_comes_with_every_default(loaded: Load, text: str, settings: object) -> None:
    """Each policy carries its options as a model; limits themselves are allowed."""
    sync = loaded(f"sync: {text}\n").pipeline.sync
    assert sync.settings == settings
    assert sync.source == "built-in"


@pytest.mark.parametrize(
    ("text", "buffers", "back"),
    [
        ("auto", BufferSettings(), "auto"),
        ("{reduce: mean}", BufferSettings(reduce="mean"), {"when": "auto", "reduce": "mean"}),
        ("{when: every_forward, reduce: broadcast}", BufferSettings(when="every_forward"), "every_forward"),
        ("never", BufferSettings(when="never"), "never"),
        ("{every: 8}", BufferSettings(every=8), {"every": 8, "reduce": "broadcast"}),
        ("{reduce: mean, every: 8}", BufferSettings(every=8, reduce="mean"), {"every": 8, "reduce": "mean"}),
    ],
)
def test_buffers_have_one_form(loaded: Load, text: str, buffers: BufferSettings, back: Any) -> None:
    """However a time for buffers is written, it is one value, and one form when written back."""
    pipeline = loaded(f"buffers: {text}\n", "model=cnn").pipeline
    assert pipeline.buffers == buffers
    assert to_plain_data(pipeline.buffers) == back
    with pytest.raises(ValidationError, match="frozen"):
        pipeline.buffers.every = 3


def test_the_defaults_synchronise_every_step(loaded: Load) -> None:
    """A file that says nothing is plain DDP that finds out about buffers and audits nothing."""
    pipeline = loaded("").pipeline
    assert (pipeline.sync.name, pipeline.buffers, pipeline.audit.every) == ("every_step", BufferSettings(), 0)
    (settings,) = (stage.effective_settings(pipeline) for stage in pipeline.stages_with_steps())
    assert (settings.plan.gradients, settings.mutate, settings.update) == ("all", None, None)
    assert settings.optimizer == pipeline.optimizer


def test_every_stage_has_its_class(loaded: Load) -> None:
    """Stages of steps are found apart from the others, in order."""
    pipeline = loaded(
        "sync: {local_sgd: {every: 2}}\n"
        "stages:\n"
        "  - train: {steps: 4}\n"
        "  - average\n"
        "  - forward: {epochs: 1}\n"
        "  - train: {steps: 4, sync: independent}\n"
        "  - broadcast: {source: 1}\n"
        "  - train: {steps: 4, sync: independent}\n"
        "  - broadcast:\n"
    ).pipeline
    kinds = [TrainStage, AverageStage, ForwardStage, TrainStage, BroadcastStage, TrainStage, BroadcastStage]
    assert [type(stage) for stage in pipeline.stages] == kinds
    assert [stage.index for stage in pipeline.train_stages()] == [0, 3, 5]
    assert [stage.index for stage in pipeline.stages_with_steps()] == [0, 2, 3, 5]
    assert all(isinstance(stage, StepStage) for stage in pipeline.stages_with_steps())
    assert [stage.source for stage in pipeline.stages if isinstance(stage, BroadcastStage)] == [1, 0]
    assert pipeline.stages[1].path == "stages[1].average"
    assert [to_plain_data(pipeline.stages[place]) for place in (1, 6)] == [
        "average",
        {"broadcast": {"source": 0}},
    ]


@pytest.mark.parametrize(
    ("sync", "train"),
    [
        ("every_step", "all"),
        ("{hierarchical_sgd: {across: 4}}", "host"),
        ("{hierarchical_sgd: {within: 2, across: 4}}", None),
        ("{local_sgd: {every: 2}}", None),
        ("{diloco: {every: 2}}", None),
        ("{average: {every: 2}}", None),
        ("{broadcast: {every: 2}}", None),
        ("independent", None),
    ],
)
def test_who_sums_gradients(loaded: Load, sync: str, train: str | None) -> None:
    """Backward sums gradients over all ranks, over those of a host, or not at all; without one, never."""
    pipeline = loaded(
        f"sync: {sync}\nstages: [{{train: {{steps: 9}}}}, {{forward: {{steps: 9, update: a.b}}}}]\n"
    ).pipeline
    first, second = pipeline.stages_with_steps()
    assert first.effective_settings(pipeline).plan.gradients == train
    assert second.effective_settings(pipeline).plan.gradients is None


def test_a_forward_stage_overrides_what_it_names(loaded: Load) -> None:
    """It inherits as a train stage does, all but micro-steps, and has its update and mutation for itself."""
    pipeline = loaded(
        "hooks: [fp16]\nclip_norm: 1.0\naccumulate: 4\nbuffers: never\nwarmup_steps: 2\n"
        "stages:\n"
        "  - forward: {steps: 3, update: {evolution_strategies: {population: 4}}}\n"
        "  - train: {steps: 9, mutate: {noise: {std: 1}}, optimizer: {sgd: {lr: 0.5}}}\n"
        "  - forward: {epochs: 2, hooks: [], buffers: {every: 2}, clip_norm: null,\n"
        "      sync: {average: {every: 1}}}\n",
        "model=cnn",
    ).pipeline
    first, second, third = (stage.effective_settings(pipeline) for stage in pipeline.stages_with_steps())
    assert (first.steps, first.accumulate, first.clip_norm, first.warmup_steps) == (3, 1, 1.0, 2)
    assert [hook.name for hook in first.hooks] == ["fp16"]
    assert first.buffers == BufferSettings(when="never")
    assert first.update is not None
    assert first.update.settings == built_in_options.EvolutionStrategiesOptions(std=0.05, population=4)
    assert first.mutate is None
    assert first.optimizer == pipeline.optimizer
    assert (second.accumulate, second.update) == (4, None)
    assert second.mutate is not None
    assert second.mutate.settings == built_in_options.NoiseOptions(std=1.0)
    assert second.optimizer.options == {"lr": 0.5}
    assert (third.epochs, third.hooks, third.clip_norm, third.update) == (2, (), None, None)
    assert (third.sync.name, third.buffers) == ("average", BufferSettings(every=2))


def test_dotted_mutations_and_updates(loaded: Load) -> None:
    """A dotted function keeps its options; nothing is imported."""
    pipeline = loaded("stages: [{forward: {steps: 1, mutate: {a.b: {c: 1}}, update: d.e}}]\n").pipeline
    settings = pipeline.stages_with_steps()[0].effective_settings(pipeline)
    assert settings.mutate is not None
    assert settings.update is not None
    assert (settings.mutate.name, settings.mutate.options, settings.mutate.source) == (
        "a.b",
        {"c": 1},
        "dotted",
    )
    assert (settings.update.name, settings.update.kind) == ("d.e", "update")


def test_overrides_reach_into_policies(loaded: Load) -> None:
    """An option of a policy, of a mutation and of buffers is set by its path, at the top and in a stage."""
    text = "sync: {local_sgd: {every: 2}}\nbuffers: {every: 2}\n"
    text += "stages: [{forward: {steps: 9, update: evolution_strategies}}]\n"
    pipeline = loaded(
        text,
        "sync.local_sgd.every=4",
        "buffers.reduce=mean",
        "stages[0].forward.update.evolution_strategies.std=0.5",
        "stages[0].forward.mutate.noise.std=0.25",
        "audit.every=3",
        "model=cnn",
    ).pipeline
    settings = pipeline.stages_with_steps()[0].effective_settings(pipeline)
    assert pipeline.sync.options["every"] == 4
    assert pipeline.buffers == BufferSettings(every=2, reduce="mean")
    assert settings.update is not None
    assert settings.update.options == {"std": 0.5, "population": 8}
    assert settings.mutate is not None
    assert settings.mutate.options == {"std": 0.25}
    assert pipeline.audit.every == 3


def test_an_override_cannot_choose_a_second_policy(loaded: Load) -> None:
    """A policy of another name is a second choice, in a stage as at the top."""
    stages = "stages: [{forward: {steps: 9, sync: {average: {every: 2}}}}]\n"
    for path in ("sync", "stages[0].forward.sync"):
        with pytest.raises(PipelineError, match="would be a second choice"):
            loaded("sync: {local_sgd: {every: 2}}\n" + stages, f"{path}.diloco.every=4")


def test_the_digest_knows_the_new_keys(loaded: Load) -> None:
    """Every key counts, and no way of writing it does."""
    digest = loaded("").digest()
    assert loaded("buffers: {when: auto}\naudit: {every: 0}\nsync: {every_step: {}}\n").digest() == digest
    others = [
        "buffers: never\n",
        "buffers: {reduce: mean}\n",
        "buffers: {every: 2}\n",
        "audit: {every: 2}\n",
        "audit: {on_drift: continue}\n",
        "sync: independent\n",
        "stages: [{train: {epochs: 1, mutate: a.b}}]\n",
        "stages: [{forward: {epochs: 1}}]\n",
        "stages: [{forward: {epochs: 1, update: a.b}}]\n",
        "stages: [{train: {epochs: 1, sync: independent}}, average]\n",
        "stages: [{train: {epochs: 1, sync: independent}}, broadcast]\n",
        "stages: [{train: {epochs: 1, optimizer: sgd}}]\n",
    ]
    digests = [loaded(text).digest() for text in others]
    assert len({digest, *digests}) == len(others) + 1


def test_resolved_tells_where_policies_come_from(loaded: Load) -> None:
    """Options of a policy and of buffers say their line; what is not said is a default."""
    text = loaded(
        "sync:\n  diloco: {every: 4}\nbuffers: {every: 2}\nstages:\n  - average\n  - forward: {steps: 9}\n"
        "  - train:\n      steps: 9\n      mutate:\n        noise: {std: 0.5}\n",
        "model=cnn",
    ).resolved_yaml()
    lines = [line.strip() for line in text.splitlines()]
    for line in (
        "diloco:  # line 6",
        "every: 4  # line 6",
        "fragments: 1  # default",
        "every: 2  # line 7",
        "reduce: broadcast  # default",
        "- average  # line 9",
        "noise:  # line 14",
        "std: 0.5  # line 14",
    ):
        assert line in lines, text
    assert "buffers: auto  # default" in loaded("").resolved_yaml().splitlines()
