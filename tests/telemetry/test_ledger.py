"""When ranks hear what they have told each other."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddprun.telemetry.clock import clock_for
from ddprun.telemetry.ledger import Ledger
from ddprun.telemetry.writer import Writer
from ddprun_hooks.exchange import Control


@pytest.mark.parametrize("patience", [1, 3])
def test_a_control_word_is_read_so_many_steps_after_its_own(tmp_path: Path, patience: int) -> None:
    """Neither sooner nor later, whether it has come or not; what is left comes at the stage's end. A step in
    which ranks do not meet has none.
    """
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    writer = Writer(tmp_path)
    ledger = Ledger(
        clock=clock_for(torch.device("cpu")), control=Control(group, 0, 1), writer=writer, every=1
    )
    ledger.patience = patience
    heard = {}
    for step in range(1, 9):
        ledger.start(step, 0)
        ledger.note_loss(torch.tensor(float(step)), 1)
        for agreed in ledger.end(stop=False, compare_clocks=False, synchronised=step % 2 == 0):
            heard[agreed.step] = step
    assert heard == {met: met + patience for met in (2, 4, 6, 8) if met + patience <= 8}
    left = [agreed.step for agreed in ledger.flush()]
    assert [*heard, *left] == [2, 4, 6, 8]
    writer.close()
