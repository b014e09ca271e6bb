"""Whether a resumed run reads the data that it has read before: lengths, and digests of a few samples."""

import time
from collections.abc import Mapping
from typing import Any

from ddprun.engine.build import HeldOutData
from ddprun.engine.data import Feed, is_iterable_dataset
from ddprun.engine.feeds import Feeds
from ddprun.engine.samples import digest_samples
from ddprun.engine.seeding import SeparateRng

_SAMPLES = 8  # of a dataset
_LIMIT_S = 1.0  # after which no further sample of a dataset is read
_HELD_OUT = "held-out data"


class DatasetFingerprints:
    """What a checkpoint keeps of each map-style dataset; rank 0 alone reads samples for it, once."""

    def __init__(
        self, feeds: Feeds, held_out: HeldOutData, stage_held_out: Mapping[int, HeldOutData], *, rank: int
    ) -> None:
        self.feeds = feeds.by_name()
        of_stages = {f"{_HELD_OUT} of stages[{index}]": one for index, one in stage_held_out.items()}
        self.sources: dict[str, Feed | HeldOutData] = {**self.feeds, _HELD_OUT: held_out, **of_stages}
        self._by_name = {
            name: fingerprint(one.dataset)
            for name, one in self.sources.items()
            if rank == 0 and one.dataset is not None and not is_iterable_dataset(one.dataset)
        }

    def for_checkpoint(self) -> dict[str, Any]:
        """By dataset: its fingerprint, and whether in mid-epoch (held-out data: of the training data)."""
        in_use = {name for name, feed in self.feeds.items() if feed.mid_epoch}
        in_use |= {_HELD_OUT} if in_use else set()
        return {name: {**found, "mid_epoch": name in in_use} for name, found in self._by_name.items()}

    def find_changes(self, saved: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, bool]]:
        """On rank 0, datasets that are not as in `for_checkpoint`: name, difference, whether in mid-epoch."""
        pairs = [(name, saved[name], now) for name, now in self._by_name.items() if name in saved]
        return [(name, text, was["mid_epoch"]) for name, was, now in pairs if (text := _difference(was, now))]


def fingerprint(dataset: Any) -> dict[str, Any]:
    """The length of a map-style dataset, and digests of samples spread over it; None for one that is unknown.

    Each is read twice under one seed, so that torch, NumPy and `random` draw the same. A dataset that draws
    from elsewhere gives other samples each time: then only the length counts. A sample that cannot be read is
    left to the step that needs it.
    """
    length, digests = len(dataset), list[str | None]()
    until = time.monotonic() + _LIMIT_S
    for index in sorted({number * (length - 1) // (_SAMPLES - 1) for number in range(_SAMPLES)}):
        if not length or (digests and time.monotonic() > until):
            break
        first, again = _digest_sample(dataset, index), _digest_sample(dataset, index)
        if first != again:
            return {"length": length, "digests": []}
        digests.append(first)
    return {"length": length, "digests": digests, "by_value": True}


def _digest_sample(dataset: Any, index: int) -> str | None:
    try:
        with SeparateRng(0)():
            return digest_samples([dataset[index]]).hex()
    except Exception:
        return None


def _difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two fingerprints; empty: nothing that is known."""
    if was["length"] != now["length"]:
        return f"{now['length']} samples here, and {was['length']} in the checkpoint"
    pairs = zip(was["digests"], now["digests"], strict=False)
    # Of an earlier version, digests of images and dataclasses are of their type alone.
    if was.get("by_value") and any(None not in pair and pair[0] != pair[1] for pair in pairs):
        return f"{now['length']} samples, as in the checkpoint, but different ones"
    return ""
