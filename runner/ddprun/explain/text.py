"""Words a plan for a terminal: labelled paragraphs and tables. Knows no policy, only what its plan says."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

from ddprun.config import Choice, Pipeline, StepStage, StepStageSettings
from ddprun.config.yaml_writer import flow_yaml
from ddprun.engine.model_with_loss import ModelWithLoss
from ddprun.explain.explain import Explanation, PlannedExchange, StageExplanation
from ddprun.explain.traffic import Bucket, GroupScope, SentBytes
from ddprun.units import abbreviated_list, format_bytes, format_count, format_table

_WIDTH, _INDENT = 110, 16
_ROWS = 12  # longer tables lose their middle; `--format json` has all


def render_text(explained: Explanation, extra_lines: Mapping[int, Iterable[str]] | None = None) -> str:
    """The whole explanation, for a reader; `extra_lines`: further lines of stages, by their index."""
    parts: list[Iterable[str]] = [_header_lines(explained)]
    for stage in explained.stages:
        extra = (extra_lines or {}).get(stage.index, ())
        parts.append(chain(_stage_lines(stage, explained), extra))
    return "\n\n".join("\n".join(part) for part in parts)


def _header_lines(explained: Explanation) -> Iterator[str]:
    pipeline = explained.loaded.pipeline
    parameters, buffers = explained.parameters, explained.buffers
    yield f"{pipeline.name}: {explained.world}"
    values = sum(one.numel() for one in parameters.values())
    held, more = (sum(one.nbytes for one in found.values()) for found in (parameters, buffers))
    name = pipeline.model.name
    name += " and its loss" if isinstance(explained.probe.model, ModelWithLoss) else ""
    what = f"{name}: {format_count(len(parameters), 'parameter')}, "
    what += f"{format_count(values, 'value')}, {format_bytes(held)}; "
    what += f"{format_count(len(buffers), 'buffer')}, {format_bytes(more)}" if buffers else "no buffers"
    yield from paragraph("Model", what)
    yield from _compiled_graph_lines(explained)
    frozen = [one for one in parameters.values() if not one.requires_grad]
    if frozen:
        held_frozen = format_bytes(sum(one.nbytes for one in frozen))
        which = f"{len(frozen)} of them, {held_frozen}, require no gradient"
        unless = "they are sent only if something else makes them differ between ranks"
        yield from paragraph("Frozen", f"{which}: {unless}.")
    start = "Before the first step every rank takes rank 0's parameters and buffers, once"
    yield from paragraph("Start", f"{start}: {format_bytes(held + more)}.")
    yield from paragraph(
        "Not counted",
        "What your own code sends by torch.distributed, and what ranks exchange for sync_batchnorm, "
        "find_unused_parameters, audit.every and timings.fidelity_every.",
    )


def _compiled_graph_lines(explained: Explanation) -> Iterator[str]:
    """What torch.compile makes of the model: its graphs, and where they break."""
    settings, compiled = explained.loaded.pipeline.compile, explained.probe.compiled
    if settings is None or compiled is None:
        return
    graphs, breaks = compiled.graphs, compiled.breaks
    broken = "without a graph break" if not breaks else f"with {format_count(len(breaks), 'graph break')}"
    made = f"{_capitalize_first(compiled.description)}, mode {settings.mode}: "
    made += format_count(len(graphs), "graph")
    if compiled.blocks != ("",) and len(graphs) < len(compiled.blocks):
        made += ", since blocks that are alike share one"
    yield from paragraph("Compile", f"{made}, {broken}.")
    if not graphs:
        yield from paragraph("", "Nothing is compiled: a run would end with an error.")
    for one in breaks:
        yield from paragraph("Graph break", f"{one.reason}{f' ({one.where})' if one.where else ''}.")


def _stage_lines(stage: StageExplanation, explained: Explanation) -> Iterator[str]:
    settings, title = stage.settings, f"stages[{stage.index}]: {stage.stage.name}"
    if settings is None:
        yield title
        yield from _stepless_stage_lines(stage, explained)
        return
    hooks = ", ".join(map(_choice_yaml, settings.hooks))
    length = "" if stage.steps is None else format_count(stage.steps, "step")
    if settings.epochs is not None:
        length = format_count(settings.epochs, "epoch") + (f" ({length})" if length else "")
    yield f"{title} for {length}, sync: {_choice_yaml(settings.sync)}, hooks: [{hooks}]"
    if (one_round := settings.plan.round) is not None:
        size = f"{one_round.samples:,} samples of all ranks" if one_round.samples else ""
        work = size or f"about {one_round.seconds:g} s of work"
        yield from paragraph(
            "Round", f"Each step is a round of {work}. A rank's change is weighted by its samples."
        )

    if "auto_bits" in str(settings.hook_specs):
        text = "auto_bits chooses a code for each bucket during the run. The bytes here are those of int8, "
        yield from paragraph("Hooks", f"{text}with which it begins, without its measurements.")
    if stage.begin:
        why = "Equal gradients keep ranks equal only if these are equal, too"
        yield from paragraph("Begin", f"Once: {_exchanges_phrase(stage.begin)}. {why}.")
    yield from paragraph("Forward", _parameter_drift_text(settings))
    yield from paragraph("Buffers", _buffers_text(stage, settings, explained))
    if stage.stage.name == "train":
        yield from paragraph("Backward", _backward_text(stage, settings))
        yield from _bucket_tables(_exchanges_at(stage, "backward"))
    yield from _after_step_lines(stage, settings)
    yield from _end_lines(stage)
    yield from _evaluation_lines(stage)
    yield from paragraph("Control", _control_messages_text(stage, settings, explained.loaded.pipeline))
    yield from paragraph("Loss", _loss_text(settings))
    yield from _sent_totals_table(stage)


def _parameter_drift_text(settings: StepStageSettings) -> str:
    """That a forward pass sends no parameters, and why ranks' parameters stay equal or drift apart."""
    always = "No parameters are sent in a forward pass, in this stage or any other."
    if settings.uses_noop:
        return f"{always} noop sends no gradients, so ranks diverge."
    if settings.plan.gradients == "all":
        if settings.mutate is not None:
            return f"{always} mutate changes each rank's own, and ranks average gradients, not parameters."
        why = "All ranks start with the same values, and take every step by the same mean gradient"
        return f"{always} {why}, so they stay equal."
    if not (settings.has_backward or settings.update or settings.mutate):
        return f"{always} Nothing changes them in this stage."
    return f"{always} Each rank's changes stay its own until ranks synchronise."


