"""Made-up candidates and results, for tests of what is chosen."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddprun.compare.compare import Ratio
from ddprun.config import load
from ddprun.predict.model import Predicted
from ddprun.predict.timeline import Played
from ddprun.tune.candidates import Candidate, Target, changed, target
from ddprun.tune.choose import Entry, Trial

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
        self.target: Target = target(self.loaded, {0: 500})

    def candidate(self, **changes: Any) -> Candidate:
        found = changed(self.loaded, self.target, changes)
        assert found is not None
        return found

    def entry(self, step_us: float, **changes: Any) -> Entry:
        """A candidate whose step is predicted to take so long."""
        return Entry(self.candidate(**changes), predicted(step_us))

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
            code=code,
            verdict=verdict,
            ratio=Ratio(speed, speed - reach, speed + reach, 10),
            step_s=1e-3 / speed,
            spread_s=1e-5,
            cosine=cosine,
            loss=loss,
            loss_of_file=1.0,
            to_loss=speed if to_loss is None else to_loss,
            finite=finite,
        )


def predicted(step_us: float) -> Predicted:
    """A prediction of which only the time counts."""
    return Predicted(
        step_us=step_us,
        parts={},
        waits={},
        busy={"within": 0.0, "across": 0.0},
        across_bytes=0.0,
        alone_us=step_us,
        limit="computation",
        played=Played(),
        measured=True,
    )
