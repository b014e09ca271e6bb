"""How `ddprun explain` tells what it has found out."""

from collections.abc import Iterator, Sequence
from typing import Any

from ddprun.cli.columns import capital, count, ends, labelled, named_steps, size, table, told
from ddprun.cli.exchanged import HEAD, RIGHT, named, ranks_of, summed, tables, thinned
from ddprun.config import Buffers, Choice, TrainSettings
from ddprun.explain.explained import Exchange, Explained, StageExplained
from ddprun.sync.buffers import BufferUse


def text(explained: Explained) -> str:
    """All of it, for a reader."""
    known: dict[tuple[str, str], int] = {}
    parts = [_head(explained), *(_stage(stage, explained, known) for stage in explained.stages)]
    return "\n\n".join("\n".join(part) for part in parts)


def _head(explained: Explained) -> Iterator[str]:
    pipeline, world = explained.loaded.pipeline, explained.world
    parameters, buffers = explained.parameters, explained.buffers
    yield f"{pipeline.name}: {count(world.ranks, 'rank')} on {count(world.hosts, 'host')}"
    if world.ranks > 1 and world.hosts == 1:
        yield from told("Hosts", "Nothing goes between hosts. --nnodes 2 shows what would go between two.")
    if parameters is None or buffers is None:
        yield from told("Model", f"Its size cannot be known, as {explained.probe.unknown.model}.")
        return
    values = sum(one.numel() for one in parameters.values())
    held, more = (sum(one.nbytes for one in found.values()) for found in (parameters, buffers))
    what = f"{pipeline.model.name}: {count(len(parameters), 'parameter')}, {count(values, 'value')}, "
    what += size(held)
    yield from told(
        "Model", what + (f"; {count(len(buffers), 'buffer')}, {size(more)}" if buffers else "; no buffers")
    )
    sent = (
        f"Before the first step every rank takes rank 0's parameters and buffers, once: {size(held + more)}."
    )
    yield from told("Start", sent)
    beside = {"timings.fidelity_every": pipeline.timings.fidelity_every, "audit.every": pipeline.audit.every}
    keys = [f"{key}: {every}" for key, every in beside.items() if every]
    if keys:
        yield from told("Not counted", f"What ranks exchange to be looked at: {', '.join(keys)}.")


def _stage(stage: StageExplained, explained: Explained, known: dict[tuple[str, str], int]) -> Iterator[str]:
    """`known`: what has been said before, by label and text, and in which stage."""

    def said(label: str, text: str) -> Iterator[str]:
        first = known.setdefault((label, text), stage.index)
        return told(label, text if first == stage.index else f"As in stages[{first}].")

    settings, title = stage.settings, f"stages[{stage.index}]: {stage.kind}"
    if settings is None:
        yield title
        yield from _without_steps(stage, explained)
        return
    hooks = ", ".join(map(_chosen, settings.hooks))
    yield f"{title} for {_length(stage, settings)}, sync: {_chosen(settings.sync)}, hooks: [{hooks}]"
    if stage.begin:
        what = ", and ".join(map(named, stage.begin))
        why = "Equal gradients keep ranks equal only if that is equal, too"
        yield from told("Begin", f"Once: {what}. {why}.")
    yield from said("Forward", _forward(stage, settings))
    yield from said("Buffers", _buffers(stage, settings.buffers, explained))
    if stage.kind == "train":
        yield from told("Backward", _backward(stage, settings))
        yield from tables(_at(stage, "backward"), stage.ranks)
    yield from _after_steps(stage, settings)
    yield from _end(stage)
    yield from said("Control", _control_word(stage))
    yield from said("Loss", _loss(settings))
    yield from _sums(stage)


def _length(stage: StageExplained, settings: TrainSettings) -> str:
    steps = "" if stage.steps is None else count(stage.steps, "step")
    if settings.epochs is None:
        return steps
    return count(settings.epochs, "epoch") + (f" ({steps})" if steps else "")


def _forward(stage: StageExplained, settings: TrainSettings) -> str:
    said = "No parameters are sent in a forward pass, in this stage or any other. "
    if settings.mutate is not None:
        return (
            f"{said}mutate changes each rank's own at the stage's start, and after each synchronisation but "
            "the last. DDP does not undo that: it sends gradients, no parameters."
        )
    if _drifts(settings):
        return f"{said}noop gives each rank its own back, so ranks drift apart."
    if settings.gradients == "all":
        return (
            f"{said}Ranks hold the same from the start, and all take their steps by the same mean gradient, "
            "so they stay the same."
        )
    if stage.kind == "forward" and settings.update is None:
        return f"{said}Nothing changes them here."
    if settings.plan.period == 1:
        return f"{said}Each rank changes its own, and they are averaged after the step."
    return f"{said}Each rank changes its own until ranks synchronise."


