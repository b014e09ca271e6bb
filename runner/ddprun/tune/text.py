"""What a search says: a table of what was tried, the winner with its reasons, and the same as JSON."""

import math
import textwrap
import time
from collections.abc import Iterator
from typing import Any

from ddprun.config.resolved import flow, plain
from ddprun.config.tree import find, parse_path
from ddprun.explain.text import table
from ddprun.predict.links import LEVELS, shown
from ddprun.tune.candidates import CAP, KINDS, Candidate
from ddprun.tune.choose import LATE, Entry, Trial, predicted_winner, why_out, winner
from ddprun.tune.search import Outcome
from ddprun.tune.write import Change
from ddprun.units import count, duration

VERSION = 1

_WIDTH = 110
_LISTED = 5  # candidates that were not run, the best
_NAMED = 3  # stacks of hooks that were left out
_HEADS = ("", "predicted", "measured", "times the file", "to a loss", "fidelity", "loss", "")


def text(outcome: Outcome, written: str | None) -> str:
    """All of it for a reader; `written`: the file with the winner."""
    lines = list(_head(outcome))
    lines += ["", *table(_rows(outcome), "<>>>>>><"), ""]
    for paragraph in _conclusion(outcome, written):
        lines += textwrap.wrap(paragraph, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line.rstrip() for line in lines)


def _head(outcome: Outcome) -> Iterator[str]:
    world, tuned = outcome.world, outcome.target
    where = f"{count(world.ranks, 'rank')} on {count(world.hosts, 'host')}"
    links = [
        f"{shown(outcome.links.of(level))} {'inside a host' if level == 'within' else 'between hosts'}"
        for level in LEVELS
        if outcome.links.of(level).limited or (level == "across" and world.hosts > 1)
    ]
    said = ", ".join([where, *reversed(links)])
    yield f"{outcome.file.candidate.loaded.pipeline.name}: {said}"
    steps = "" if tuned.steps is None else f", {count(tuned.steps, 'step')}"
    tried = f"{count(len(outcome.entries), 'candidate')} for {tuned.stage.path}{steps}"
    if outcome.by_prediction:
        yield f"{tried}, by prediction alone: {outcome.by_prediction}."
    else:
        runs = (
            count(len(outcome.trials), "one")
            if len(outcome.trials) == 1
            else f"{len(outcome.trials)} of them"
        )
        noise = "" if outcome.noise is None else f"; noise: up to {outcome.noise - 1:.1%}"
        yield f"{tried}, by prediction; {runs} by real runs{noise}."
    if outcome.unmeasured:
        left_out = ", ".join(outcome.unmeasured[:_NAMED])
        more = len(outcome.unmeasured) - _NAMED
        left_out += f" and {more} more" if more > 0 else ""
        yield f"Not among them, for the measured run has no steps with these hooks: {left_out}."


def _rows(outcome: Outcome) -> list[tuple[str, ...]]:
    file = outcome.file
    rows: list[tuple[str, ...]] = [
        _HEADS,
        (
            file.candidate.name,
            _ms(file),
            duration(outcome.file_step_s) if outcome.file_step_s is not None else "-",
            "1",
            "1",
            "",
            _number(outcome.file_loss),
            "",
        ),
    ]
    for trial in sorted(outcome.trials, key=lambda one: -one.gain(outcome.floors)):
        out = why_out(trial, outcome.floors)
        ratio = trial.ratio
        rows.append(
            (
                trial.entry.candidate.name,
                _ms(trial.entry),
                _measured(trial),
                "-" if ratio is None else f"{ratio.mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
                "-" if trial.to_loss is None else f"{trial.to_loss:.2f}",
                "-" if trial.cosine is None else f"{trial.cosine:.4f}",
                _loss(trial),
                f"out: {out}" if out is not None else trial.verdict,
            )
        )
    ran = {trial.entry.candidate.name for trial in outcome.trials}
    left = [one for one in outcome.entries if one.candidate.name not in ran]
    rows += [
        (one.candidate.name, _ms(one), "", "", "", "", "", one.predicted.limit) for one in left[:_LISTED]
    ]
    if len(left) > _LISTED:
        rows.append((f"… and {len(left) - _LISTED} more, predicted to be slower", *[""] * 7))
    return rows


def _ms(entry: Entry) -> str:
    return duration(1e-6 * entry.predicted.step_us)


