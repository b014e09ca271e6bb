"""Getting ranks to run: on this host with torchelastic, or as one that a launcher has started."""

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddprun import LAUNCHED
from ddprun.config import Loaded
from ddprun.host.signals import handle
from ddprun.launch import endpoint, environment
from ddprun.launch.launcher import Launcher, LauncherError, recognise
from ddprun.screen import say

if TYPE_CHECKING:
    from ddprun.run_files import Resuming

BAD_INPUT = 2


def start(
    loaded: Loaded,
    flags: Mapping[str, str | bool],
    overrides: Sequence[str],
    run_dir: Path | None,
    *,
    resuming: "Resuming" = "no",
) -> int:
    """Run the pipeline; gives the exit code.

    Args:
        loaded: the checked pipeline.
        flags: torchrun's own flags that were given, such as `nproc_per_node`.
        overrides: the `--set` options, for the ranks.
        run_dir: where the run's files go; None makes a new folder.
        resuming: `run_dir` is the folder of a run that is to go on.

    Raises:
        PipelineError: the pipeline cannot run on this machine.
    """
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        say(
            "ddprun: TORCH_DISTRIBUTED_DEBUG=DETAIL ends every run that uses DDP in a segmentation "
            "fault inside torch; INFO is safe, and OFF is the default"
        )
        return BAD_INPUT
    try:
        launcher = recognise(os.environ, flags)
    except LauncherError as error:
        say(f"ddprun: {error}")
        return BAD_INPUT
    # Torch's C++ side warns about names it cannot look up, stack and all; what matters comes as an error.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if launcher is not None and not launcher.starts_ranks:
        return _join(launcher, loaded, run_dir, resuming=resuming)
    loaded.check_environment()
    # While torch is imported a KeyboardInterrupt can get lost in an extension module, and process 1 of a
    # container has no default for SIGTERM. Nothing is running yet, so ending at once loses nothing;
    # torchelastic puts its own handlers in place of these.
    for number in (signal.SIGINT, signal.SIGTERM):
        handle(number, lambda number, _: os._exit(128 + number))
    from ddprun.launch.local import launch

    if launcher is not None:
        if launcher.first:
            say(f"ddprun: started by {launcher.told}")
        flags = {**launcher.flags, **flags}
    return launch(loaded, flags, overrides, run_dir, resuming=resuming)


def _join(launcher: Launcher, loaded: Loaded, run_dir: Path | None, *, resuming: "Resuming") -> int:
    """Be the rank that a launcher has started this process as."""
    from ddprun.engine.worker import work

    for name, value in launcher.variables.items():
        os.environ.setdefault(name, value)
    if LAUNCHED not in os.environ and launcher.first:
        say(f"ddprun: started by {launcher.told}")
        for told in (endpoint.warning(os.environ["MASTER_ADDR"]), environment.warning()):
            if told is not None:
                say(told)
    return work(loaded, run_dir, resuming=resuming)
