"""The launcher's temporary folder, which goes with the launcher, or with the next one."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_PREFIX, _LOCK = "ddprun-launch-", "lock"


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder, gone afterwards.

    A launcher that is killed has no time to clear up. Its folder is then no longer locked, and the next
    launcher of the same user on the same host removes it.
    """
    clear_up()
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name,
        (Path(name) / _LOCK).open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name)


def clear_up() -> None:
    """Remove the folders of launchers that are no more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or another launcher was faster
            if folder.stat().st_uid == os.geteuid():
                with (folder / _LOCK).open("r+") as lock:
                    if _is_free(lock):
                        shutil.rmtree(folder, ignore_errors=True)


def _is_free(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
