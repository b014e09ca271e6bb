"""What signals ask a run for."""

import os
import signal
from types import FrameType

from ddprun import LAUNCHED
from ddprun.host.signals import handle


class StopRequest:
    """Notes SIGINT and SIGTERM, after which all ranks stop after the same step, and SIGUSR1, after which all
    take a checkpoint and go on.

    Under a launcher of ddprun's a wish to stop comes as SIGINT; SIGTERM is how torchelastic ends a rank when
    another one has failed, and is left to do so at once; rank 0 tells its trackers first
    (`tracking.fail_when_ended`).
    """

    def __init__(self) -> None:
        self.wanted = False
        self._checkpoint_wanted = False
        if LAUNCHED in os.environ:
            signal.signal(signal.SIGINT, self._note)
        else:
            for number in (signal.SIGINT, signal.SIGTERM):
                handle(number, self._note)
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, self._note_checkpoint)

    def take_checkpoint_wish(self) -> bool:
        """Whether a checkpoint was asked for since this was asked last."""
        wanted, self._checkpoint_wanted = self._checkpoint_wanted, False
        return wanted

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True

    def _note_checkpoint(self, number: int, frame: FrameType | None) -> None:
        self._checkpoint_wanted = True