def _buffers_text(stage: StageExplanation, settings: StepStageSettings, explained: Explanation) -> str:
    setting, use = settings.buffers, explained.probe.buffer_use
    moments = {exchange.moment for exchange in stage.exchanges if exchange.route.kind == "buffers"}
    if "before_forward" in moments:
        when = f"They are sent before the first forward pass of a {'turn' if settings.turns else 'step'}."
    elif "after_step" in moments:
        when = "They are sent after a step, as below."
    else:
        when = "None are sent in this stage."
    if use.changing and setting.when == "never":
        when += " Each rank keeps its own."
    elif use.changing:
        also = " also" if moments else ""
        when += f" They are{also} sent before evaluate and save."
    if use.constant and setting.when == "auto" and not settings.plan.never_exchanges:
        when += " Ranks compare the unchanged ones when they compare parameters."
    all_bytes = format_bytes(sum(one.nbytes for one in explained.buffers.values()))
    ddp = f"DDP's own broadcast would send {all_bytes} in each step."
    return f"{flow_yaml(setting.to_plain_data())}: {use.describe()}. {when} {ddp}"


def _backward_text(stage: StageExplanation, settings: StepStageSettings) -> str:
    exchanges = _exchanges_at(stage, "backward")
    if not exchanges:
        return "No gradients are sent."
    ranks = _rank_group_phrase(exchanges[0].ranks, exchanges[0].route.among)
    what = (
        "go through the hooks, but to no other rank" if settings.uses_noop else f"are averaged over {ranks}"
    )
    parts = []
    for exchange in exchanges:
        part = f"those of turn {exchange.route.turn} in " if settings.turns else "in "
        part += recurring_steps_text(_steps_with_exchange(exchange, stage), stage.cycle, stage.steps)
        if settings.accumulate > 1:
            part += f", in the last of its {settings.accumulate} micro-steps"
        parts.append(f"{part}, in {format_count(len(exchange.buckets), 'bucket')}")
    what = f"Gradients {what}{':' if settings.turns else ','} {'; '.join(parts)}"
    one = sum(len(exchange.buckets) for exchange in exchanges) == 1
    what += f",{'' if one else ' each'} sent as soon as backward has filled it"
    what += "." if one else ", while backward continues."
    if stage.takes_closure:
        what += " The optimizer may call its closure for more passes in a step. Each sends all of it again: "
        what += "neither the bytes nor the times here count that."
    return what


