"""What stands out in a run: how it ended; of a stage, where its time went, who was late, over which links
its hooks pay, what to try.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import harmonic_mean

from ddprun.config.yaml_writer import flow_yaml
from ddprun.report.blocks import format_value
from ddprun.report.digest import RunDigest, StageDigest, StepTimes
from ddprun.telemetry.reader import RecordedRun, log_file
from ddprun.telemetry.stragglers import StragglerTotal, straggler_totals
from ddprun.units import format_bit_rate, format_bytes, format_count, format_duration

_MAX_HUNG_RANKS_SHOWN = 3
_MAX_STAGES_WITH_SENTENCES = 4
_MIN_STAGE_SHARE = 0.1  # a stage that took less of the time of all steps has no sentences
_ADVICE_THRESHOLD = 0.15  # a share of a step's time that is worth a change
_BALANCE_THRESHOLD = 0.1
_MIN_STRAGGLER_WAIT_SHARE = 0.25  # of all waiting: a late rank that causes less is not what to begin with
_MIN_SPLIT_BYTES = 1 << 20  # of a bucket: a smaller one would gain little from being split
_STRAGGLER_ADVICE = {  # for all causes but `data`
    "forward": "a look at what else runs on the late rank's cores or GPU, and at inputs that take longer",
    "backward": "a look at the layers of that bucket, and at what else runs on the late rank's cores or GPU",
    "optimizer": "a look at what else runs on the late rank's cores or GPU",
    "sync": "a look at what the late rank does between steps",
    "other": "a look at what the late rank's script does besides forward, backward and optimizer",
    "communication": "a look at the late rank's link, and at hooks that work on its training thread",
}
_CAUSES_OF_SHARES = ("data", "forward", "backward")  # what takes longer with more samples

# What advice suggests, in the words of what a reader can change: in a pipeline, and in a script that
# `ddprun.observe` records.
_SUGGESTIONS = {
    "workers": ("more `loader.workers`", "a larger `num_workers` of the `DataLoader`"),
    "bucket_cap": ("`ddp: {{bucket_cap_mb: {}}}`", "`DistributedDataParallel(bucket_cap_mb={})`"),
    "sending_less": (
        "`ddprun compare` with `--vary 'hooks=[[], [fp16], [int8]]'`",
        '`hooks=["fp16"]` in `ddprun.observe`',
    ),
    "syncing_less": (
        "a larger `accumulate`, or `sync: {local_sgd: {every: 8}}`",
        "more backward passes under `no_sync` before each optimizer step",
    ),
    "cheaper_hooks": (
        "no hooks, or cheaper ones, which `ddprun compare` measures",
        "no hooks, or cheaper ones",
    ),
    "work_between_steps": (
        "less work between steps: `sync_us` holds audits, fidelity, buffer exchanges and mutation",
        "`every=10` in `ddprun.observe`, since `sync_us` holds broadcasts of buffers and what ddprun does "
        "between steps",
    ),
    "less_computation": (
        "`compile: true` may make steps faster, and changes only rounding; more ranks, a larger "
        "`loader.batch_size` and `precision: bf16` change training.",
        "`torch.compile` may make steps faster, and changes only rounding; more ranks, a larger batch and "
        "`torch.autocast` change training.",
    ),
    "every": ("`timings.every`", "`every` in `ddprun.observe`"),
    "balance": ("`loader.balance`, which gives slow ranks fewer samples", ""),
}


def _suggestion(run: RecordedRun, name: str) -> str:
    """What advice suggests, for a pipeline or for a script."""
    return _SUGGESTIONS[name][run.is_observed]


def ending_problem_sentence(run: RecordedRun) -> str | None:
    """How a run ended, if it did not end well; and whose records are here, if not those of all ranks."""
    found = _failed_ending_sentence(run)
    if 0 < len(run.ranks) < run.most_ranks:
        here = f"Records of {len(run.ranks):,} of {run.most_ranks:,} ranks are here"
        if run.summary is None and not (run.is_observed or _is_on_one_host(run)):
            here += ": those of other hosts come at checkpoints and at the ends of stages"
        return f"{found} {here}." if found else f"{here}."
    return found


def _failed_ending_sentence(run: RecordedRun) -> str | None:
    summary, failure = run.summary, run.failure
    if summary is None:
        rank = next(filter(run.has_log, run.ranks), None)
        recorded = f"; the last recorded step is {run.last_step:,}" if run.last_step else ""
        return f"The run is still running, or was killed{recorded}.{_log_sentence(run, rank)}"
    if summary.status == "done":
        return None
    when = f"after step {summary.steps:,}" if summary.steps else "before its first step was over"
    if summary.status == "interrupted" or failure is None:
        return f"The run {'was ' * (summary.status == 'interrupted')}{summary.status} {when}."
    message = failure.message.strip().partition("\n")[0].rstrip(" .:")
    if (hang := failure.hang) is None:
        failed = f"The run failed {when}, on rank {failure.rank}: {message}."
        return failed + _log_sentence(run, failure.rank)
    hung = f"The run hung in step {hang.step:,}, in {hang.collective} ({hang.carries}): "
    hung += message.removeprefix("the run hangs: ")
    for rank, activity in [*zip(hang.ranks, hang.activities, strict=False)][:_MAX_HUNG_RANKS_SHOWN]:
        hung += f". Rank {rank} {activity}"
    return f"{hung}.{_log_sentence(run, failure.rank)}"


def _log_sentence(run: RecordedRun, rank: int | None) -> str:
    """Where to read on, if there is anything."""
    return "" if rank is None or not run.has_log(rank) else f" More is in `{log_file(rank)}`."


def sentences_by_stage(digest: RunDigest) -> dict[str, list[str]]:
    """What stands out in a run, by the stage that it is about; names of keys and commands are in backticks.
    Of many stages, those that took most time; without a name if only one takes steps.
    """
    if not digest.recorded_steps:
        why = "It may have ended before its first step: events, below, show how far it got."
        if digest.run.summary is not None and digest.run.summary.steps:
            took, every = format_count(digest.run.summary.steps, "step"), _suggestion(digest.run, "every")
            why = f"It took {took}: {every} is larger than that, or no record could be written."
        return {"": ["The run has no step records, so it is unknown where its time went.", why]}
    found = {}
    for stage in _main_stages(digest):
        first, last = stage.first_step, stage.last_step
        late_ranks = straggler_totals(one for one in digest.run.stragglers if first <= one.first_step <= last)
        found[stage.name if len(digest.stages) > 1 else ""] = [
            time_breakdown_sentence(stage.times),
            _straggler_sentence(digest, late_ranks),
            *_hook_sentences(digest, stage),
            *_advice_sentences(digest, stage, late_ranks),
        ]
    return found


def _main_stages(digest: RunDigest) -> list[StageDigest]:
    """The few stages in which the run spent most of its time, in pipeline order."""
    us = {stage.index: stage.times.step_totals["step_us"] for stage in digest.stages}
    longest = sorted(digest.stages, key=lambda stage: us[stage.index])[-_MAX_STAGES_WITH_SENTENCES:]
    least = max(1, _MIN_STAGE_SHARE * sum(us.values()))
    return [stage for stage in digest.stages if stage in longest and us[stage.index] >= least]


def time_breakdown_sentence(times: StepTimes) -> str:
    shares = times.time_shares_by_category
    known = [
        (shares["compute"], "forward, backward and optimizer"),
        (
            times.exposed_share,
            f"exposed communication ({shares['wire']:.0%} on the wire, {shares['wait']:.0%} waiting for the "
            f"last rank, {shares['hook']:.0%} launching collectives or in hooks)",
        ),
        (shares["data"], "loading data"),
        (shares["sync"], "between steps"),
        (shares["other"], "elsewhere"),
    ]
    named = [f"{share:.0%} {what}" for share, what in sorted(known, reverse=True) if share >= 0.005]
    text = f"A step took {times.mean_parts_us['step_us'] / 1000:.1f} ms on average"
    if not named:
        return f"{text}; the records do not tell where the time went."
    listed = named[0] if len(named) == 1 else f"{', '.join(named[:-1])}, and {named[-1]}"
    return f"{text}: {listed}."


def _straggler_sentence(digest: RunDigest, late_ranks: Sequence[StragglerTotal]) -> str:
    if digest.run.most_ranks < 2:
        return "There was one rank, so no rank waited for another."
    if not late_ranks:
        return "No rank was late for long enough to be named."
    worst, *rest = late_ranks
    params = ", ".join(worst.params[:3]) + (" …" if len(worst.params) > 3 else "")
    bucket = "" if worst.bucket is None else f", before bucket {worst.bucket} ({params})"
    more = sum(one.episodes for one in rest)
    others = f"; {format_count(more, 'more episode')} of late ranks below" if more else ""
    return (
        f"Rank {worst.rank} was {worst.late_us / 1000:.1f} ms late in {worst.cause}{bucket}, {worst.when()}, "
        f"and the others waited for it{others}."
    )


@dataclass(frozen=True, slots=True)
class HookCostBenefit:
    """What the hooks of a stage cost and save in a step of a rank."""

    hooks: tuple[str, ...]
    saved_bits: float  # that plain all-reduce would have sent in addition
    sent_share: float  # of what plain all-reduce would have sent
    hook_us: float  # encoding and decoding
    sent_bits_per_s: float  # the highest rate of all stages, latency included: the link carries no less

    @property
    def break_even_bits_per_s(self) -> float:
        """The link over which the hooks cost as much as they save; over a faster one they cost more."""
        return 1e6 * self.saved_bits / self.hook_us


def hook_cost_benefit(digest: RunDigest, stage: StageDigest) -> HookCostBenefit | None:
    """The balance of a stage's hooks; None where its records cannot tell.

    They can where gradients, or changes of parameters, go through one stack in collectives among all ranks,
    the same ranks in the whole run.
    """
    ranks = len(digest.run.ranks)
    through = [one for one in stage.traffic if one.kind in ("gradient", "delta") and one.hooks]
    if len(through) != 1 or ranks < 2 or digest.run.world_sizes != [(1, ranks)]:
        return None
    (one,) = through
    plain_bytes, hook_us = 2 * (ranks - 1) / ranks * one.bytes, one.encode_us + one.decode_us
    if not (one.among_all_ranks and 0 < one.wire_bytes < plain_bytes and hook_us > 0 and one.wire_us):
        return None
    per_step = max(1, stage.bucket_sample_step_count) * ranks
    rates = [one.bits_per_s or 0.0 for each in digest.stages for one in each.traffic if one.among_all_ranks]
    return HookCostBenefit(
        hooks=one.hooks,
        saved_bits=8 * (plain_bytes - one.wire_bytes) / per_step,
        sent_share=one.wire_bytes / plain_bytes,
        hook_us=hook_us / per_step,
        sent_bits_per_s=max(rates),
    )


def _hook_sentences(digest: RunDigest, stage: StageDigest) -> Iterator[str]:
    """Up to which link the hooks pay, and what went through here."""
    if (balance := hook_cost_benefit(digest, stage)) is None:
        return
    hooks, saved = ", ".join(f"`{name}`" for name in balance.hooks), format_bytes(balance.saved_bits / 8)
    here = f"{format_bit_rate(balance.sent_bits_per_s)} went through, latency included"
    if _is_on_one_host(digest.run):  # latency is most of what small payloads take there
        here = "all ranks are on one host"
    yield (
        f"Hooks ({hooks}) sent {1 - balance.sent_share:.0%} less than plain all-reduce, {saved} a step and "
        f"rank, and took {format_duration(balance.hook_us / 1e6)} to encode and decode: they save time over "
        f"links slower than {format_bit_rate(balance.break_even_bits_per_s)}. Here {here}."
    )


def _is_on_one_host(run: RecordedRun) -> bool:
    return len(set(run.started.hosts)) == 1


def _advice_sentences(
    digest: RunDigest, stage: StageDigest, late_ranks: Sequence[StragglerTotal]
) -> Iterator[str]:
    """What to try: first what loses nothing, with what it gains at most; then what changes training."""
    shares, levers = (
        stage.times.time_shares_by_category,
        {name: _suggestion(digest.run, name) for name in _SUGGESTIONS},
    )
    exact, changing = list[tuple[float, str]](), list[str]()
    worst = late_ranks[0] if late_ranks else None
    if worst and _straggler_wait_share(digest, stage, worst) <= _MIN_STRAGGLER_WAIT_SHARE * shares["wait"]:
        worst = None  # another rank is the last one each time
    data_share, more_data = shares["data"], levers["workers"]
    if worst is not None and worst.cause == "data":  # the late rank waits for data, the others for this rank
        data_share, more_data = data_share + shares["wait"], f"{more_data}, or a look at the late rank's disk"
    elif shares["wait"] > _ADVICE_THRESHOLD:
        if worst is not None:
            exact.append((shares["wait"], _STRAGGLER_ADVICE[worst.cause]))
        else:
            changing.append(_sync_less_often_phrase(digest, stage))
    late_by_samples = worst is not None and worst.cause in _CAUSES_OF_SHARES
    all_exchange = {one.sync_policy_and_options[0] for one in digest.stages} == {
        "every_step"
    } and not digest.sample_shares
    gain = _load_balancing_gain(stage) if late_by_samples and all_exchange else 0.0
    if levers["balance"] and gain > _BALANCE_THRESHOLD:
        exact.append((gain, levers["balance"]))
    if data_share > _ADVICE_THRESHOLD:
        exact.append((data_share, f"{more_data}, since the training thread waits for its data"))
    if shares["sync"] > _ADVICE_THRESHOLD:
        exact.append((shares["sync"], levers["work_between_steps"]))
    if shares["other"] > _ADVICE_THRESHOLD:
        what = "less work in the script besides forward, backward and optimizer: `other_us` holds the loss, "
        exact.append((shares["other"], f"{what}clipping, logging, and loading data outside of `run.steps`"))
    balance = hook_cost_benefit(digest, stage)
    pay = balance is not None and balance.sent_bits_per_s < balance.break_even_bits_per_s
    if shares["hook"] > _ADVICE_THRESHOLD and stage.hooks and (not pay or _is_on_one_host(digest.run)):
        exact.append((shares["hook"], levers["cheaper_hooks"]))
    if shares["wire"] > _ADVICE_THRESHOLD:
        exact += ((shares["wire"], what) for what in _lossless_comm_advice(digest, stage))
        if not stage.hooks:
            changing.append(f"sending less ({levers['sending_less']})")
        changing.append(_sync_less_often_phrase(digest, stage))
    if exact:
        listed = "; ".join(
            f"{what} (saves at most {share:.0%} of a step)" for share, what in sorted(exact)[::-1]
        )
        yield f"To try first, since nothing is lost: {listed}."
    if changing:
        listed = "; ".join(dict.fromkeys(changing))
        yield f"To try{' next' if exact else ''}, although it changes training: {listed}."
    if not exact and not changing:
        yield (
            f"Communication is hidden or small. {levers['less_computation']}"
            if shares["compute"] > 0.8
            else "Nothing stands out: no single change is likely to gain much."
        )


def _load_balancing_gain(stage: StageDigest) -> float:
    """The share of a step that ranks would save if each had samples in proportion to its speed."""
    parts = [f"{cause}_us" for cause in _CAUSES_OF_SHARES]
    own_us = [sum(us[part] for part in parts) for us in stage.times.mean_parts_us_by_rank if us]
    if not own_us or not min(own_us):
        return 0.0
    return (max(own_us) - harmonic_mean(own_us)) / stage.times.mean_parts_us["step_us"]


def _lossless_comm_advice(digest: RunDigest, stage: StageDigest) -> Iterator[str]:
    started = digest.run.started
    hosts, gradients = started.hosts, [one for one in stage.buckets if one.kind == "gradient"]
    if not {"shared_memory", "hierarchical"} & set(stage.hooks):
        if _is_on_one_host(digest.run) and started.device == "cpu" and len(digest.run.ranks) > 1:
            yield "`shared_memory` as the last hook, since all ranks are on one host"
        elif 1 < len(set(hosts)) < len(hosts):
            yield "the hook `hierarchical`, since hosts have several ranks"
    if len(gradients) == 1 and (size := gradients[0].bytes / gradients[0].payloads) > _MIN_SPLIT_BYTES:
        cap = format_value(float(f"{size / 4 / 2**20:.1g}"))
        what = _suggestion(digest.run, "bucket_cap").format(cap)
        yield f"{what}, since all gradients are in one bucket and nothing overlaps"


def _sync_less_often_phrase(digest: RunDigest, stage: StageDigest) -> str:
    name, options = stage.sync_policy_and_options
    if options:
        now = ", ".join(f"{key}: {flow_yaml(value)}" for key, value in options.items())
        return f"a longer period of `{name}` (`{now}` now)"
    return f"synchronising less often ({_suggestion(digest.run, 'syncing_less')})"


def _straggler_wait_share(digest: RunDigest, stage: StageDigest, late: StragglerTotal) -> float:
    """The share of the stage's time that ranks waited for a late one, mean over ranks."""
    steps = max(late.steps, stage.last_step - stage.first_step + 1)
    return late.lost_steps / steps * (digest.run.most_ranks - 1) / digest.run.most_ranks
