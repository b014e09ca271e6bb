"""The candidates of a search: what is tried, and what never is."""

from pathlib import Path
from typing import Any

import pytest

from ddprun.config import LoadedPipeline, PipelineError, load
from ddprun.explain.model_probe import WorldShape
from ddprun.tune.candidates import (
    BUCKET_CAP_KEY,
    Candidate,
    TunedStage,
    find_tuned_stage,
    generate_candidates,
    values_to_try,
)

HEAD = """
model: {mlp: {inputs: 64, hidden: [32], outputs: 10}}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.1}}
"""
ONE_HOST, TWO_HOSTS = WorldShape(1, 2), WorldShape(2, 2)


def tuned_stage_of(folder: Path, text: str) -> TunedStage:
    file = folder / "p.yaml"
    file.write_text(HEAD + text)
    loaded = load(file)
    steps = {stage.index: stage.steps for stage in loaded.pipeline.stages_with_steps()}
    return find_tuned_stage(loaded, steps)


def searched(
    folder: Path, text: str, world: WorldShape = ONE_HOST, **vary: list[Any]
) -> tuple[LoadedPipeline, list[Candidate]]:
    tuned = tuned_stage_of(folder, text)
    tried = {**values_to_try(world, on_cpu=True), **vary}
    return tuned.loaded, list(generate_candidates(tuned, tried, ("sync", "hooks", "accumulate")))


@pytest.mark.parametrize(
    "text",
    [
        "stages: [train: {steps: 200}]\n",
        "stages: [train: {steps: 200}]\nlaunch: {device: cuda}\n",
        "stages: [train: {steps: 200, sync: {local_sgd: {every: 4}}}]\nhooks: [int8]\n",
        "stages: [{train: {steps: 200, evaluate: {every: 10}}}, evaluate]\n",
    ],
)
def test_what_check_refuses_is_no_candidate(tmp_path: Path, text: str) -> None:
    """Each loads as it will be written, the file as it is comes first, and no two say the same."""
    loaded, found = searched(tmp_path, text, TWO_HOSTS)
    assert found[0].changes == {}
    assert len(found) > 20
    for candidate in found:
        load(loaded.path, candidate.overrides)
    whole = [repr({**one.loaded.as_dict()}) for one in found]
    assert len(set(whole)) == len(whole)


def test_check_has_the_last_word(tmp_path: Path) -> None:
    """A stack that is refused with this device, and a policy with which there is nothing to evaluate."""
    loaded, found = searched(
        tmp_path,
        "stages: [{train: {steps: 200, evaluate: {every: 10}}}, evaluate]\nlaunch: {device: cuda}\n",
        sync=["every_step", "independent"],
        hooks=[[], ["shared_memory"], ["int8", "fp16"]],
    )
    with pytest.raises(PipelineError):
        load(loaded.path, ["sync=independent"])
    assert [one.name for one in found] == ["the file as it is"]


def test_the_batch_stays_unless_it_is_varied(tmp_path: Path) -> None:
    """Accumulation changes what a step trains on."""
    _, found = searched(tmp_path, "stages: [train: {steps: 200}]\n")
    assert {one.settings.accumulate for one in found} == {1}
    _, found = searched(tmp_path, "stages: [train: {steps: 200}]\n", accumulate=[1, 2])
    assert {one.settings.accumulate for one in found} == {1, 2}
    assert {one.rank_samples_per_step for one in found} == {8, 16}


def test_two_levels_are_tried_where_there_are_two(tmp_path: Path) -> None:
    """On several hosts; shared memory by itself only on one host."""
    text = "stages: [train: {steps: 200}]\n"
    by_world = {world: searched(tmp_path, text, world)[1] for world in (ONE_HOST, TWO_HOSTS)}
    for world, found in by_world.items():
        names = {hook.name for one in found for hook in one.settings.hooks}
        policies = {one.settings.sync.name for one in found}
        assert ("hierarchical" in names) == ("hierarchical_sgd" in policies) == (world.hosts > 1)
        assert ("shared_memory" in names) == (world.hosts == 1)