def _after_step_lines(stage: StageExplanation, settings: StepStageSettings) -> Iterator[str]:
    exchanges = _exchanges_at(stage, "after_step")
    by_steps: dict[tuple[int, ...], list[PlannedExchange]] = {}
    for exchange in exchanges:
        by_steps.setdefault(_steps_with_exchange(exchange, stage), []).append(exchange)
    by_phrase: dict[str, tuple[int, ...]] = {}  # the pairs of gossip are others each time
    for steps, some in by_steps.items():
        phrase = _exchanges_phrase(some)
        by_phrase[phrase] = tuple(sorted({*by_phrase.get(phrase, ()), *steps}))
    lines = [
        f"{recurring_steps_text(steps, stage.cycle, stage.steps)}: {phrase}."
        for phrase, steps in by_phrase.items()
    ]
    lines = lines or ["Nothing is sent."]
    for label, line in zip_longest(["After a step"], _omit_middle(lines), fillvalue=""):
        yield from paragraph(label, _capitalize_first(line))
    if overlap := settings.plan.overlap_steps:
        when = f"is applied exactly {format_count(overlap, 'step')} later"
        yield from paragraph("", f"An exchange overlaps with training, and {when}.")
    yield from _bucket_tables(exchanges)


def _end_lines(stage: StageExplanation) -> Iterator[str]:
    if stage.left_apart:
        yield from paragraph("End", "Ranks stay as they are: the next stage starts from that.")
    elif stage.end is None:
        yield from paragraph("End", "If ranks differ after the last step, they synchronise once more.")
    elif stage.end:
        more = _exchanges_phrase(stage.end)
        yield from paragraph("End", f"Ranks differ after the last step, so once more: {more}.")
        yield from _bucket_tables(stage.end, shown=_exchanges_at(stage, "after_step"))


def _evaluation_lines(stage: StageExplanation) -> Iterator[str]:
    if not isinstance(stage.stage, StepStage) or stage.stage.evaluate is None:
        return
    every, known = stage.stage.evaluate.every, stage.steps is not None
    when = "After each epoch" if every == "epoch" else f"After every {format_count(every, 'step')}"
    count = format_count(sum(one.times for one in stage.evaluations), "evaluation")
    when += f", and at the end{f': {count}' if known else ''}."
    sent = []
    for one in stage.evaluations:
        whose = f"{one.times if known else 'Some'} of them: " if len(stage.evaluations) > 1 else "Each sends "
        sent.append(whose + (_exchanges_phrase(one.exchanges) or "nothing"))
    yield from paragraph("Evaluate", f"{when} {'; '.join(sent)}. Then each rank has its own values again.")
    others = [one for one in stage.exchanges if one.moment != "evaluate"]
    yield from _bucket_tables(_exchanges_at(stage, "evaluate"), shown=others)


def _control_messages_text(stage: StageExplanation, settings: StepStageSettings, pipeline: Pipeline) -> str:
    steps, plan, before = stage.control_message_steps, settings.plan, ""
    if pipeline.loader.sharded:
        before = (
            "With an iterable data set, ranks tell each other before each step how many samples each has. "
        )
    if pipeline.has_batch_weights and (plan.gradients is not None or plan.round is not None):
        before += "Before each step, ranks tell each other what counts in it (weight_by), and wait for that. "
    if not steps:
        others = "They exchange no other messages" if before else "None: ranks exchange no messages"
        return f"{before}{others} before the stage's end."
    if max(steps) <= stage.control_cycle:
        when = recurring_steps_text(steps, stage.control_cycle, stage.steps)
    else:  # the first exchanges that overlap with training are applied in the second cycle
        repeated = sorted(step + cycle * stage.control_cycle for step in steps for cycle in range(3))
        listed = [step for step in repeated if stage.steps is None or step <= stage.steps]
        when = f"steps {', '.join(map(str, listed[:4]))}{' …' if len(listed) > 4 else ''}"
    return (
        f"For {when} each rank sends the others its loss, and whether to stop: a few numbers, sent twice a "
        f"second for all steps since; not counted below. {before}"
    ).rstrip()


def _loss_text(settings: StepStageSettings) -> str:
    what = "It is not averaged: each rank has the loss of its own samples"
    if settings.averages_gradients:
        what += "; gradients are averaged, so the step follows the mean loss"
    return f"{what}. The log's mean loss is computed separately; nothing depends on it."


