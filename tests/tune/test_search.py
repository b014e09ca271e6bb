"""How long runs of a round are, and what of a pipeline they keep."""

import re
from pathlib import Path
from typing import Any

import pytest

from ddprun.compare import runs as compare
from ddprun.compare.runs import SeedRun, Variant, VariantRuns
from ddprun.config import load
from ddprun.explain.model_probe import WorldShape
from ddprun.predict.links import Links, parse_links
from ddprun.tune.candidates import find_tuned_stage
from ddprun.tune.search import SearchOutcome, find_not_run_reason, short_run_overrides, steps_per_turn_and_run
from ddprun.tune.selection import QualityFloors
from ddprun.tune.text import render_text, to_json_data, winner_file_comment
from tests.report.made_up import STEP_US, make
from tests.tune.figures import Figures

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
    found = steps_per_turn_and_run(step_s, budget_s, longest, stage_steps)
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
    tuned = find_tuned_stage(loaded, {})
    candidate = tuned.with_changes({"sync": {"local_sgd": {"every": 4}}})
    assert candidate is not None
    found = load(file, (*candidate.overrides, *short_run_overrides(candidate, tuned, 50))).pipeline
    (stage,) = found.stages
    assert stage.model_dump(exclude_unset=True) == kept
    assert found.train_stages()[0].effective_settings(found).sync.name == "local_sgd"


def test_a_warm_up_of_the_whole_pipeline_is_shortened(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(f"{HEAD}warmup_steps: 100\nstages: [train: {{steps: 900}}]\n")
    loaded = load(file)
    tuned = find_tuned_stage(loaded, {})
    candidate = tuned.with_changes({})
    assert candidate is not None
    assert load(file, short_run_overrides(candidate, tuned, 50)).pipeline.warmup_steps == 25


def test_where_real_runs_are_possible() -> None:
    assert find_not_run_reason(1, Links()) == ""
    assert find_not_run_reason(4, Links()) == "the 4 hosts do not take part (give --rdzv-endpoint on each)"
    assert "not this host's" in find_not_run_reason(1, parse_links("within=1Gbit"))


def lose_losses(folder: Path) -> None:
    """As in a run that goes on though its loss is NaN, which records have as null."""
    for file in (folder / "steps").iterdir():
        file.write_text(re.sub(r'"(loss|mean_loss)": [^,]+', r'"\1": null', file.read_text()))
    summary = folder / "summary.json"
    summary.write_text(summary.read_text().replace('"steps":', '"nonfinite": {"step": 1}, "steps":', 1))


def take_samples(folder: Path, samples: int) -> None:
    """Have each rank of a made-up run take so many in a step."""
    for file in (folder / "steps").iterdir():
        file.write_text(file.read_text().replace('"samples": 8', f'"samples": {samples}'))


def recorded(folder: Path, trials: int, *, finite: bool = True) -> SearchOutcome:
    """What a search has found after a round of made-up runs, in which all steps took equally long.

    The candidates take two or more times as many samples in a step as the file.
    """
    figures = Figures(folder)
    key = figures.tuned.paths_by_key["accumulate"]
    entries = [figures.entry(1000, **{key: accumulate}) for accumulate in range(2, trials + 2)]
    sides = []
    for number in range(trials + 2):
        run = SeedRun(make(folder / f"{number}", steps=200), exit_code=0)
        take_samples(run.folder, 8 * max(1, number))
        if not finite:
            lose_losses(run.folder)
        compare.load_run_records(run, 20)
        sides.append(VariantRuns(Variant(f"{number}", folder, twin=number == 1), [run]))
    outcome = SearchOutcome(
        tuned=figures.tuned,
        world=WorldShape(1, 2),
        links=Links(),
        floors=QualityFloors(),
        baseline=figures.entry(1000),
        entries=entries,
        unmeasured_stacks=(),
        not_run_reason="",
    )
    outcome.add_round(entries, sides)
    return outcome


def test_a_step_is_measured_as_it_is_and_compared_per_sample(tmp_path: Path) -> None:
    """A step with twice as many samples that takes as long is twice as fast, and takes as long."""
    outcome = recorded(tmp_path, 1)
    (trial,) = outcome.trials
    assert trial.speed_ratio is not None
    assert trial.speed_ratio.mean == pytest.approx(2)
    assert outcome.baseline_trial is not None
    assert trial.step_s == outcome.baseline_trial.step_s == pytest.approx(STEP_US / 1e6)
    assert to_json_data(outcome, None)["candidates"][0]["measured"]["step_us"] == STEP_US


def test_losses_that_are_not_finite_are_told(tmp_path: Path) -> None:
    """Of all runs of a round: nothing wins."""
    outcome = recorded(tmp_path, 2, finite=False)
    assert outcome.winner is None
    assert render_text(outcome, None).count("out: its loss is not finite") == 2
    file, *candidates = (outcome.baseline_trial, *outcome.trials)
    assert file is not None
    assert [one.loss for one in (file, *candidates)] == [None] * 3
    assert to_json_data(outcome, None)["file"]["loss"] is None


@pytest.mark.parametrize(
    ("trials", "words"),
    [(0, "0 of them by real runs"), (1, "1 of them by a real run"), (2, "2 of them by real runs")],
)
def test_the_text_says_how_many_were_run(tmp_path: Path, trials: int, words: str) -> None:
    """One is not several."""
    head = render_text(recorded(tmp_path, trials), None).splitlines()[1]
    assert head.endswith(f" by prediction; {words}; noise: up to 0.0%.")


def test_what_keeps_training_the_same_comes_first(tmp_path: Path) -> None:
    """In the table; a winner that changes the algorithm says so in its headline."""
    figures = Figures(tmp_path)
    outcome = SearchOutcome(
        tuned=figures.tuned,
        world=WorldShape(1, 2),
        links=Links(),
        floors=QualityFloors(),
        baseline=figures.entry(1000),
        entries=[],
        unmeasured_stacks=(),
        not_run_reason="",
        trials=[
            figures.trial(speed, changes=changes)
            for speed, changes in (
                (3.0, {"sync": {"local_sgd": {"every": 8}}}),
                (2.0, {"hooks": ["fp16"]}),
                (1.5, {"hooks": ["shared_memory"]}),
            )
        ],
        baseline_trial=figures.trial(1.0, changes={}),
    )
    lines = render_text(outcome, None).splitlines()
    names = [line.split("  ")[0] for line in lines if "±" in line]
    assert names == ["hooks=[shared_memory]", "hooks=[fp16]", "sync={local_sgd: {every: 8}}"]
    headline = (
        "Winner, which changes the algorithm (ranks synchronise every 8 steps): sync={local_sgd: {every: 8}}"
    )
    assert headline in " ".join(lines)
    assert winner_file_comment(outcome, "ddprun tune p.yaml")[-2:] == [
        "Changed:",
        "- sync: {local_sgd: {every: 8}} (was every_step)",
    ]