def test_a_policy_that_ignores_hooks_is_tried_once(tmp_path: Path) -> None:
    """With each period; two ranks have one pair only, which is all of them."""
    text = "hooks: [int8]\nstages: [train: {steps: 200}]\n"
    _, found = searched(tmp_path, text, TWO_HOSTS)
    names = [one.name for one in found if one.settings.sync.name == "gossip"]
    assert names == [f"sync={{gossip: {{every: {every}}}}}" for every in (2, 4, 8, 16, 32)]
    assert {one.exchange_period for one in found if one.settings.sync.name == "gossip"} == {2, 4, 8, 16, 32}
    assert {one.lossiness for one in found if one.settings.sync.name == "gossip"} == {0}
    _, found = searched(tmp_path, text.replace("200", "40"), TWO_HOSTS)
    assert {one.exchange_period for one in found if one.settings.sync.name == "gossip"} == {2, 4, 8}
    _, found = searched(tmp_path, text)
    assert "gossip" not in {one.settings.sync.name for one in found}


def test_the_outer_optimizer_of_sparseloco_is_tried(tmp_path: Path) -> None:
    """Beside the default one, which overlaps."""
    _, found = searched(tmp_path, "stages: [train: {steps: 200}]\n", hooks=[])
    outer = [
        (one.exchange_period, one.settings.sync.options)
        for one in found
        if one.settings.sync.name == "diloco"
    ]
    tried = [(every, options["outer_lr"], options["outer_momentum"]) for every, options in outer]
    assert sorted(one for one in tried if one[2] == 0) == [(8, 1.0, 0), (16, 1.0, 0), (32, 1.0, 0)]
    assert len(tried) == 6


def test_periods_fit_the_stage(tmp_path: Path) -> None:
    """Ranks are to meet four times, or nobody sees what rare meetings do."""
    _, found = searched(tmp_path, "stages: [train: {steps: 40}]\n")
    assert max(one.exchange_period for one in found) == 8


def test_keys_are_changed_where_the_file_has_them(tmp_path: Path) -> None:
    """The longest stage is tuned: its own keys where it has some, else those above."""
    text = """
hooks: [bf16]
stages:
  - train: {steps: 10}
  - train: {steps: 90, hooks: [fp16], accumulate: 2}
"""
    tuned = tuned_stage_of(tmp_path, text)
    assert tuned.stage.index == 1
    assert dict(tuned.paths_by_key) == {
        "sync": "sync",
        "hooks": "stages[1].train.hooks",
        BUCKET_CAP_KEY: BUCKET_CAP_KEY,
        "accumulate": "stages[1].train.accumulate",
    }
    candidate = tuned.with_changes({"stages[1].train.hooks": ["int8"], "sync": "every_step"})
    assert candidate is not None
    assert candidate.name == "stages[1].train.hooks=[int8]"
    assert [hook.name for hook in candidate.settings.hooks] == ["int8"]


def test_a_pipeline_that_does_not_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="no stage trains"):
        tuned_stage_of(tmp_path, "stages: [forward: {steps: 2}]\n")


def test_what_loses_more_is_known(tmp_path: Path) -> None:
    """By the same policy: rarer meetings, and hooks that keep less."""
    tuned = tuned_stage_of(tmp_path, "stages: [train: {steps: 200}]\n")

    def one(sync: Any, hooks: list[Any]) -> Candidate:
        found = tuned.with_changes({"sync": sync, "hooks": hooks})
        assert found is not None
        return found

    exact, half = one("every_step", ["shared_memory"]), one("every_step", ["fp16"])
    codes, half_rare = one("every_step", ["int4"]), one({"local_sgd": {"every": 8}}, ["fp16"])
    two_levels = one("every_step", [{"hierarchical": {"across": ["int8"]}}])
    assert [c.lossiness for c in (exact, half, two_levels, codes)] == [0, 1, 2, 3]
    assert [c.kind for c in (exact, half, half_rare)] == ["exact", "lossy hooks", "rare exchange"]
    assert codes.at_least_as_lossy_as(half)
    assert not half.at_least_as_lossy_as(codes)
    assert not half_rare.at_least_as_lossy_as(half)  # another policy: nobody knows
    assert one({"local_sgd": {"every": 16}}, ["int8"]).at_least_as_lossy_as(half_rare)
    assert not one({"local_sgd": {"every": 4}}, ["int8"]).at_least_as_lossy_as(half_rare)
    momentum, plain = (one({"diloco": {"every": 8, **outer}}, []) for outer in ({}, {"outer_momentum": 0}))
    often, rarely = (one({"gossip": {"every": every}}, []) for every in (2, 32))
    assert rarely.at_least_as_lossy_as(often)
    assert not often.at_least_as_lossy_as(rarely)
    assert not plain.at_least_as_lossy_as(momentum)  # other updates of the weights
    assert one({"diloco": {"every": 16, "overlap_steps": 4}}, ["int4"]).at_least_as_lossy_as(momentum)
