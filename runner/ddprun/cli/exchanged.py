"""What `ddprun explain` tells of exchanges: in words, and as tables of buckets, bytes and legs."""

from collections.abc import Iterator, Sequence
from typing import Any

from ddprun.cli.columns import capital, count, ends, labelled, size, table, told
from ddprun.explain.explained import Exchange, bucket_bytes
from ddprun.explain.traffic import Among, Amount, Carried
from ddprun_hooks.buckets import BucketLayout

_ROWS = 12
"""Longer tables lose their middle; `--format json` has all."""

HEAD = ("", "per rank", "all ranks", "between hosts")
"""Over the rows that `summed` makes."""

RIGHT = "<>>>"


def named(exchange: Exchange, *, numbered: bool = True) -> str:
    """What an exchange is; `numbered`: with its buckets, if it is of some only."""
    route, ranks = exchange.route, ranks_of(exchange)
    if exchange.carried is not None and not any(one.legs for one in exchange.carried):
        return "nothing, as noop gives each rank its own back"
    match route.kind, route.through:
        case "delta", _:
            which = _numbers(exchange) if numbered else ""
            return f"what parameters have changed by, averaged over {ranks}{which}"
        case "parameters", "broadcast":
            return f"the parameters of rank {route.source}, as they are, to {ranks}"
        case "parameters", _:
            return f"the parameters as they are, averaged over {ranks}"
        case "optimizer", _:
            return f"the optimizer's state as it is, averaged over {ranks}"
        case "buffers", "broadcast":
            return f"the buffers of rank {route.source}, to {ranks}"
        case "buffers", _:
            return f"the buffers, averaged over {ranks}"
    return f"the gradients, averaged over {ranks}"


def ranks_of(exchange: Exchange) -> str:
    """Among which ranks it is."""
    return _group(exchange.ranks, exchange.route.among)


def _group(ranks: int, among: Among) -> str:
    if among == "all":
        return {1: "the only rank", 2: "both ranks"}.get(ranks, f"all {ranks} ranks")
    of = {"host": "each host", "across": "one place on every host", "part": "each group"}[among]
    return f"the {count(ranks, 'rank')} of {of}"


def _numbers(exchange: Exchange) -> str:
    if exchange.buckets is None:
        return ""
    first, last = exchange.buckets[0].index, exchange.buckets[-1].index
    return f" (bucket {first})" if first == last else f" (buckets {first} to {last})"


def summed(label: str, amount: Amount | None, steps: int = 1, wanted: int = 1) -> tuple[str, ...]:
    """A row of sizes: of an amount that is sent in so many steps, what that is in those wanted."""
    if amount is None:
        return (label, "unknown", "unknown", "unknown")
    per_rank = amount.all_ranks / len(amount.by_rank)
    return (
        label,
        *(size(sent * wanted / steps) for sent in (per_rank, amount.all_ranks, amount.leaves_hosts)),
    )


def tables(exchanges: Sequence[Exchange], ranks: int) -> Iterator[str]:
    """The buckets of exchanges, and how each travels; those together that travel alike."""
    ways: dict[Any, list[Exchange]] = {}
    for exchange in exchanges:
        if exchange.buckets is None and exchange.route.kind != "gradient":
            kind = {"delta": "changes", "optimizer": "optimizer's state"}.get(
                exchange.route.kind, exchange.route.kind
            )
            yield from told("", f"The size of the {kind} cannot be known, as {exchange.unknown}.")
        elif exchange.route.kind != "buffers" and exchange.buckets is not None:
            ways.setdefault(exchange.route, []).append(exchange)
    for alike in ways.values():
        if len(ways) > 1:
            yield from told("", f"{capital(named(alike[0], numbered=False))}:")
        rows = [row for exchange in alike for row in _rows(exchange, ranks)]
        head = ("bucket", "dtype", "values", "bytes", "sent per rank", "parameters")
        middle = ("…", "", "", "", "", "")
        yield from labelled("", table([head, *thinned(rows, middle)], "><>>><"))
        carried = [one for exchange in alike for one in exchange.carried or ()]
        unknown = next((exchange.unknown for exchange in alike if exchange.unknown), "")
        yield from _legs(carried, unknown)


def _rows(exchange: Exchange, ranks: int) -> Iterator[tuple[str, ...]]:
    layouts: Sequence[BucketLayout] = exchange.buckets or ()
    carried: Sequence[Carried | None] = exchange.carried or [None] * len(layouts)
    for layout, one in zip(layouts, carried, strict=True):
        sent = "unknown" if one is None else size(one.amount.all_ranks / ranks)
        names = ends([param.name for param in layout.params])
        yield str(layout.index), layout.dtype, f"{layout.numel:,}", size(bucket_bytes(layout)), sent, names


def _legs(carried: Sequence[Carried], unknown: str) -> Iterator[str]:
    """How buckets travel, those together that travel alike."""
    if unknown:
        yield from told("", f"How they travel cannot be known, as {unknown}.")
    alike: dict[tuple[tuple[str, str, Among, int], ...], list[Carried]] = {}
    for one in carried:
        alike.setdefault(tuple((leg.op, leg.dtype, leg.among, leg.ranks) for leg in one.legs), []).append(one)
    for ways, buckets in alike.items():
        which = "Each bucket"
        if len(alike) > 1:
            which = f"Bucket {', '.join(str(one.layout.index) for one in buckets)}"
        legs = []
        for place, (op, dtype, among, ranks) in enumerate(ways):
            together = sum(one.legs[place].bytes for one in buckets)
            legs.append(f"{op} of {dtype} among {_group(ranks, among)} ({size(together)})")
        if len(legs) <= 1:
            yield from told("", f"{which}: {legs[0] if legs else 'nothing is sent'}.")
            continue
        yield from told("", f"{which}, one after the other:")
        for leg in legs:
            yield from told("", f"- {leg}")


def thinned(rows: Sequence[Any], middle: Any = "…") -> list[Any]:
    """The first rows and the last ones, if there are many, with `middle` for what is left out."""
    half = _ROWS // 2
    return [*rows] if len(rows) <= _ROWS else [*rows[:half], middle, *rows[-half + 1 :]]
