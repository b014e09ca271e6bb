"""What the screen says of a stage's steps."""

import pytest

from ddprun.telemetry.progress import Screen
from ddprun.telemetry.recorder import AgreedSteps

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
    screen.begin("train", 50, first)
    screen.step(done, known, 2.5, 12.0)
    assert capsys.readouterr().err == f"{line}\n"
