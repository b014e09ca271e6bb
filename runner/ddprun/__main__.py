"""`python -m ddprun`, also as `torchrun -m ddprun`.

Python puts the working directory first on the path for `-m`, where a `yaml.py` or a folder `hooks` of the
user's would shadow what is installed. It is taken off before anything else is imported.
"""

import os
import sys


def _is_working_directory(entry: str) -> bool:
    try:
        return os.path.samefile(entry or os.curdir, os.curdir)
    except OSError:  # the working directory is gone, or the entry is no folder
        return entry == ""


if not sys.flags.safe_path and sys.path and _is_working_directory(sys.path[0]):
    del sys.path[0]

if __name__ == "__main__":
    from ddprun import exit_unless_linux

    exit_unless_linux()
    from ddprun.host.processes import die_with_launcher

    die_with_launcher()
    from ddprun.cli import main

    sys.exit(main())
