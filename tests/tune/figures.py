"""Made-up candidates and results, for tests of what is chosen."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddprun.compare.runs import SpeedRatio
from ddprun.config import load
from ddprun.predict.cost_model import StepPrediction
from ddprun.predict.step_simulator import SimulatedStep
from ddprun.tune.candidates import Candidate, TunedStage, find_tuned_stage
from ddprun.tune.selection import PredictedCandidate, Trial

TEXT = """
model: {mlp: {inputs: 64, hidden: [32], outputs: 10}}
data: digits
optimizer: {sgd: {lr: 0.1}}
stages: [train: {steps: 500}]
"""


class Figures:
    """Candidates of one file, with the figures that a test gives them."""

    def __init__(self, folder: Path) -> None:
        file = folder / "figures.yaml"
        file.write_text(TEXT)
        self.loaded = load(file)
        self.tuned: TunedStage = find_tuned_stage(self.loaded, {0: 500})

    def candidate(self, **changes: Any) -> Candidate:
        found = self.tuned.with_changes(changes)
        assert found is not None
        return found

    def entry(self, step_us: float, **changes: Any) -> PredictedCandidate:
        """A candidate whose step is predicted to take so long."""
        return PredictedCandidate(self.candidate(**changes), predicted(step_us))

    def trial(
        self,
        speed: float,
        *,
        reach: float = 0.01,
        verdict: str = "faster",
        cosine: float | None = 1.0,
        loss: float | None = 1.0,
        to_loss: float | None = None,
        finite: bool = True,
        code: int = 0,
        changes: Mapping[str, Any],
    ) -> Trial:
        """A run that was so many times as fast as the file as it is, whose loss is 1."""
        return Trial(
            entry=self.entry(1000 / speed, **changes),
            run_dir=Path("runs"),
            exit_code=code,
            verdict=verdict,
            speed_ratio=SpeedRatio(speed, speed - reach, speed + reach, 10),
            step_s=1e-3 / speed,
            spread_s=1e-5,
            cosine=cosine,
            loss=loss,
            baseline_loss=1.0,
            speedup_to_loss=speed if to_loss is None else to_loss,
            loss_is_finite=finite,
        )


def predicted(step_us: float) -> StepPrediction:
    """A prediction of which only the time counts."""
    return StepPrediction(
        step_us=step_us,
        parts_us={},
        waits_us={},
        links_busy_us={"within": 0.0, "across": 0.0},
        host_sends_bytes=0.0,
        without_exchange_us=step_us,
        cores_contended=False,
        last_exchange_step=SimulatedStep(),
        hooks_measured=True,
    )
