"""The training data of a run's stages, as feeds of batches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddprun.config import Choice, DataPair, LoadedPipeline, Pipeline, StepStageSettings
from ddprun.config.checks.stages import find_long_warmups
from ddprun.engine.build import build_collate, build_dataset, build_sampler_order, data_error_factory
from ddprun.engine.data import Feed


@dataclass(frozen=True, slots=True)
class Feeds:
    """The training data of all stages, batch by batch."""

    main: Feed  # of all stages that name no data of their own
    by_stage: Mapping[int, Feed]  # of stages with data of their own, by their index in `stages`

    def for_stage(self, stage: int) -> Feed:
        return self.by_stage.get(stage, self.main)

    def steps_of(self, stage: int, settings: StepStageSettings) -> int | None:
        """How many steps a stage has; None where nobody can know."""
        if settings.epochs is None:
            return settings.steps
        per_epoch = self.for_stage(stage).steps_per_epoch(settings.accumulate)
        return None if per_epoch is None else settings.epochs * per_epoch

    def steps_of_run(self, pipeline: Pipeline, begun: Sequence[int | None] = ()) -> int | None:
        """Steps of all stages that update the weights; None where nobody can know. Those that have `begun`
        keep the length that they had: ranks and batches may be others since.
        """
        total = 0
        for index, (stage, settings) in enumerate(pipeline.stages_and_settings()):
            steps = begun[index] if index < len(begun) else self.steps_of(stage.index, settings)
            if steps is None:
                return None
            total += steps if settings.updates_weights else 0
        return total

    def reaching_epoch_end(self, pipeline: Pipeline) -> Iterator[tuple[Feed, list[int]]]:
        """The feeds of map-style data of which the run comes to an epoch's end, each with its stages."""
        for feed in self.by_name().values():
            stages = [one for one in pipeline.stages_and_settings() if self.for_stage(one[0].index) is feed]
            micro_batches = sum((settings.steps or 0) * settings.accumulate for _, settings in stages)
            of_epoch = feed.steps_per_epoch(1)  # a round is any number of micro-batches
            surely = any(settings.epochs or settings.plan.round for _, settings in stages)
            if of_epoch is not None and (surely or micro_batches >= of_epoch):
                yield feed, [stage.index for stage, _ in stages]

    def by_name(self) -> dict[str, Feed]:
        """Each once, by its name in messages."""
        named = {f"data of stages[{index}]": feed for index, feed in self.by_stage.items()}
        return {"data": self.main} | named

    def state_dict(self) -> dict[str, Any]:
        return {name: feed.state_dict() for name, feed in self.by_name().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state_dict` was taken; a stage that has no position begins its data."""
        for name, feed in self.by_name().items():
            if feed is self.main or name in state:
                feed.load_state_dict(state[name])


def build_training_feeds(
    loaded: LoadedPipeline, dataset: Any, *, rank: int, world_size: int, pin: bool = False
) -> Feeds:
    """The training data, `dataset`, and that of stages which name some."""
    pipeline = loaded.pipeline

    def open_feed(dataset: Any, path: str, choice: Choice) -> Feed:
        return Feed(
            dataset,
            pipeline.loader,
            seed=pipeline.seed,
            rank=rank,
            world_size=world_size,
            collate=build_collate(loaded),
            sampler_order=build_sampler_order(loaded, dataset),
            pin=pin,
            make_error=data_error_factory(loaded, path, choice),
        )

    by_stage = {
        stage.index: open_feed(build_dataset(loaded, path, stage.data).train, path, stage.data)
        for stage in pipeline.stages_with_steps()
        if stage.data is not None and (path := f"{stage.path}.data")
    }
    path = "data.train" if isinstance(pipeline.data, DataPair) else "data"
    return Feeds(open_feed(dataset, path, pipeline.train_data()), by_stage)


def check_epoch_end_evaluations(loaded: LoadedPipeline, feeds: Feeds) -> None:
    """Raise a PipelineError for evaluations at the end of epochs of a length that nobody knows."""
    for stage in loaded.pipeline.stages_with_steps():
        by_epoch = stage.evaluate is not None and stage.evaluate.every == "epoch"
        if by_epoch and feeds.for_stage(stage.index).iterable:
            text = "the end of an epoch of iterable data is not known before it is there"
            raise loaded.error(f"{stage.path}.evaluate.every", text, "write a number of steps")


def check_warmups(loaded: LoadedPipeline, feeds: Feeds) -> None:
    """Raise a PipelineError for a warm-up that is not shorter than its stage, or than the run."""
    for one in find_long_warmups(loaded.pipeline, feeds.steps_of):
        raise loaded.error(one.path, one.problem, one.allowed)