def _stepless_stage_lines(stage: StageExplanation, explained: Explanation) -> Iterator[str]:
    if stage.end and (sent := stage.sent_in_stage) is not None:
        what = _exchanges_phrase(stage.end)
        if stage.stage.name not in ("average", "broadcast"):
            what = f"first, if they have changed: {what}"
        yield from paragraph("", f"{_capitalize_first(what)}.")
        yield from _bucket_tables(stage.end)
        yield from _sent_bytes_table([_sent_bytes_row("once", sent)])
        return
    before = [one.settings for one in explained.stages[: stage.index] if one.settings is not None]
    setting = before[-1].buffers if before else explained.loaded.pipeline.buffers
    own = setting.when == "never" and explained.buffers
    why = ": each rank has buffers of its own" if own else ""
    yield from paragraph("", f"Nothing is sent before it{why}.")


def _sent_totals_table(stage: StageExplanation) -> Iterator[str]:
    rows = [
        _sent_bytes_row(recurring_steps_text(one.steps, stage.cycle, stage.steps), one.sent)
        for one in stage.patterns
    ]
    rows = _omit_middle(rows, ("…", "", "", ""))
    if len(stage.patterns) > 1:
        rows.append(_sent_bytes_row("mean of all steps", stage.sent_per_cycle, stage.cycle))
    for one in stage.evaluations:
        some = stage.steps is not None and len(stage.evaluations) > 1
        label = f"each of {format_count(one.times, 'evaluation')}" if some else "an evaluation"
        rows.append(_sent_bytes_row(label, one.sent))
    if stage.steps is not None and (whole := stage.sent_in_stage) is not None:
        rows.append(_sent_bytes_row(f"the stage: {format_count(stage.steps, 'step')}", whole))
    yield from _sent_bytes_table(rows)


def _sent_bytes_row(label: str, sent: SentBytes, steps: int = 1) -> tuple[str, ...]:
    """A table row: `sent` is sent in `steps` steps; the row says how much that is in one."""
    return (label, *map(format_bytes, sent.mean_step_bytes(steps).values()))


def _sent_bytes_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    return labelled_lines(
        "Sent", format_table([("", "per rank", "all ranks", "between hosts"), *rows], "<>>>")
    )


def _exchanges_at(stage: StageExplanation, moment: str) -> list[PlannedExchange]:
    return [exchange for exchange in stage.exchanges if exchange.moment == moment]


def _steps_with_exchange(exchange: PlannedExchange, stage: StageExplanation) -> tuple[int, ...]:
    """The steps of a cycle in which an exchange takes place."""
    return tuple(sorted(step for one in stage.patterns if exchange in one.exchanges for step in one.steps))


def _choice_yaml(choice: Choice) -> str:
    """A choice as a pipeline file would have it, without what is left out there."""
    options = dict(choice.options)
    if choice.settings is not None:
        options = choice.settings.model_dump(mode="json", exclude_defaults=True)
    return flow_yaml({choice.name: options} if options else choice.name)


# Exchanges.


def _exchanges_phrase(exchanges: Sequence[PlannedExchange]) -> str:
    return ", and ".join(map(_exchange_phrase, exchanges))


def _exchange_phrase(exchange: PlannedExchange, *, with_buckets: bool = True) -> str:
    """What an exchange is; `with_buckets`: name its buckets, if it is of some only."""
    kind, source = exchange.route.kind, exchange.route.source
    ranks = _rank_group_phrase(exchange.ranks, exchange.route.among)
    if not any(one.legs for one in exchange.buckets):
        return "nothing, because the hook is noop"
    if exchange.route.ema:
        of = f" of rank {source}, to" if exchange.route.through == "broadcast" else ", averaged over"
        return f"the moving average of the weights (ema){of} {ranks}"
    if exchange.route.through == "broadcast":
        whose = "optimizer's state" if kind == "optimizer" else kind
        return f"the {whose} of rank {source}{', as they are' if kind == 'parameters' else ''}, to {ranks}"
    of_turn = f" of turn {exchange.route.turn}" if exchange.route.turn else ""
    what = {
        "gradient": f"the gradients{of_turn},",
        "delta": "the changes of parameters,",
        "parameters": "the parameters as they are,",
        "optimizer": "the optimizer's state as it is,",
        "buffers": "the buffers,",
    }[kind]
    which = ""
    if kind == "delta" and with_buckets:
        first, last = exchange.buckets[0].bucket, exchange.buckets[-1].bucket
        which = f" (bucket {first})" if first == last else f" (buckets {first} to {last})"
    return f"{what} averaged over {ranks}{which}"


