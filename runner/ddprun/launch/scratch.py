"""The launcher's temporary folder, which goes with the launcher, or with the next one."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "ddprun-launch-"


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder, gone afterwards.

    A launcher that is killed has no time to clear up. Its folder is then no longer locked, and the next
    launcher of the same user on the same host removes it.
    """
    clear_up()
    while True:
        with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
            handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # On the folder itself, which is also how one tells cleaners of temporary files to leave it.
                fcntl.flock(handle, fcntl.LOCK_EX)
                if not os.path.isdir(name):  # another launcher was faster, and took it for an old one
                    continue
                yield Path(name)
                return
            finally:
                os.close(handle)


def clear_up() -> None:
    """Remove the folders of launchers that are no more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or another launcher was faster
            if folder.stat().st_uid == os.geteuid():
                handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(handle)
