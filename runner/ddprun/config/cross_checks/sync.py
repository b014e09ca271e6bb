"""Sync policies with the ranks there are, the lengths of stages, and the stages beside them."""

from collections.abc import Iterator

from ddprun.config.choices import Choice
from ddprun.config.cross_checks.rule import CrossCheck, known_ranks, place, reads
from ddprun.config.options import Average, Broadcast, Diloco, HierarchicalSgd, LocalSgd
from ddprun.config.schema import AverageStage, BroadcastStage, Forward, Pipeline, Stage, StepStage, Train
from ddprun.config.tree import KeyPath


def _policies(pipeline: Pipeline) -> Iterator[tuple[KeyPath, Choice]]:
    """Every policy that the file names, with its place."""
    yield ("sync",), pipeline.sync
    for stage in pipeline.step_stages():
        if "sync" in stage.model_fields_set:
            yield place(stage, "sync"), stage.sync


@reads("sync", "stages", "launch")
def _source_is_a_rank(pipeline: Pipeline) -> Iterator[CrossCheck]:
    ranks = known_ranks(pipeline)
    sources = [
        ((*path, "broadcast", "source"), sync.settings.source)
        for path, sync in _policies(pipeline)
        if isinstance(sync.settings, Broadcast)
    ]
    sources += [
        (("stages", stage.index, "broadcast", "source"), stage.source)
        for stage in pipeline.stages
        if isinstance(stage, BroadcastStage)
    ]
    for path, source in sources:
        if ranks and source >= ranks:
            text = f'"source: {source}" clashes with "launch": there {_ranks(ranks)}'
            yield CrossCheck(path, text, f"allowed: 0 to {ranks - 1}" if ranks > 1 else "allowed: 0")


def _ranks(count: int) -> str:
    return f"are {count} ranks" if count > 1 else "is 1 rank"


@reads("sync", "stages", "launch")
def _two_levels(pipeline: Pipeline) -> Iterator[CrossCheck]:
    ranks = known_ranks(pipeline)
    for path, sync in _policies(pipeline):
        if not isinstance(sync.settings, HierarchicalSgd):
            continue
        hosts, within, across = sync.settings.hosts, sync.settings.within, sync.settings.across
        if hosts and ranks and ranks % hosts:
            text = f'"hosts: {hosts}" clashes with "launch": it does not divide {ranks} ranks'
            yield CrossCheck((*path, sync.name, "hosts"), text, "hosts that hold equally many ranks")
        if within == across:
            text = (
                f'"within: {within}" has no effect with "across: {across}": all ranks average whenever those'
            )
            text += " of a host do"
            yield CrossCheck(
                (*path, sync.name, "within"), text, "lengthen across, or use local_sgd", "warning"
            )


@reads("sync", "stages")
def _period_longer_than_stage(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for stage in pipeline.step_stages():
        settings = stage.effective(pipeline)
        key, period = _period(settings.sync)
        if settings.steps is None or period <= settings.steps:
            continue
        text = f'"{key}: {period}" is longer than "steps: {settings.steps}" of {stage.path}: '
        if _next_takes_ranks_apart(pipeline, stage):
            text += "ranks do not synchronise in it"
        elif isinstance(settings.sync.settings, Diloco) and settings.sync.settings.fragments > 1:
            text += "some fragments are exchanged only at its end"
        else:
            text += "ranks synchronise only at its end"
        own = (*place(stage, "sync"), settings.sync.name, key)
        path = own if "sync" in stage.model_fields_set else ("stages", stage.index, stage.name, "steps")
        yield CrossCheck(path, text, "shorten the period or lengthen the stage", "warning")


def _period(sync: Choice) -> tuple[str, int]:
    """The key that says after how many steps all ranks synchronise, and its value."""
    options = sync.settings
    if isinstance(options, HierarchicalSgd):
        return "across", options.across
    if isinstance(options, (LocalSgd, Diloco, Average, Broadcast)):
        return "every", options.every
    return "", 0


def _next_takes_ranks_apart(pipeline: Pipeline, stage: Stage) -> bool:
    """Whether the next stage takes ranks as they are, so that this one does not end in a synchronisation."""
    if stage.index + 1 == len(pipeline.stages):
        return False
    following = pipeline.stages[stage.index + 1]
    if isinstance(following, StepStage):
        return following.effective(pipeline).sync.name == "independent"
    return isinstance(following, (AverageStage, BroadcastStage))


@reads("sync", "hooks", "stages")
def _parameters_are_equal_already(pipeline: Pipeline) -> Iterator[CrossCheck]:
    equal, why = True, "all ranks start with the same parameters"
    for stage in pipeline.stages:
        if isinstance(stage, (AverageStage, BroadcastStage)):
            if equal:
                yield CrossCheck(
                    ("stages", stage.index), f'"{stage.name}" has no effect: {why}', None, "warning"
                )
            equal = True
        elif isinstance(stage, (Train, Forward)):
            equal = _leaves_equal(pipeline, stage, before=equal)
        else:
            continue
        why = f"{stage.path} leaves all ranks with the same parameters"


def _leaves_equal(pipeline: Pipeline, stage: Train | Forward, *, before: bool) -> bool:
    """Whether all ranks surely hold the same parameters after a stage."""
    settings = stage.effective(pipeline)
    changes = isinstance(stage, Train) or settings.update is not None or settings.mutate is not None
    if not _next_takes_ranks_apart(pipeline, stage):
        return True  # the stage ends in one more synchronisation
    if not changes:
        return before
    sent = settings.sync.name == "every_step" and all(hook.name != "noop" for hook in settings.hooks)
    return sent and (settings.mutate is None or isinstance(stage, Forward))


RULES = (_source_is_a_rank, _two_levels, _period_longer_than_stage, _parameters_are_equal_already)