def _buffers(stage: StageExplained, setting: Buffers, explained: Explained) -> str:
    verdict, held = explained.probe.buffer_use, explained.buffers
    chosen = f"{_shown(setting.plain())}: "
    if held == {}:
        return f"{chosen}the model has none. DDP's own broadcast before each forward pass would send nothing."
    if verdict is None or held is None:
        unknown = explained.probe.unknown
        reason = unknown.batch or unknown.model
        return f"{chosen}whether any change cannot be known, as {reason}. They are not among the bytes below."
    said = chosen + _found(verdict, len(held))
    moments = {exchange.moment for exchange in stage.exchanges if exchange.route.kind == "buffers"}
    if "before_forward" in moments:
        said += " They are sent before each forward pass."
        said += "" if verdict.read else " Training would come out the same without: before_evaluate would do."
    elif "after_step" in moments:
        said += " They are sent after a step, as below."
    else:
        said += " None are sent in this stage."
        if verdict.changing:
            never = "nor before evaluate and save: each rank keeps its own"
            said += (
                f" {capital(never if setting.when == 'never' else 'they are sent before evaluate and save')}."
            )
    every = sum(one.nbytes for one in held.values())
    return f"{said} DDP's own broadcast would send {size(every)} before each forward pass."


def _found(verdict: BufferUse, held: int) -> str:
    """What the buffers do."""
    if not verdict.changing:
        return f"of {count(held, 'buffer')} none changes in training, but for counters."
    change = "changes" if len(verdict.changing) == 1 else "change"
    read = "reads them" if verdict.read else "never reads them"
    return (
        f"of {count(held, 'buffer')} {len(verdict.changing)} {change} in training ({ends(verdict.changing)}, "
        f"{size(verdict.bytes)}), and training {read}."
    )


def _drifts(settings: TrainSettings) -> bool:
    """Whether hooks give each rank its own back."""
    return any(hook.name == "noop" for hook in settings.hooks)


def _backward(stage: StageExplained, settings: TrainSettings) -> str:
    for exchange in _at(stage, "backward"):
        said = f"Gradients are averaged over {ranks_of(exchange)}, in every step"
        if _drifts(settings):
            said = "Gradients go through the hooks in every step, but to no other rank"
        if settings.accumulate > 1:
            said += f", in the last of its {settings.accumulate} micro-steps"
        if exchange.buckets is None:
            return f"{said}. Into which buckets DDP puts them cannot be known, as {exchange.unknown}."
        return (
            f"{said}, in {count(len(exchange.buckets), 'bucket')}, each sent as soon as backward has filled "
            "it, while backward goes on."
        )
    return "No gradients are sent."


def _after_steps(stage: StageExplained, settings: TrainSettings) -> Iterator[str]:
    exchanges = _at(stage, "after_step")
    steps: dict[tuple[int, ...], list[Exchange]] = {}
    for exchange in exchanges:
        of = [p.steps for p in stage.patterns if exchange in p.exchanges]
        steps.setdefault(tuple(sorted(step for places in of for step in places)), []).append(exchange)
    lines = []
    for places, together in steps.items():
        lines.append(f"{_when(places, stage)}: {', and '.join(map(named, together))}.")
    idle = stage.cycle - len({step for places in steps for step in places})
    if not lines:
        lines.append("Nothing is sent.")
    elif idle:
        lines.append(
            f"the other {idle} of {'every ' if _repeats(stage) else ''}{stage.cycle} steps: nothing."
        )
    for place, line in enumerate(thinned(lines)):
        yield from told("" if place else "After a step", capital(line))
    if overlap := max((one.delay for one in settings.plan.transfers), default=0):
        said = f"An exchange goes on beside training, and is applied exactly {count(overlap, 'step')} later."
        yield from told("", said)
    yield from tables(exchanges, stage.ranks)


