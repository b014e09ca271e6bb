"""Three sentences: where a run's time went, who was late, and what to try."""

from collections.abc import Mapping, Sequence

from ddprun.report.digest import Digest
from ddprun.report.late import stragglers
from ddprun.telemetry.episodes import StragglerTotal, totals

_MUCH = 0.15
"""A share of a step's time that is worth a change."""

_GOOD_PART = 0.25
"""Of all waiting: one late rank that accounts for less is not what to begin with."""

_WINDOW = 20

_AT_CAUSE = {
    "data": "more `loader.workers`, or a look at that rank's disk",
    "forward": "a look at what else runs on that rank's cores or GPU, and at inputs that cost more",
    "backward": "a look at the layers of that bucket, and at what else runs on that rank's cores or GPU",
    "optimizer": "a look at what else runs on that rank's cores or GPU",
    "sync": "a look at what that rank does between steps",
    "communication": "a look at that rank's link, and at hooks that work on its training thread",
}


def sentences(digest: Digest) -> list[str]:
    """Of one run."""
    if not digest.recorded:
        return [
            "The run has no step records, so nobody can say where its time went.",
            "It may have ended before its first step.",
            "Its events, below, say how far it came.",
        ]
    shares = _shares(digest)
    return [_where(digest, shares), _who(digest), _what(digest, shares)]


def _shares(digest: Digest) -> dict[str, float]:
    """Of a step's time, means over ranks."""
    total = digest.step_us or 1.0
    mean = {
        part: sum(one.get(part, 0.0) for one in digest.parts_us) / len(digest.parts_us) / total
        for part in digest.parts
    }
    return {
        "compute": mean["forward_us"] + mean["backward_us"] + mean["optimizer_us"],
        "data": mean["data_us"],
        "hook": mean["exposed_hook_us"],
        "wait": mean["exposed_wait_us"],
        "wire": mean["exposed_wire_us"],
        "sync": mean["sync_us"] + mean["other_us"],
    }


def _where(digest: Digest, shares: Mapping[str, float]) -> str:
    exposed = shares["hook"] + shares["wait"] + shares["wire"]
    found = [
        (shares["compute"], f"{shares['compute']:.0%} was forward, backward and optimizer"),
        (
            exposed,
            f"{exposed:.0%} was communication that training could not hide ({shares['wire']:.0%} the wire, "
            f"{shares['wait']:.0%} waiting for the last rank, {shares['hook']:.0%} hooks)",
        ),
        (shares["data"], f"{shares['data']:.0%} was loading data"),
        (shares["sync"], f"{shares['sync']:.0%} was what lies between steps"),
    ]
    said = [text for share, text in sorted(found, reverse=True) if share >= 0.005]
    return f"A step took {digest.step_us / 1000:.1f} ms in the mean: {_listed(said)}."


def _who(digest: Digest) -> str:
    episodes = stragglers(digest)
    if digest.ranks < 2:
        return "There was one rank, which waits for nobody."
    if not episodes and not _could_be_judged(digest):
        return "Ranks synchronised too seldom, or in too few steps, to tell whether one was late."
    if not episodes:
        return "No rank was late for long."
    worst, *rest = totals(episodes)
    bucket = "" if worst.bucket is None else f", before bucket {worst.bucket} ({_some(worst.params)})"
    more = sum(one.episodes for one in rest)
    others = f"; {more} more {'episode' if more == 1 else 'episodes'} of a late rank below" if more else ""
    return (
        f"Rank {worst.rank} was late by {worst.late_us / 1000:.1f} ms in {worst.cause}{bucket}, "
        f"{worst.when()}, and the others waited{others}."
    )


def _what(digest: Digest, shares: Mapping[str, float]) -> str:
    worst = next(iter(totals(stragglers(digest))), None)
    if (
        shares["wait"] > _MUCH
        and worst is not None
        and _waited_for(digest, worst) > _GOOD_PART * shares["wait"]
    ):
        return f"Try {_AT_CAUSE[worst.cause]}."
    if shares["data"] > _MUCH:
        return "Try more `loader.workers`: the training thread waits for its data."
    if shares["hook"] > _MUCH:
        return (
            "Try without the hooks, or with cheaper ones: they cost time that the wire may not; "
            "`ddprun compare` tells."
        )
    if shares["wire"] > _MUCH:
        return _against_the_wire(digest)
    if shares["wait"] > _MUCH:
        return (
            f"{_less_often(digest)}: no rank is always late, but some rank is each time, and every "
            "synchronisation waits for it."
        )
    if shares["sync"] > _MUCH:
        return "Try less between steps: audits, fidelity, buffers and mutation are in `sync_us`."
    if shares["compute"] > 0.8:
        return (
            "Communication is hidden or small; to go faster, try `precision: bf16`, a larger "
            "`loader.batch_size`, or more ranks."
        )
    return "Nothing stands out: no single change is likely to gain much."


def _against_the_wire(digest: Digest) -> str:
    stacks = {one.hooks for one in digest.sent if one.kind in ("gradient", "delta")}
    between = sum(one.between_hosts_bytes for one in digest.sent)
    if stacks == {()}:
        also = ", `[hierarchical]`" if between else ""
        return (
            f"Try to send less (`ddprun compare` with `--vary 'hooks=[[], [fp16], [int8]]'`{also}). Or "
            f"{_less_often(digest)[0].lower()}{_less_often(digest)[1:]}."
        )
    return f"{_less_often(digest)}."


def _less_often(digest: Digest) -> str:
    begun = digest.run.all("stage_started")
    sync = begun[-1].get("sync") if begun else None
    if isinstance(sync, Mapping) and sync:
        name, options = next(iter(sync.items()))
        return f"Try a longer period of `{name}` (`{', '.join(f'{k}: {v}' for k, v in options.items())}` now)"
    return "Try to synchronise less often: `accumulate: 2`, or `sync: {local_sgd: {every: 8}}`"


def _waited_for(digest: Digest, late: StragglerTotal) -> float:
    """Which share of the run's time the mean rank waited for one that was late."""
    steps = max(late.steps, digest.recorded[-1] - digest.recorded[0] + 1)
    return late.lost_steps / steps * (digest.ranks - 1) / digest.ranks


def _could_be_judged(digest: Digest) -> bool:
    """Whether ranks told each other often enough when they were ready, by the default window."""
    return digest.met >= _WINDOW


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])}, and {items[-1]}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
