"""What the screen says of a stage's steps."""

import pytest

from ddprun.telemetry.progress import ProgressBarScreen, Screen
from ddprun.telemetry.recorder import AgreedSteps
from ddprun.telemetry.records import Summary

KNOWN = AgreedSteps([120], False, False, False, loss=1.9484)


@pytest.mark.parametrize(
    ("first", "done", "known", "line"),
    [
        (0, 5, None, "train: step 5/50, rank 0's loss 2.5000, 12.0 steps/s"),
        (0, 120, KNOWN, "train: step 120/50, mean loss 1.9484, 12.0 steps/s"),
        (
            100,
            20,
            KNOWN,
            "train: step 20/50 (120 of the run), mean loss 1.9484, 12.0 steps/s",
        ),
        (
            100,
            25,
            KNOWN,
            "train: step 25/50 (125 of the run), mean loss 1.9484 at step 120, 12.0 steps/s",
        ),
    ],
)
def test_a_line_says_which_step_its_losses_are_of(
    first: int, done: int, known: AgreedSteps | None, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks that train apart learn each other's losses where they exchange something; evaluations, stragglers
    and checkpoints count the run's steps.
    """
    screen = Screen(str)
    screen.begin_stage("train", 50, first)
    screen.show_step(done, known, 2.5, 12.0)
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize("kind", [Screen, ProgressBarScreen])
def test_texts_are_shown_as_they_are(kind: type[Screen], capsys: pytest.CaptureFixture[str]) -> None:
    """Also those that rich would take for its markup, or for the code of an emoji: `own.py:100:` is none."""
    screen = kind(str)
    screen.note("[bold] own.py:100: no [/bold]")
    names = {"steps_per_s": 1.0, "communication_s": 0.0, "run_dir": "runs/[/a]/:100:"}
    screen.show_summary(Summary(status="done", steps=1, values={"loss[a]": 1.0}, **names))  # type: ignore[arg-type]
    shown = capsys.readouterr().err
    assert "[bold] own.py:100: no [/bold]" in shown
    assert "mean loss[a], last known" in shown
    assert "runs/[/a]/:100:" in shown