def _end(stage: StageExplained) -> Iterator[str]:
    if stage.left_apart:
        yield from told("End", "Ranks stay as they are: the next stage takes them so.")
    elif stage.end is None:
        yield from told("End", "If the last step leaves ranks apart, they synchronise once more.")
    elif stage.end:
        what = ", and ".join(map(named, stage.end))
        yield from told("End", f"The last step leaves ranks apart, so once more: {what}.")
        shown = {exchange.route for exchange in _at(stage, "after_step")}
        yield from tables([exchange for exchange in stage.end if exchange.route not in shown], stage.ranks)


def _control_word(stage: StageExplained) -> str:
    steps = stage.control_words
    if not steps:
        return "None: ranks hear nothing of each other before the stage's end."
    if max(steps) <= stage.cycle:
        when = _when(steps, stage)
    else:  # the first exchanges that go on beside training are applied in the second cycle
        whole = sorted(step + cycle * stage.cycle for step in steps for cycle in range(3))
        listed = [step for step in whole if stage.steps is None or step <= stage.steps]
        when = f"steps {', '.join(map(str, listed[:4]))}{' …' if len(listed) > 4 else ''}"
    return (
        f"For {when} each rank tells the others its loss, and whether it is to stop: a few numbers, for all "
        "steps of half a second at once, which are not among the bytes below."
    )


def _loss(settings: TrainSettings) -> str:
    beside = "The log's mean loss is computed beside training, and nothing depends on it."
    own = "Each rank's is that of its own samples"
    if settings.gradients == "all" and not _drifts(settings):
        return (
            f"DDP does not average it. {own}; gradients are averaged: the step is the mean loss's. {beside}"
        )
    others = "no gradients are averaged"
    if settings.gradients == "host" and not _drifts(settings):
        others = "gradients are averaged inside a host only"
    return f"It is not averaged. {own}; {others}. {beside}"


def _without_steps(stage: StageExplained, explained: Explained) -> Iterator[str]:
    parameters = stage.kind in ("average", "broadcast")
    if stage.end:
        what = ", and ".join(map(named, stage.end))
        if not parameters:
            what = f"first, as far as they have changed: {what}"
        yield from told("", f"{capital(what)}.")
        yield from tables(stage.end, stage.ranks)
        yield from labelled("Sent", table([HEAD, summed("once", stage.whole_amount)], RIGHT))
        return
    before = [one.settings for one in explained.stages[: stage.index] if one.settings is not None]
    setting = before[-1].buffers if before else explained.loaded.pipeline.buffers
    own = setting.when == "never" and explained.buffers != {}
    yield from told("", "Nothing is sent before it" + (": each rank has buffers of its own." if own else "."))


def _sums(stage: StageExplained) -> Iterator[str]:
    rows = []
    for pattern in stage.patterns:
        rest = len(stage.patterns) > 1 and pattern is stage.patterns[-1]
        rows.append(summed(_when(pattern.steps, stage, rest=rest), pattern.amount))
    rows = thinned(rows, ("…", "", "", ""))
    if len(stage.patterns) > 1:
        rows.append(summed("mean of all steps", stage.cycle_amount, stage.cycle))
    rows.append(summed("1,000 steps", stage.cycle_amount, stage.cycle, 1000))
    if stage.steps is not None:
        rows.append(summed(f"the stage: {count(stage.steps, 'step')}", stage.whole_amount))
    yield from labelled("Sent", table([HEAD, *rows], RIGHT))


def _at(stage: StageExplained, moment: str) -> list[Exchange]:
    return [exchange for exchange in stage.exchanges if exchange.moment == moment]


def _repeats(stage: StageExplained) -> bool:
    return stage.steps is None or stage.steps > stage.cycle


def _when(steps: Sequence[int], stage: StageExplained, *, rest: bool = False) -> str:
    """Which steps they are; `rest`: all others have been named before."""
    if rest and len(steps) < stage.cycle:
        every = "every " if _repeats(stage) else ""
        return f"the other {len(steps)} of {every}{count(stage.cycle, 'step')}"
    return named_steps(steps, stage.cycle, stage.steps)


def _chosen(choice: Choice) -> str:
    """A choice as a pipeline file would have it, without what is left out there."""
    options = dict(choice.options)
    if choice.settings is not None:
        options = choice.settings.model_dump(mode="json", exclude_defaults=True)
    return _shown({choice.name: options} if options else choice.name)


def _shown(value: Any) -> str:
    """A value as a pipeline file would have it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return "null" if value is None else str(value)