def _measured(trial: Trial) -> str:
    if trial.step_s is None:
        return "-"
    spread = "" if trial.spread_s is None else f" ± {duration(trial.spread_s)}"
    return duration(trial.step_s) + spread


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _loss(trial: Trial) -> str:
    above = trial.loss_above
    return _number(trial.loss) + ("" if above is None or math.isinf(above) else f" ({above:+.1%})")


def _conclusion(outcome: Outcome, written: str | None) -> Iterator[str]:
    entry, trial = outcome.winner, outcome.winning_trial
    if outcome.ended and outcome.trials:
        yield f"The search ended because {outcome.ended}."
    if entry is None:
        yield _nothing(outcome)
        return
    before, after = outcome.file.us_per_sample, entry.us_per_sample
    if trial is None:
        yield (
            f"Winner, by prediction: {entry.candidate.name}. A step is predicted to take {_ms(entry)} in "
            f"place of {_ms(outcome.file)}: {before / after:.2f} times as many samples a second. Nothing was "
            f"run with it, for {outcome.by_prediction}."
        )
    else:
        ratio = trial.ratio
        assert ratio is not None, "a winner is faster"
        noise = "" if outcome.noise is None else f" The file's twin differs by up to {outcome.noise - 1:.1%}."
        yield (
            f"Winner: {entry.candidate.name}. It is {ratio.mean:.2f} times as fast as the file as it is, "
            f"with 95 % confidence {ratio.low:.2f} to {ratio.high:.2f}, over {ratio.turns} turns.{noise}"
        )
    if loses := what_it_loses(entry.candidate, trial):
        yield loses
    yield from _alternatives(outcome, entry)
    if written is not None:
        yield f"It is written to {written}."


def _nothing(outcome: Outcome) -> str:
    if outcome.by_prediction:
        return "Change nothing: no candidate is predicted to gain a tenth, by which a prediction may miss."
    if not outcome.trials:
        return f"Change nothing: {outcome.ended}."
    if any(trial.verdict == "faster" for trial in outcome.trials):
        return "Change nothing: what is faster falls below a floor, or learns too slowly."
    return "Change nothing: no candidate that was run is faster beyond noise."


def what_it_loses(candidate: Candidate, trial: Trial | None) -> str:
    """In words, what training loses by it; empty if nothing: gradients are averaged exactly at every step."""
    if candidate.kind == "exact":
        return ""
    what = "its hooks change what travels"
    if candidate.kind == "rare exchange":
        what = f"all ranks meet only every {candidate.period} steps"
        what += ", and its hooks change what travels" if candidate.loss_level else ""
    if trial is None:
        return f"It does not train the same: {what}. How much that loses was not measured."
    said = (
        []
        if trial.cosine is None
        else [f"its gradients have the cosine {trial.cosine:.4f} to the exact ones"]
    )
    if (above := trial.loss_above) is not None:
        said.append(
            f"its training loss is {trial.loss:.4g}, that of the file {trial.loss_of_file:.4g} ({above:+.1%})"
        )
    figures = f" In the short run, {' and '.join(said)}." if said else ""
    if trial.to_loss:
        sooner = f"{trial.to_loss:.2f} times as fast"
        figures += f" It comes to the loss that the file has after {LATE:.0%} of that {sooner}."
    return (
        f"It does not train the same: {what}.{figures} That was one seed; `ddprun compare --seeds 5` tells "
        "how well it learns."
    )


def _alternatives(outcome: Outcome, entry: Entry) -> Iterator[str]:
    """The best of the kinds that lose less than the winner does."""
    for kind in KINDS[: KINDS.index(entry.candidate.kind)]:
        which = "Of what loses nothing" if kind == "exact" else "With all ranks meeting at every step"
        if outcome.by_prediction:
            found = [one for one in outcome.entries if one.candidate.kind == kind]
            best = predicted_winner(outcome.file, found)
            if best is not None:
                gain = f"{outcome.file.us_per_sample / best.us_per_sample:.2f} times as fast as the file"
                yield f"{which}, {best.candidate.name} is predicted to be {gain}."
            continue
        of_kind = [one for one in outcome.trials if one.entry.candidate.kind == kind]
        held = winner(of_kind, outcome.floors)
        if held is not None:
            yield f"{which}, {held.entry.candidate.name} is {held.speed:.2f} times as fast as the file."


