"""What a search says: a table of what was tried, the winner with its reasons and file, the same as JSON."""

import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ddprun.config import LoadedPipeline, load
from ddprun.config.yaml_writer import flow_yaml, to_plain_data, written_yaml
from ddprun.tune import selection
from ddprun.tune.candidates import CANDIDATE_KINDS, Candidate
from ddprun.tune.search import SearchOutcome
from ddprun.units import abbreviated_list, format_count, format_duration, format_table

VERSION = 1

_WIDTH = 110
_MAX_UNRUN_CANDIDATES = 5  # candidates that were not run, the best
_MAX_NAMED_STACKS = 3  # stacks of hooks that were left out


def render_text(outcome: SearchOutcome, written: str | None) -> str:
    """The result of the search, for a reader; `written`: the file that the winner was written to."""
    lines = list(_header_lines(outcome))
    lines += ["", *format_table(_candidate_rows(outcome), "<>>>>>><"), ""]
    for paragraph in _conclusion_sentences(outcome, written):
        lines += textwrap.wrap(paragraph, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line.rstrip() for line in lines)


def _header_lines(outcome: SearchOutcome) -> Iterator[str]:
    world, tuned = outcome.world, outcome.tuned
    links = f", {outcome.links}" if world.hosts > 1 or outcome.links.within.takes_time else ""
    yield f"{outcome.baseline.candidate.loaded.pipeline.name}: {world}{links}"
    steps = "" if tuned.steps is None else f", {format_count(tuned.steps, 'step')}"
    tried = f"{format_count(len(outcome.entries), 'candidate')} for {tuned.stage.path}{steps}"
    if outcome.not_run_reason:
        yield f"{tried}, by prediction alone: {outcome.not_run_reason}."
    else:
        count = len(outcome.trials)
        runs = f"{count} of them by {'a real run' if count == 1 else 'real runs'}"
        noise = "" if outcome.noise_factor is None else f"; noise: up to {outcome.noise_factor - 1:.1%}"
        yield f"{tried}, by prediction; {runs}{noise}."
    if outcome.unmeasured_stacks:
        left_out = abbreviated_list(outcome.unmeasured_stacks, _MAX_NAMED_STACKS)
        yield f"Left out, because the measured run has no steps with these hooks: {left_out}."


def _candidate_rows(outcome: SearchOutcome) -> list[tuple[str, ...]]:
    file, measured = outcome.baseline, outcome.baseline_trial
    step_s, loss = (None, None) if measured is None else (measured.step_s, measured.loss)
    rows: list[tuple[str, ...]] = [
        ("", "predicted", "measured", "times the file", "to a loss", "fidelity", "loss", ""),
        (
            file.candidate.name,
            _predicted_step_text(file),
            _measured_step_text(step_s),
            "1",
            "1",
            "",
            _format_number(loss),
            "",
        ),
    ]
    # What keeps training the same comes first, then what loses less; the fastest first in each kind.
    for trial in sorted(
        outcome.trials,
        key=lambda t: (
            CANDIDATE_KINDS.index(t.entry.candidate.kind),
            -t.loss_adjusted_speedup(outcome.floors),
        ),
    ):
        out, ratio = selection.rejection_reason(trial, outcome.floors), trial.speed_ratio
        above = trial.relative_loss_increase
        rows.append(
            (
                trial.entry.candidate.name,
                _predicted_step_text(trial.entry),
                _measured_step_text(trial.step_s, trial.spread_s),
                "-" if ratio is None else f"{ratio.mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
                _format_number(trial.speedup_to_loss, 2),
                _format_number(trial.cosine),
                _format_number(trial.loss) + ("" if above is None else f" ({above:+.1%})"),
                f"out: {out}" if out is not None else trial.verdict,
            )
        )
    ran = {trial.entry.candidate.name for trial in outcome.trials}
    left = [one for one in outcome.entries if one.candidate.name not in ran]
    rows += [
        (one.candidate.name, _predicted_step_text(one), "", "", "", "", "", one.predicted.limit)
        for one in left[:_MAX_UNRUN_CANDIDATES]
    ]
    if len(left) > _MAX_UNRUN_CANDIDATES:
        rows.append((f"… and {len(left) - _MAX_UNRUN_CANDIDATES} more, predicted to be slower", *[""] * 7))
    return rows


