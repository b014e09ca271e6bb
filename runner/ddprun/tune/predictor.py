"""Predicts each candidate from what steps cost here."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddprun.config import LoadedPipeline, PipelineError
from ddprun.explain.explain import Explanation, StageExplanation, explain
from ddprun.explain.model_probe import ModelProbe
from ddprun.predict.forecast import is_predictable
from ddprun.predict.links import Links
from ddprun.predict.model import CostModel
from ddprun.tune import TuneError
from ddprun.tune.candidates import BUCKET_CAP_KEY, Candidate, TunedStage, with_changes
from ddprun.tune.choose import PredictedCandidate

_PROGRESS_EVERY = 25  # candidates


@dataclass
class CandidatePredictor:
    """Predicts candidates of a pipeline, which was `explained` for the ranks in question, over `links`."""

    loaded: LoadedPipeline
    tuned: TunedStage
    explained: Explanation
    cost_model: CostModel
    links: Links
    progress: Callable[[str], None]
    _probes: list[ModelProbe] = field(default_factory=list)  # of candidates, beside that of the pipeline

    def predict(self, found: Sequence[Candidate]) -> Iterator[PredictedCandidate]:
        """Predict each candidate; those that only the attempt shows to be impossible are left out."""
        for number, candidate in enumerate(found, 1):
            if len(found) > _PROGRESS_EVERY and number % _PROGRESS_EVERY == 1:
                self.progress(f"predicting {number} of {len(found)} candidates")
            try:
                stage = self._explain(candidate).stages[self.tuned.stage.index]
            except PipelineError:
                if not candidate.changes:
                    raise
                continue
            if is_predictable(stage):
                predicted = self.cost_model.predict(stage, self.explained.world, self.links)
                yield PredictedCandidate(candidate, predicted, _layouts(stage))
            elif not candidate.changes:
                raise TuneError("what the file's own stage sends is not known, so nothing can be predicted")

    def with_other_caps(
        self, best: Sequence[PredictedCandidate], caps_mb: Sequence[Any]
    ) -> Iterator[PredictedCandidate]:
        """The best candidates, and the file, with other sizes of buckets, where these make other buckets."""
        key = self.tuned.paths_by_key[BUCKET_CAP_KEY]
        for one in best:
            known = [one.layouts]
            found = [
                with_changes(self.loaded, self.tuned, {**one.candidate.changes, key: cap}) for cap in caps_mb
            ]
            resized = [each for each in found if each is not None and key in each.changes]
            for other in self.predict(resized):
                if other.predicted.hooks_measured and other.layouts not in known:
                    known.append(other.layouts)
                    yield other

    def _explain(self, candidate: Candidate) -> Explanation:
        """A candidate, explained for the ranks in question, with what is known of the model."""
        probe: ModelProbe | None = next(
            (one for one in (self.explained.probe, *self._probes) if one.suffices_for(candidate.loaded)), None
        )
        world = self.explained.world
        explained = explain(
            candidate.loaded, hosts=world.hosts, ranks_per_host=world.ranks_per_host, probe=probe
        )
        if probe is None:
            self._probes.append(explained.probe)
        return explained


def _layouts(stage: StageExplanation) -> tuple[Any, ...]:
    return tuple(
        (exchange.moment, tuple(bucket.params for bucket in exchange.buckets or ()))
        for pattern in stage.patterns
        for exchange in pattern.exchanges
    )