def changes_of(outcome: Outcome) -> list[Change]:
    """The winner's changes, with what each gains by itself."""
    entry = outcome.winner
    assert entry is not None
    found = []
    for key, value in entry.candidate.changes.items():
        comment = f"tuned: {_before(outcome, key)}"
        rest = {other: one for other, one in entry.candidate.changes.items() if other != key}
        without = next(
            (one for one in (outcome.file, *outcome.entries) if dict(one.candidate.changes) == rest), None
        )
        if without is not None:
            comment += f"; with that, a step is predicted to take {_ms(without)}, not {_ms(entry)}"
        found.append(Change(key, value, comment))
    return found


def _before(outcome: Outcome, key: str) -> str:
    """What the file says of a key, or what holds where it says nothing."""
    file = outcome.file.candidate
    found = find(file.loaded.root, tuple(one for one, _ in parse_path(key)))
    if not found.missing:
        return f"was {flow(found.node.data())}"
    (name,) = [name for name, place in outcome.target.keys.items() if place == key]
    if name == CAP:
        return f"was {file.loaded.pipeline.ddp.bucket_cap_mb:g} by default"
    return f"was {flow(plain(getattr(file.settings, name)))} by default"


def heading(outcome: Outcome, command: str) -> list[str]:
    """Comment lines for the top of the winner's file."""
    entry, trial = outcome.winner, outcome.winning_trial
    assert entry is not None
    world = outcome.world
    where = f"{count(world.ranks, 'rank')} on {count(world.hosts, 'host')}"
    text = f"Written by `{command}` on {time.strftime('%Y-%m-%d')}, for {where}: "
    if trial is None:
        gain = outcome.file.us_per_sample / entry.us_per_sample
        text += f"{gain:.2f} times as fast as before, by prediction alone."
    else:
        assert trial.ratio is not None
        low, high = trial.ratio.low, trial.ratio.high
        text += f"{trial.ratio.mean:.2f} times as fast as before ({low:.2f} to {high:.2f}), measured."
    loses = what_it_loses(entry.candidate, trial)
    return [*textwrap.wrap(f"{text} {loses}".rstrip(), 98, break_on_hyphens=False), ""]


def as_object(outcome: Outcome, written: str | None) -> dict[str, Any]:
    """For `--format json`; times in microseconds."""
    trials = {trial.entry.candidate.name: trial for trial in outcome.trials}
    winner = outcome.winner
    return {
        "v": VERSION,
        "pipeline": outcome.file.candidate.loaded.pipeline.name,
        "stage": outcome.target.stage.index,
        "ranks": outcome.world.ranks,
        "hosts": outcome.world.hosts,
        "by_prediction": outcome.by_prediction or None,
        "noise": outcome.noise and outcome.noise - 1,
        "ended": outcome.ended or None,
        "unmeasured": list(outcome.unmeasured),
        "file": {
            "predicted_us": round(outcome.file.predicted.step_us),
            "measured_us": _us(outcome.file_step_s),
            "loss": outcome.file_loss,
        },
        "candidates": [
            {
                "changes": dict(one.candidate.changes),
                "kind": one.candidate.kind,
                "predicted_us": round(one.predicted.step_us),
                "limit": one.predicted.limit,
                "measured": _trial(trials.get(one.candidate.name), outcome),
            }
            for one in outcome.entries
        ],
        "winner": dict(winner.candidate.changes) if winner is not None else None,
        "written": written,
        "folder": str(outcome.folder),
    }


def _trial(trial: Trial | None, outcome: Outcome) -> dict[str, Any] | None:
    if trial is None:
        return None
    ratio, above = trial.ratio, trial.loss_above
    return {
        "step_us": _us(trial.step_s),
        "spread_us": _us(trial.spread_s),
        "times_file": ratio.mean if ratio is not None else None,
        "times_file_low": ratio.low if ratio is not None else None,
        "times_file_high": ratio.high if ratio is not None else None,
        "turns": ratio.turns if ratio is not None else 0,
        "verdict": trial.verdict,
        "times_file_to_loss": trial.to_loss,
        "cosine": trial.cosine,
        "loss": trial.loss,
        "loss_above": above if above is not None and math.isfinite(above) else None,
        "out": why_out(trial, outcome.floors),
        "run_dir": str(trial.run_dir),
    }


def _us(seconds: float | None) -> int | None:
    return None if seconds is None else round(1e6 * seconds)