def _predicted_step_text(entry: selection.PredictedCandidate) -> str:
    return format_duration(1e-6 * entry.predicted.step_us)


def _measured_step_text(seconds: float | None, spread_s: float | None = None) -> str:
    spread = "" if spread_s is None else f" ± {format_duration(spread_s)}"
    return "-" if seconds is None else format_duration(seconds) + spread


def _format_number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _conclusion_sentences(outcome: SearchOutcome, written: str | None) -> Iterator[str]:
    if outcome.end_reason and outcome.trials:
        yield f"The search ended because {outcome.end_reason}."
    if outcome.winner is None:
        yield _no_winner_text(outcome)
        return
    yield from _winner_sentences(outcome, outcome.winner)
    if written is not None:
        yield f"It is written to {written}."


def _winner_sentences(outcome: SearchOutcome, winner: selection.PredictedCandidate) -> Iterator[str]:
    """How fast the winner is, and what it does to training."""
    trial = outcome.winning_trial
    headline = {
        "exact": "Winner, which keeps training the same",
        "lossy hooks": "Winner, with lossy hooks",
        "rare exchange": "Winner, which changes the algorithm (ranks synchronise every "
        f"{winner.candidate.exchange_period} steps)",
    }[winner.candidate.kind]
    name = f"{headline}: {winner.candidate.name}."
    if trial is None:
        step, baseline_step = _predicted_step_text(winner), _predicted_step_text(outcome.baseline)
        gain = outcome.baseline.us_per_sample / winner.us_per_sample
        yield (
            f"{name} By prediction, a step takes {step} in place of {baseline_step}: {gain:.2f} times as "
            f"many samples a second. Nothing was run with it, because {outcome.not_run_reason}."
        )
    else:
        ratio = trial.speed_ratio
        assert ratio is not None, "a winner is faster"
        yield (
            f"{name} It is {ratio.mean:.2f} times as fast as the file as it is (95% interval "
            f"{ratio.low:.2f} to {ratio.high:.2f}, over {ratio.turns} turns)."
        )
    if impact := _training_impact_text(winner.candidate, trial):
        yield impact


def _no_winner_text(outcome: SearchOutcome) -> str:
    if outcome.not_run_reason:
        return (
            "Change nothing: no candidate is predicted to gain more than 10%, and predictions may be off "
            "by that much."
        )
    if not outcome.trials:
        return f"Change nothing: {outcome.end_reason}."
    if any(trial.verdict == "faster" for trial in outcome.trials):
        return "Change nothing: what is faster falls below a floor, or learns too slowly."
    return "Change nothing: no candidate that was run is faster beyond noise."


def _training_impact_text(candidate: Candidate, trial: selection.Trial | None) -> str:
    """In words, what training loses; empty if gradients are averaged exactly in every step."""
    if candidate.kind == "exact":
        return ""
    what = "its hooks change what is sent"
    if candidate.kind == "rare exchange":
        what = f"ranks synchronise only every {candidate.exchange_period} steps"
        what += ", and its hooks change what is sent" if candidate.lossiness else ""
    if trial is None:
        return f"It does not train the same: {what}. What that costs in learning was not measured."
    measured = []
    if trial.cosine is not None:
        measured.append(f"its gradients have a cosine similarity of {trial.cosine:.4f} to the exact ones")
    if (above := trial.relative_loss_increase) is not None:
        losses = f"{trial.loss:.4g}, that of the file {trial.baseline_loss:.4g} ({above:+.1%})"
        measured.append(f"its training loss is {losses}")
    figures = f" In the short run, {' and '.join(measured)}." if measured else ""
    if trial.speedup_to_loss:
        target = f"the loss that the file has after {selection.TARGET_LOSS_SHARE:.0%} of the steps"
        figures += f" It is {trial.speedup_to_loss:.2f} times as fast to reach {target}."
    return (
        f"It does not train the same: {what}.{figures} That was one seed; `ddprun compare --seeds 5` tells "
        "how well it learns."
    )


