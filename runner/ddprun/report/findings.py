"""What stands out in a run, in three sentences: where the time went, who was late, and what to try."""

from collections.abc import Mapping, Sequence
from typing import Any

from ddprun.report.digest import Digest
from ddprun.telemetry.stragglers import StragglerTotal, straggler_totals
from ddprun.units import count

_MUCH = 0.15  # a share of a step's time that is worth a change
_MUCH_OF_THE_WAITING = 0.25  # a late rank that causes less of all waiting is not what to begin with
_WINDOW = 20  # synchronising steps that stragglers are looked for in, by default
_ADVICE = {
    "data": "Try more `loader.workers`, or look at that rank's disk.",
    "forward": "Look at what else runs on that rank's cores or GPU, and at inputs that cost more.",
    "backward": "Look at the layers of that bucket, and at what else runs on that rank's cores or GPU.",
    "optimizer": "Look at what else runs on that rank's cores or GPU.",
    "sync": "Look at what that rank does between steps.",
    "communication": "Look at that rank's link, and at hooks that work on its training thread.",
}


def sentences(digest: Digest) -> list[str]:
    """The sentences about one run; names of keys and commands in them stand in backticks."""
    if not digest.recorded:
        return [
            "The run has no step records, so it is unknown where its time went.",
            "It may have ended before its first step.",
            "Its events, below, show how far it got.",
        ]
    shares = _shares(digest)
    sums = straggler_totals(stragglers(digest))
    return [_where(digest, shares), _who(digest, sums), _what(digest, shares, sums)]


def stragglers(digest: Digest) -> list[dict[str, Any]]:
    """Each episode in which a rank was late."""
    summary = digest.run.summary
    if summary is not None and "stragglers" in summary:
        found: list[dict[str, Any]] = summary["stragglers"]
        return found
    return [{**event, "rank": event["straggler"]} for event in digest.run.all("straggler")]


def _shares(digest: Digest) -> dict[str, float]:
    """Of a step's time, means over ranks."""
    us = digest.mean_parts_us
    parts = {
        "compute": ("forward_us", "backward_us", "optimizer_us"),
        "data": ("data_us",),
        "hook": ("exposed_hook_us",),
        "wait": ("exposed_wait_us",),
        "wire": ("exposed_wire_us",),
        "sync": ("sync_us", "other_us"),
    }
    return {name: sum(us[part] for part in some) / (us["step_us"] or 1.0) for name, some in parts.items()}


def _where(digest: Digest, shares: Mapping[str, float]) -> str:
    exposed = shares["hook"] + shares["wait"] + shares["wire"]
    found = [
        (shares["compute"], "forward, backward and optimizer"),
        (
            exposed,
            f"exposed communication ({shares['wire']:.0%} on the wire, {shares['wait']:.0%} waiting for the "
            f"last rank, {shares['hook']:.0%} in hooks)",
        ),
        (shares["data"], "loading data"),
        (shares["sync"], "between steps"),
    ]
    said = [f"{share:.0%} {what}" for share, what in sorted(found, reverse=True) if share >= 0.005]
    listed = said[0] if len(said) == 1 else f"{', '.join(said[:-1])}, and {said[-1]}"
    return f"A step took {digest.mean_parts_us['step_us'] / 1000:.1f} ms on average: {listed}."


def _who(digest: Digest, sums: Sequence[StragglerTotal]) -> str:
    if digest.ranks < 2:
        return "There was one rank, so no rank waited for another."
    if not sums and digest.synced_steps < _WINDOW:
        return "Ranks synchronised too rarely, or in too few steps, to tell whether one was late."
    if not sums:
        return "No rank was late for long."
    worst, *rest = sums
    params = ", ".join(worst.params[:3]) + (" …" if len(worst.params) > 3 else "")
    bucket = "" if worst.bucket is None else f", before bucket {worst.bucket} ({params})"
    more = sum(one.episodes for one in rest)
    others = f"; {count(more, 'more episode')} of late ranks below" if more else ""
    return (
        f"Rank {worst.rank} was {worst.late_us / 1000:.1f} ms late in {worst.cause}{bucket}, {worst.when()}, "
        f"and the others waited for it{others}."
    )


def _what(digest: Digest, shares: Mapping[str, float], sums: Sequence[StragglerTotal]) -> str:
    wait = shares["wait"]
    if wait > _MUCH and sums and _waiting_for(digest, sums[0]) > _MUCH_OF_THE_WAITING * wait:
        return _ADVICE.get(sums[0].cause, _ADVICE["optimizer"])
    if shares["data"] > _MUCH:
        return "Try more `loader.workers`: the training thread waits for its data."
    if shares["hook"] > _MUCH:
        return (
            "Try without the hooks, or with cheaper ones: they may cost more time than they save on the "
            "wire; `ddprun compare` measures it."
        )
    if shares["wire"] > _MUCH:
        return _against_the_wire(digest)
    if wait > _MUCH:
        return (
            f"Try {_less_often(digest)}: another rank is the last one each time, and every synchronisation "
            "waits for it."
        )
    if shares["sync"] > _MUCH:
        return (
            "Try to do less between steps: audits, fidelity, buffer exchanges and mutation are in `sync_us`."
        )
    if shares["compute"] > 0.8:
        return (
            "Communication is hidden or small; to go faster, try `precision: bf16`, a larger "
            "`loader.batch_size`, or more ranks."
        )
    return "Nothing stands out: no single change is likely to gain much."


def _against_the_wire(digest: Digest) -> str:
    if {one.hooks for one in digest.sent if one.kind in ("gradient", "delta")} != {()}:
        return f"Try {_less_often(digest)}."
    also = ", `[hierarchical]`" if any(one.between_hosts_bytes for one in digest.sent) else ""
    return (
        f"Try to send less (`ddprun compare` with `--vary 'hooks=[[], [fp16], [int8]]'`{also}), or try "
        f"{_less_often(digest)}."
    )


def _less_often(digest: Digest) -> str:
    begun = digest.run.all("stage_started")
    sync = begun[-1].get("sync") if begun else None
    if isinstance(sync, Mapping) and sync:
        name, options = next(iter(sync.items()))
        if isinstance(options, Mapping) and options:
            now = ", ".join(f"{key}: {value}" for key, value in options.items())
            return f"a longer period of `{name}` (`{now}` now)"
    return "to synchronise less often (`accumulate: 2`, or `sync: {local_sgd: {every: 8}}`)"


def _waiting_for(digest: Digest, late: StragglerTotal) -> float:
    """The share of the run's time that ranks waited for a late one, mean over ranks."""
    steps = max(late.steps, digest.recorded[-1] - digest.recorded[0] + 1)
    return late.lost_steps / steps * (digest.ranks - 1) / digest.ranks
