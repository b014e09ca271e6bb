"""What stands out in a stage of a run, in three sentences: where the time went, who was late, what to try."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ddprun.report.digest import RunDigest, StageDigest, StepTimes, straggler_episodes
from ddprun.telemetry.stragglers import StragglerTotal, straggler_totals
from ddprun.units import format_count

_MAX_STAGES_WITH_SENTENCES = 4
_MIN_STAGE_SHARE = 0.1  # a stage that took less of the time of all steps has no sentences
_ADVICE_THRESHOLD = 0.15  # a share of a step's time that is worth a change
_MIN_STRAGGLER_WAIT_SHARE = 0.25  # of all waiting: a late rank that causes less is not what to begin with
_STRAGGLER_WINDOW_STEPS = 20  # synchronising steps that stragglers are looked for in, by default
_NEGLIGIBLE_SHARE = 0.02  # of a step's time: not worth a sentence
_PART_PHRASES = {
    "data_us": "loading data",
    "forward_us": "in forward",
    "backward_us": "in backward",
    "exposed_hook_us": "in hooks",
    "exposed_wait_us": "waiting for the last rank",
    "exposed_wire_us": "on the wire",
    "optimizer_us": "in the optimizer",
    "sync_us": "between steps",
    "other_us": "elsewhere",
}
_STRAGGLER_ADVICE = {
    "data": "Try more `loader.workers`, or look at that rank's disk.",
    "forward": "Look at what else runs on that rank's cores or GPU, and at inputs that cost more.",
    "backward": "Look at the layers of that bucket, and at what else runs on that rank's cores or GPU.",
    "optimizer": "Look at what else runs on that rank's cores or GPU.",
    "sync": "Look at what that rank does between steps.",
    "communication": "Look at that rank's link, and at hooks that work on its training thread.",
}


def sentences(digest: RunDigest) -> dict[str, list[str]]:
    """What stands out in a run, by the stage that it is about; names of keys and commands are in backticks.

    Of many stages, those that took most time; without a name if only one takes steps.
    """
    if not digest.recorded_steps:
        return {
            "": [
                "The run has no step records, so it is unknown where its time went.",
                "It may have ended before its first step.",
                "Its events, below, show how far it got.",
            ]
        }
    found = {}
    for stage in _main_stages(digest):
        late_ranks = straggler_totals(straggler_episodes(digest, stage))
        found[stage.name if len(digest.stages) > 1 else ""] = [
            time_breakdown(stage.times),
            _straggler_sentence(digest, stage, late_ranks),
            _advice_sentence(digest, stage, late_ranks),
        ]
    return found


def _main_stages(digest: RunDigest) -> list[StageDigest]:
    """The few stages in which the run spent most of its time, in pipeline order."""
    us = {stage.index: sum(one["step_us"] for one in stage.times.total_us_by_rank) for stage in digest.stages}
    longest = sorted(digest.stages, key=lambda stage: us[stage.index])[-_MAX_STAGES_WITH_SENTENCES:]
    least = max(1, _MIN_STAGE_SHARE * sum(us.values()))
    return [stage for stage in digest.stages if stage in longest and us[stage.index] >= least]


def time_breakdown(times: StepTimes) -> str:
    """A sentence on where the time of a step went."""
    shares = times.shares
    known = [
        (shares["compute"], "forward, backward and optimizer"),
        (
            times.exposed_share,
            f"exposed communication ({shares['wire']:.0%} on the wire, {shares['wait']:.0%} waiting for the "
            f"last rank, {shares['hook']:.0%} in hooks)",
        ),
        (shares["data"], "loading data"),
        (shares["sync"], "between steps"),
    ]
    named = [f"{share:.0%} {what}" for share, what in sorted(known, reverse=True) if share >= 0.005]
    text = f"A step took {times.mean_parts_us['step_us'] / 1000:.1f} ms on average"
    if not named:
        return f"{text}; its records do not tell what for."
    listed = named[0] if len(named) == 1 else f"{', '.join(named[:-1])}, and {named[-1]}"
    return f"{text}: {listed}."


def step_time_difference(baseline_name: str, before: StepTimes, after: StepTimes) -> str:
    """How much longer or shorter a step took than in the run `baseline_name`, and which parts made it so."""
    ms = {name: (us - before.mean_parts_us[name]) / 1000 for name, us in after.mean_parts_us.items()}
    total = ms.pop("step_us")
    if abs(total) < _NEGLIGIBLE_SHARE * before.mean_parts_us["step_us"] / 1000:
        return f"A step took about as long as with {baseline_name}."

    most = sorted(ms, key=lambda part: ms[part] * math.copysign(1, total))[-2:][::-1]
    parts = " and ".join(f"{_PART_PHRASES[part]} ({ms[part]:+.1f})" for part in most if ms[part] * total > 0)
    text = f"A step took {abs(total):.1f} ms {'longer' if total > 0 else 'less'} than with {baseline_name}"
    return f"{text}, mostly {parts}." if parts else f"{text}."


def _straggler_sentence(digest: RunDigest, stage: StageDigest, late_ranks: Sequence[StragglerTotal]) -> str:
    if digest.rank_count < 2:
        return "There was one rank, so no rank waited for another."
    if not late_ranks and stage.synced_steps < _STRAGGLER_WINDOW_STEPS:
        return "Ranks synchronised too rarely, or in too few steps, to tell whether one was late."
    if not late_ranks:
        return "No rank was late for long."
    worst, *rest = late_ranks
    params = ", ".join(worst.params[:3]) + (" …" if len(worst.params) > 3 else "")
    bucket = "" if worst.bucket is None else f", before bucket {worst.bucket} ({params})"
    more = sum(one.episodes for one in rest)
    others = f"; {format_count(more, 'more episode')} of late ranks below" if more else ""
    return (
        f"Rank {worst.rank} was {worst.late_us / 1000:.1f} ms late in {worst.cause}{bucket}, {worst.when()}, "
        f"and the others waited for it{others}."
    )


def _advice_sentence(digest: RunDigest, stage: StageDigest, late_ranks: Sequence[StragglerTotal]) -> str:
    shares = stage.times.shares
    wait = shares["wait"]
    if wait > _ADVICE_THRESHOLD and late_ranks:
        worst = late_ranks[0]
        if _straggler_wait_share(digest, stage, worst) > _MIN_STRAGGLER_WAIT_SHARE * wait:
            return _STRAGGLER_ADVICE.get(worst.cause, _STRAGGLER_ADVICE["optimizer"])
    if shares["data"] > _ADVICE_THRESHOLD:
        return "Try more `loader.workers`: the training thread waits for its data."
    if shares["hook"] > _ADVICE_THRESHOLD:
        without = [one for one in _comparable_stages(digest, stage) if not one.hooks]
        if without and (fastest := min(without, key=lambda one: one.step_ms)).step_ms < stage.step_ms:
            there = f"a step took {fastest.step_ms:.1f} ms in stage {fastest.index}, which has none"
            return f"Try without the hooks: {there}."
        return (
            "Try without the hooks, or with cheaper ones: they may cost more time than they save on the "
            "wire; `ddprun compare` measures it."
        )
    if shares["wire"] > _ADVICE_THRESHOLD:
        return _wire_time_advice(digest, stage)
    if wait > _ADVICE_THRESHOLD:
        text = f"Try {_sync_less_often_phrase(digest, stage)}: another rank is the last one each time"
        return f"{text}, and every synchronisation waits for it."
    if shares["sync"] > _ADVICE_THRESHOLD:
        return (
            "Try to do less between steps: audits, fidelity, buffer exchanges and mutation are in `sync_us`."
        )
    if shares["compute"] > 0.8:
        return (
            "Communication is hidden or small; to go faster, try `precision: bf16`, a larger "
            "`loader.batch_size`, or more ranks."
        )
    return "Nothing stands out: no single change is likely to gain much."


def _wire_time_advice(digest: RunDigest, stage: StageDigest) -> str:
    if {one.hooks for one in stage.traffic if one.kind in ("gradient", "delta")} != {()}:
        return f"Try {_sync_less_often_phrase(digest, stage)}."
    if with_hooks := [one for one in _comparable_stages(digest, stage) if one.hooks]:
        fastest = min(with_hooks, key=lambda one: one.step_ms)
        there = f"with those of stage {fastest.index} a step took {fastest.step_ms:.1f} ms"
        if fastest.step_ms < stage.step_ms:
            return f"Try hooks in this stage, too: {there}."
        return f"Try {_sync_less_often_phrase(digest, stage)}; hooks did not help: {there}."
    also = ", `[hierarchical]`" if any(one.between_hosts_bytes for one in stage.traffic) else ""
    return (
        f"Try to send less (`ddprun compare` with `--vary 'hooks=[[], [fp16], [int8]]'`{also}), or try "
        f"{_sync_less_often_phrase(digest, stage)}."
    )


def _comparable_stages(digest: RunDigest, stage: StageDigest) -> list[StageDigest]:
    """The stages of the same kind and sync policy: what differs between them may come from the hooks."""
    return [one for one in digest.stages if (one.kind, one.sync) == (stage.kind, stage.sync)]


def _sync_less_often_phrase(digest: RunDigest, stage: StageDigest) -> str:
    if (policy := _periodic_policy(stage)) is not None:
        name, options = policy
        now = ", ".join(f"{key}: {value}" for key, value in options.items())
        return f"a longer period of `{name}` (`{now}` now)"
    if other := next((one for one in digest.stages if _periodic_policy(one) is not None), None):
        return f"to synchronise less often, as stage {other.index} does"
    return "to synchronise less often (`accumulate: 2`, or `sync: {local_sgd: {every: 8}}`)"


def _straggler_wait_share(digest: RunDigest, stage: StageDigest, late: StragglerTotal) -> float:
    """The share of the stage's time that ranks waited for a late one, mean over ranks."""
    steps = max(late.steps, stage.last_step - stage.first_step + 1)
    return late.lost_steps / steps * (digest.rank_count - 1) / digest.rank_count


def _periodic_policy(stage: StageDigest) -> tuple[str, Mapping[str, Any]] | None:
    """The sync policy's name and options, if it has options: it then synchronises in some steps only."""
    if isinstance(stage.sync, Mapping) and stage.sync:
        name, options = next(iter(stage.sync.items()))
        if isinstance(options, Mapping) and options:
            return name, options
    return None