def winner_file_comment(outcome: SearchOutcome, command: str) -> list[str]:
    """Comment lines for the top of the winner's file."""
    assert outcome.winner is not None
    changes = outcome.winner.candidate.changes
    origin = f"Written by `{command}` on {time.strftime('%Y-%m-%d')}, for {outcome.world}."
    text = " ".join([origin, *_winner_sentences(outcome, outcome.winner)])
    old = outcome.baseline.candidate.tunable_values
    changed = [
        f"- {place}: {flow_yaml(changes[place])} (was {flow_yaml(to_plain_data(old[key]))})"
        for key, place in outcome.tuned.paths_by_key.items()
        if place in changes
    ]
    return [*textwrap.wrap(text, 98, break_on_hyphens=False), "Changed:", *changed]


def overrides_without_secrets(loaded: LoadedPipeline) -> list[str]:
    """The `--set` options that are written to a file."""
    return [text for text in loaded.overrides if loaded.secrets.redact(text) == text]


def tuned_pipeline_yaml(loaded: LoadedPipeline, overrides: Sequence[str], heading: Sequence[str]) -> str:
    """The keys of the file with these overrides in place of its own; `heading`: comment lines at the top."""
    # A line break of any kind would end the comment.
    lines = (" ".join(loaded.secrets.redact(line).split()) for line in heading)
    head = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return head + written_yaml(load(loaded.path, overrides, loaded.folder).root)


def to_json_data(outcome: SearchOutcome, written: str | None) -> dict[str, Any]:
    """For `--format json`; times in microseconds."""
    trials = {trial.entry.candidate.name: trial for trial in outcome.trials}
    winner, file = outcome.winner, outcome.baseline_trial
    return {
        "v": VERSION,
        "pipeline": outcome.baseline.candidate.loaded.pipeline.name,
        "stage": outcome.tuned.stage.index,
        "ranks": outcome.world.ranks,
        "hosts": outcome.world.hosts,
        "by_prediction": outcome.not_run_reason or None,
        "noise": outcome.noise_factor and outcome.noise_factor - 1,
        "ended": outcome.end_reason or None,
        "unmeasured": list(outcome.unmeasured_stacks),
        "file": {
            "predicted_us": round(outcome.baseline.predicted.step_us),
            "measured_us": None if file is None else _to_rounded_us(file.step_s),
            "loss": None if file is None else file.loss,
        },
        "candidates": [
            {
                "changes": dict(one.candidate.changes),
                "kind": one.candidate.kind,
                "predicted_us": round(one.predicted.step_us),
                "limit": one.predicted.limit,
                "measured": _trial_to_json_data(trials.get(one.candidate.name), outcome),
            }
            for one in outcome.entries
        ],
        "winner": dict(winner.candidate.changes) if winner is not None else None,
        "written": written,
        "folder": str(outcome.folder),
    }


def _trial_to_json_data(trial: selection.Trial | None, outcome: SearchOutcome) -> dict[str, Any] | None:
    if trial is None:
        return None
    ratio = trial.speed_ratio
    return {
        "step_us": _to_rounded_us(trial.step_s),
        "spread_us": _to_rounded_us(trial.spread_s),
        "times_file": ratio.mean if ratio is not None else None,
        "times_file_low": ratio.low if ratio is not None else None,
        "times_file_high": ratio.high if ratio is not None else None,
        "turns": ratio.turns if ratio is not None else 0,
        "verdict": trial.verdict,
        "times_file_to_loss": trial.speedup_to_loss,
        "cosine": trial.cosine,
        "loss": trial.loss,
        "loss_above": trial.relative_loss_increase,
        "out": selection.rejection_reason(trial, outcome.floors),
        "run_dir": str(trial.run_dir),
    }


def _to_rounded_us(seconds: float | None) -> int | None:
    return None if seconds is None else round(1e6 * seconds)
