"""How well variants learn, and which one to choose.

Two runs with the same seed differ by what was varied, but one seed does not say what another would show. So
each seed gives one difference from the first variant, and the scatter of these differences gives an interval
for their mean (Student's t for pairs). One seed gives no interval.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ddprun.report.digest import RunDigest
from ddprun.telemetry.reader import RecordedRun
from ddprun.units import format_count

_LOSS_WINDOW_SHARE = 0.1  # of the samples: the training loss is the mean over these
_ENOUGH_SEEDS = 5  # for a first interval: with two, Student's t is 12.7
_MAX_SEEDS = 100
# 97.5 % quantiles of Student's t for 1, 2, … 30 degrees of freedom; that of 30 is a little wide for more.
# fmt: off
_STUDENT_T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on
SAME, WORSE, BETTER = "learns the same", "learns worse", "learns better"
NO_CLEAR_DIFFERENCE = "shows no clear difference in learning"
ONE_SEED_CANNOT_TELL = "one seed cannot tell"
NOT_FINITE = "is not finite"
TOO_FEW_TURNS = "too few turns to tell"  # a verdict on speed

ComparisonRow = Mapping[str, Any]  # as `compare.comparison_rows` makes it


@dataclass(frozen=True, slots=True)
class SeedDifferences:
    """A variant's values less those of the first, one for each seed."""

    values: Sequence[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def confidence_half_width(self) -> float | None:
        """Half the length of the 95 % interval of the mean; None for one seed."""
        return confidence_half_width(self.values)

    @property
    def seeds_needed(self) -> int | None:
        """How many seeds would tell a difference of this size at this scatter; None if too many."""
        if not self.confidence_half_width:
            return None
        numbers = range(len(self.values) + 1, _MAX_SEEDS + 1)
        spread = statistics.stdev(self.values)
        return next((one for one in numbers if _student_t_half_width(spread, one) < abs(self.mean)), None)

    def verdict(self) -> str:
        """In words, of a quantity that is better if it is lower."""
        if not any(self.values):
            return SAME
        if self.confidence_half_width is None:
            return ONE_SEED_CANNOT_TELL
        if abs(self.mean) <= self.confidence_half_width:
            return NO_CLEAR_DIFFERENCE
        return WORSE if self.mean > 0 else BETTER


def confidence_half_width(values: Sequence[float]) -> float | None:
    """Half the length of the 95 % interval of the mean, by Student's t; None for a single value."""
    return _student_t_half_width(statistics.stdev(values), len(values)) if len(values) > 1 else None


def _student_t_half_width(spread: float, count: int) -> float:
    return _STUDENT_T_QUANTILES[min(count - 1, len(_STUDENT_T_QUANTILES)) - 1] * spread / math.sqrt(count)


def judge_learning(variants: Sequence[Sequence[RunDigest]]) -> list[dict[str, Any]]:
    """How well each variant learns, as numbers and in words, compared with the first; `variants`: for each
    its runs by seed, none if one of them failed.
    """
    seen = [run.run.summary and run.run.summary.samples for runs in variants for run in runs]
    samples = min((one or 0 for one in seen), default=0)
    values = [_metric_values(runs, samples) for runs in variants]
    names = list(dict.fromkeys(name for known in values for name in known))
    # Held-out data that was evaluated after other numbers of samples is no match. One quantity decides: two
    # would be two chances for a difference that is none.
    evaluated = all("held_out_loss" in known for runs, known in zip(variants, values, strict=True) if runs)
    decisive = "held_out_loss" if evaluated and len(set(seen)) == 1 else "loss"
    # Of the first, which is not compared with itself, there are none.
    differences = [{}, *(_seed_differences(values[0], known) for known in values[1:])]
    return [
        {
            "seeds": len(runs),
            "loss_after_samples": samples if runs else None,
            **_metric_columns(known, differing, names),
            **_learning_verdict(runs, differing, decisive),
        }
        for runs, known, differing in zip(variants, values, differences, strict=True)
    ]


def _metric_values(runs: Sequence[RunDigest], samples: int) -> dict[str, list[float]]:
    """Training loss and the metrics of the last evaluation: for each its value under every seed."""
    found: list[dict[str, float]] = []
    for one in runs:
        last = next(reversed(one.run.evaluations.values()), {})
        loss = windowed_loss_at(one.run, samples)
        known = {} if loss is None else {"loss": loss}
        found.append(known | {f"held_out_{name}": value for name, value in last.items()})
    shared = [name for name in (found[0] if found else ()) if all(name in one for one in found)]
    return {name: [one[name] for one in found] for name in shared}


def _metric_columns(
    known: Mapping[str, Sequence[float]], differences: Mapping[str, SeedDifferences], names: Sequence[str]
) -> dict[str, float | None]:
    row: dict[str, float | None] = {}
    for name in names:
        row[name] = statistics.fmean(known[name]) if name in known else None
        mean, half = (one.mean, one.confidence_half_width) if (one := differences.get(name)) else (None, None)
        row[f"{name}_difference"] = mean
        row[f"{name}_difference_low"] = None if mean is None or half is None else mean - half
        row[f"{name}_difference_high"] = None if mean is None or half is None else mean + half
    return row


def _seed_differences(
    first: Mapping[str, Sequence[float]], known: Mapping[str, Sequence[float]]
) -> dict[str, SeedDifferences]:
    pairs = {name: zip(first[name], known[name], strict=True) for name in first if name in known}
    return {name: SeedDifferences([after - before for before, after in pair]) for name, pair in pairs.items()}


def _learning_verdict(
    runs: Sequence[RunDigest], differences: Mapping[str, SeedDifferences], decisive: str
) -> dict[str, Any]:
    """The verdict on the decisive quantity; none of a variant that has none, or is not compared."""
    if any(one.run.summary and one.run.summary.nonfinite for one in runs):
        return {"learning": NOT_FINITE, "decided_by": "loss", "seeds_needed": None}
    if (found := differences.get(decisive)) is None:
        return {"learning": "", "decided_by": None, "seeds_needed": None}
    verdict = found.verdict()
    needed = found.seeds_needed if verdict == NO_CLEAR_DIFFERENCE else None
    return {"learning": verdict, "decided_by": decisive, "seeds_needed": needed}


def windowed_loss_at(run: RecordedRun, samples: int) -> float | None:
    """The mean loss over the last tenth of the first `samples` of all ranks.

    Each rank's own loss in a step counts for the rank's samples in it: all runs are compared over the same
    samples, however often their ranks exchange losses.
    """
    return _mean_loss_between(_losses_by_samples_seen(run), samples * (1 - _LOSS_WINDOW_SHARE), samples)


def samples_until_loss(run: RecordedRun, loss: float, samples: int) -> int | None:
    """After how many of `samples` the mean loss over a tenth of them is first at most `loss`; None: never."""
    known, tenth = _losses_by_samples_seen(run), samples * _LOSS_WINDOW_SHARE
    for total, _, _ in known:
        if tenth <= total <= samples:
            mean = _mean_loss_between(known, total - tenth, total)
            if mean is not None and mean <= loss:
                return total
    return None


def _mean_loss_between(known: Sequence[tuple[int, float, int]], above: float, most: int) -> float | None:
    """Of a step that reaches into the interval, as many samples count as are in it."""
    inside = [(loss, min(total, most) - max(total - own, above)) for total, loss, own in known]
    counted = [(loss, count) for loss, count in inside if count > 0]
    weights = sum(count for _, count in counted)
    return sum(loss * count for loss, count in counted) / weights if weights else None


def _losses_by_samples_seen(run: RecordedRun) -> list[tuple[int, float, int]]:
    """For each step whose loss is known: how many samples all ranks had seen, the loss, and of how many."""
    seen, known, sums = Counter[int](), Counter[int](), defaultdict[int, float](float)
    for rank in run.ranks:
        for line in run.step_records(rank):
            seen[line.step] += line.samples
            if line.loss is not None:
                known[line.step] += line.samples
                sums[line.step] += line.loss * line.samples
    steps = sorted(seen)
    totals = zip(steps, accumulate(seen[step] for step in steps), strict=True)
    return [(total, sums[step] / known[step], seen[step]) for step, total in totals if known[step]]


# In words.


def learning_table(rows: Sequence[ComparisonRow]) -> tuple[list[str], list[list[str]], str]:
    """Heads, the cells of each row, and a caption: how well each variant learns."""
    names = [key.removesuffix("_difference") for key in rows[0] if key.endswith("_difference")]
    heads = ["", "seeds", *(head for name in names for head in (_metric_label(name), "against the first"))]
    cells = [[row["variant"], str(row["seeds"] or "-"), *_learning_cells(row, names)] for row in rows]
    samples = next((row["loss_after_samples"] for row in rows if row["seeds"]), 0)
    window = f"over the last {_LOSS_WINDOW_SHARE:.0%} of {samples:,} samples"
    caption = f"Learning: means over seeds, with 95% intervals. Training loss: {window}."
    return heads, cells, caption


def _learning_cells(row: ComparisonRow, names: Sequence[str]) -> list[str]:
    found = []
    for name in names:
        difference, low, high = (row[f"{name}_difference{end}"] for end in ("", "_low", "_high"))
        interval = "" if low is None else f" ({low:+.3g} to {high:+.3g})"
        found.append("-" if row[name] is None else f"{row[name]:.4f}")
        found.append("-" if difference is None else f"{difference:+.3g}{interval}")
    return found


def _metric_label(quantity: str) -> str:
    """A key of a row as a reader knows it."""
    name = quantity.removeprefix("held_out_")
    return name if name == quantity else f"held-out {name}"


def overall_verdict(row: ComparisonRow) -> str:
    """Speed and learning in a few words."""
    verdict = str(row["verdict"])
    if verdict == TOO_FEW_TURNS:
        verdict += f", {row['turns_needed']} more needed"
    if not row["learning"]:
        return verdict
    if row["learning"] == ONE_SEED_CANNOT_TELL:
        return f"{verdict}; one seed cannot tell how well it learns"
    learning = "its loss is not finite" if row["learning"] == NOT_FINITE else row["learning"]
    return f"{verdict}, and {learning}"


def comparison_sentences(rows: Sequence[ComparisonRow]) -> list[str]:
    """How each variant differs from the first, and at last which one to choose; commands are in backticks."""
    others = [row for row in rows[1:] if not row["verdict"].startswith("noise")]
    return [*map(_variant_sentence, others), _recommendation_sentence(rows[0], others)] if others else []


def _variant_sentence(row: ComparisonRow) -> str:
    name, verdict, learning = row["variant"], row["verdict"], row["learning"]
    if "failed" in verdict:
        return f"{name}: {verdict}."
    speed = {"faster": "is faster", "slower": "is slower"}.get(verdict, "is not clearly faster or slower")
    if verdict == TOO_FEW_TURNS:
        speed = f"needs {format_count(row['turns_needed'], 'more turn')} to tell how fast it is"
    if row["times_first"] is not None:
        low, high = row["times_first_low"], row["times_first_high"]
        so_far = "so far " if verdict == TOO_FEW_TURNS else ""
        speed += f" ({so_far}{row['times_first']:.2f} times as fast, {low:.2f} to {high:.2f})"
    if learning == SAME:
        return f"{name} {speed}, and learns the same: its losses are equal."
    if learning in (NOT_FINITE, ""):
        unknown = "how well it learns is not known: there is no loss to compare"
        return f"{name} {speed}, and {'its loss is not finite' if learning else unknown}."
    key = row["decided_by"]
    difference, low, high = (row[f"{key}_difference{end}"] for end in ("", "_low", "_high"))
    size = f"its {_metric_label(key)} is {abs(difference):.3g} {'higher' if difference > 0 else 'lower'}"
    if learning == ONE_SEED_CANNOT_TELL:
        return f"{name} {speed}; {size} under this one seed, which does not tell how well it learns."
    size += f" ({low:+.3g} to {high:+.3g}, {format_count(row['seeds'], 'seed')})"
    if learning != NO_CLEAR_DIFFERENCE:
        return f"{name} {speed}, and {learning}: {size}."
    needed = row["seeds_needed"]
    more = f"about {needed}" if needed else f"more than {_MAX_SEEDS}"
    return f"{name} {speed}, and {learning}: {size}; {more} seeds would confirm a difference of that size."


def recommended_row(rows: Sequence[ComparisonRow], allowed: Sequence[bool]) -> ComparisonRow | None:
    """The fastest of the rows that are `allowed`, whose loss is known and not found to be worse; None if the
    first one failed, or its loss is not finite.
    """
    if rows[0]["verdict"] != "the first" or rows[0]["learning"] == NOT_FINITE:
        return None
    left = [row for row, is_allowed in zip(rows, allowed, strict=True) if is_allowed]
    left = [row for row in left if row["learning"] not in (WORSE, NOT_FINITE, "")]
    faster = [row for row in left if row["verdict"] == "faster"]
    if faster:
        return max(faster, key=lambda row: row["times_first"])
    as_fast = [row for row in left if row["verdict"] == "no difference beyond noise"]
    better = [row for row in as_fast if row["learning"] == BETTER]
    return min(better, key=lambda row: row[f"{row['decided_by']}_difference"]) if better else rows[0]


def _recommendation_sentence(first: ComparisonRow, others: Sequence[ComparisonRow]) -> str:
    chosen = next((row for row in (first, *others) if row["chosen"]), None)
    if chosen is None:
        return f"{first['variant']} failed, or its loss is not finite: there is nothing to compare with."
    if chosen["learning"] == ONE_SEED_CANNOT_TELL:
        return (
            f"{chosen['variant']} is the fastest; before you choose it, compare again with "
            f"`--seeds {_ENOUGH_SEEDS}`, to see whether it learns as well."
        )
    if chosen is not first:
        faster = chosen["verdict"] == "faster"
        why = "it is the fastest that does not learn worse" if faster else "it learns better"
        return f"Choose {chosen['variant']}: {why}."
    if any(row["verdict"] == TOO_FEW_TURNS for row in others):
        return "There is nothing to choose yet: compare again with more `--steps`, or a smaller `--turn`."
    if faster := [row["learning"] for row in others if row["verdict"] == "faster"]:
        unknown = ", or has no loss to compare" * ("" in faster)
        return f"Stay with {first['variant']}: what is faster learns worse, or sends no gradients{unknown}."
    return f"Stay with {first['variant']}: nothing else is faster beyond noise, or learns better."
