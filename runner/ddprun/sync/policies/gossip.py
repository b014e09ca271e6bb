"""Gossip: pairs of ranks average their parameters."""

import random

from ddprun.options import NonNegativeInt, PositiveInt
from ddprun.sync.plan import Partition, StageFacts, SyncPlan, SyncPolicy, Transfer

_PAIRING_COUNT = 8  # drawn pairings, one after the other; then they begin again


class Gossip(SyncPolicy):
    """Every n-th step each rank averages its parameters with one other rank, drawn at random (the pairs of
    NoLoCo, arXiv:2506.10911); ranks become equal at the stage's end.
    """

    every: PositiveInt
    """Steps from one average to the next."""

    seed: NonNegativeInt = 0
    """Draws the pairs."""

    def plan(self, stage: StageFacts) -> SyncPlan:
        cycle = _PAIRING_COUNT * self.every
        rounds = []
        for number in range(1, _PAIRING_COUNT + 1):
            phase, pairs = number * self.every % cycle, _draw_pairing(number, self.seed)
            rounds.append(Transfer("parameters", cycle, phase=phase, among=pairs))
        return SyncPlan(transfers=(*rounds, Transfer("parameters", every=0)))


def _draw_pairing(number: int, seed: int) -> Partition:
    def groups(ranks: int) -> list[list[int]]:
        drawn = list(range(ranks))
        random.Random(f"{seed} {number}").shuffle(drawn)
        return [drawn[start : start + 2] for start in range(0, ranks, 2)]  # of an odd number, one stays alone

    return Partition(f"pairing {number} of seed {seed}", groups)
