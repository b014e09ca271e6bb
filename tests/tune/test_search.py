"""How long runs of a round are, and what of a pipeline they keep."""

from pathlib import Path
from typing import Any

import pytest

from ddprun.config import load
from ddprun.predict.links import Links, parse_links
from ddprun.tune.candidates import changed, target
from ddprun.tune.search import lengths, short, why_not_run

HEAD = """
model: {mlp: {inputs: 64, hidden: [32], outputs: 10}}
data: digits
optimizer: {sgd: {lr: 0.1}}
"""


@pytest.mark.parametrize(
    ("step_s", "budget_s", "longest", "stage_steps", "expected"),
    [
        (0.01, 100, 1, 10_000, (20, 520)),  # enough time: turns of the usual length, and as many as count
        (0.01, 100, 32, 10_000, (32, 832)),  # a turn holds the longest period
        (0.01, 100, 32, 345, (32, 320)),  # no longer than the stage
        (1.0, 60, 32, 10_000, (7, 56)),  # little time: shorter turns, but as many as tell noise
        (1.0, 15, 1, 10_000, None),
        (0.01, -5, 1, None, None),
        (1.0, 800, None, None, (100, 800)),  # the longest turn that there is time for
        (0.01, 100, 1, 3, (2, 16)),  # a stage that is shorter than any comparison
    ],
)
def test_a_round_fits_the_time(
    step_s: float,
    budget_s: float,
    longest: int | None,
    stage_steps: int | None,
    expected: tuple[int, int] | None,
) -> None:
    found = lengths(step_s, budget_s, longest, stage_steps)
    assert found == expected
    if found is not None:
        turn, steps = found
        assert steps % turn == 0
        assert steps // turn >= 8
        assert stage_steps == 3 or steps * step_s <= budget_s


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("hooks: [fp16]\n", {"steps": 50}),
        ("stages: [train: {epochs: 3}, evaluate, save]\n", {"steps": 50}),
        (
            "stages: [average, train: {steps: 900, clip_norm: 1.0, evaluate: {every: 5}, "
            "stop: {metric: loss, patience: 2}}]\n",
            {"steps": 50, "clip_norm": 1.0},
        ),
        (
            "stages: [train: {steps: 900, warmup_steps: 100}]\n",
            {"steps": 50, "warmup_steps": 25},
        ),
    ],
)
def test_a_short_run_keeps_the_stage_alone(tmp_path: Path, text: str, kept: dict[str, Any]) -> None:
    """With its own options and the candidate's; what measures or ends it is left out."""
    file = tmp_path / "p.yaml"
    file.write_text(HEAD + text)
    loaded = load(file)
    tuned = target(loaded, {})
    candidate = changed(loaded, tuned, {"sync": {"local_sgd": {"every": 4}}})
    assert candidate is not None
    found = load(file, (*candidate.overrides, *short(candidate, tuned, 50))).pipeline
    (stage,) = found.stages
    assert stage.model_dump(exclude_unset=True) == kept
    assert found.train_stages()[0].effective(found).sync.name == "local_sgd"


def test_a_warm_up_of_the_whole_pipeline_is_shortened(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(f"{HEAD}warmup_steps: 100\nstages: [train: {{steps: 900}}]\n")
    loaded = load(file)
    tuned = target(loaded, {})
    candidate = changed(loaded, tuned, {})
    assert candidate is not None
    assert load(file, short(candidate, tuned, 50)).pipeline.warmup_steps == 25


def test_where_real_runs_are_possible() -> None:
    assert why_not_run(1, Links()) == ""
    assert why_not_run(4, Links()) == "the 4 hosts are not here"
    assert "not that of this one" in why_not_run(1, parse_links("within=1Gbit"))