def _rank_group_phrase(ranks: int, among: GroupScope) -> str:
    if among == "all":
        return {1: "the only rank", 2: "both ranks"}.get(ranks, f"all {ranks} ranks")
    if among == "part":  # of one or of several sizes
        return "the ranks of each group"
    of = {"host": "each host", "across": "one local rank on every host"}[among]
    return f"the {format_count(ranks, 'rank')} of {of}"


def _bucket_tables(
    exchanges: Sequence[PlannedExchange], shown: Sequence[PlannedExchange] = ()
) -> Iterator[str]:
    """The buckets of exchanges, and how each travels; a table for each route without `shown` ones."""
    by_route: dict[Any, list[PlannedExchange]] = {}
    known_routes = {exchange.route for exchange in shown}
    for exchange in (one for one in exchanges if one.route not in known_routes):
        part = exchange.route.rank_partition
        if part is not None and any(replace(one, rank_partition=part) == exchange.route for one in by_route):
            continue  # another partition, into groups of the same sizes
        if exchange.route.kind != "buffers":
            by_route.setdefault(exchange.route, []).append(exchange)
    for on_route in by_route.values():
        if len(by_route) > 1:
            yield from paragraph(
                "", f"{_capitalize_first(_exchange_phrase(on_route[0], with_buckets=False))}:"
            )
        buckets = [bucket for exchange in on_route for bucket in exchange.buckets]
        rows = []
        for one in buckets:
            sizes = f"{one.numel:,}", format_bytes(one.bytes), format_bytes(one.sent.per_rank)
            rows.append((str(one.bucket), one.dtype, *sizes, abbreviated_list(one.params, 2)))
        rows = _omit_middle(rows, ("…", *[""] * 5))
        head = ("bucket", "dtype", "values", "bytes", "sent per rank", "parameters")
        yield from labelled_lines("", format_table([head, *rows], "><>>><"))
        yield from _leg_lines(buckets)


def _leg_lines(buckets: Sequence[Bucket]) -> Iterator[str]:
    """How buckets travel; those that travel alike in one paragraph."""
    alike: dict[tuple[tuple[str, str, GroupScope, int], ...], list[Bucket]] = {}
    for one in buckets:
        way = tuple((leg.op, leg.dtype, leg.among, leg.ranks) for leg in one.legs)
        alike.setdefault(way, []).append(one)
    for way, some in alike.items():
        which = "Each bucket" if len(alike) == 1 else f"Bucket {', '.join(str(one.bucket) for one in some)}"
        columns = zip(*[one.legs for one in some], strict=True)
        sizes = [format_bytes(sum(leg.bytes for leg in column)) for column in columns]
        legs = [
            f"{op} of {dtype} among {_rank_group_phrase(ranks, among)} ({size})"
            for (op, dtype, among, ranks), size in zip(way, sizes, strict=True)
        ]
        if len(legs) <= 1:
            yield from paragraph("", f"{which}: {legs[0] if legs else 'nothing is sent'}.")
            continue
        yield from paragraph("", f"{which}, one after the other:")
        for leg in legs:
            yield from paragraph("", f"- {leg}")


# Layout.


def _omit_middle(rows: Sequence[Any], middle: Any = "…") -> list[Any]:
    """The first rows and the last ones, if there are many, with `middle` for what is left out."""
    half = _ROWS // 2
    return [*rows] if len(rows) <= _ROWS else [*rows[:half], middle, *rows[-half + 1 :]]


def labelled_lines(label: str, lines: Sequence[str]) -> Iterator[str]:
    """Lines beside a label."""
    for index, line in enumerate(lines):
        yield f"  {'' if index else label:<{_INDENT - 2}}{line}".rstrip()


def paragraph(label: str, text: str) -> Iterator[str]:
    """A paragraph beside a label."""
    return labelled_lines(label, textwrap.wrap(text, _WIDTH - _INDENT, break_on_hyphens=False))


def _capitalize_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def recurring_steps_text(steps: Sequence[int], cycle: int, last: int | None) -> str:
    """Steps in words, such as `step 8 of every 8`: some of the first `cycle`, after which they repeat. `last`
    is the last step of the stage; None: unknown.
    """
    if len(steps) == cycle:
        return "every step"
    named = [*map(str, steps)]
    listed = ", ".join(named) if len(named) <= 4 else f"{', '.join(named[:3])} … {named[-1]}"
    text = f"step{'s' if len(named) > 1 else ''} {listed}"
    return text if last is not None and last <= cycle else f"{text} of every {cycle}"
