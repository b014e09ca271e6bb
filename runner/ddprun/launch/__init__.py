"""Getting ranks to run: on this host with torchelastic, or as one that a launcher has started."""

import gc
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ddprun import EXIT_BAD_INPUT, EXIT_FAILURE, LAUNCHED_BY_DDPRUN_VARIABLE
from ddprun.config import LoadedPipeline
from ddprun.host.code_folders import UnsafeFolderError, private_code_caches
from ddprun.host.network import public_address_warning, resolve_addresses
from ddprun.host.processes import (
    file_limit_hint,
    force_exit_after_delay,
    hard_exit_on_signals,
    raise_file_limit,
)
from ddprun.host.rank_files import temporary_launcher_folder
from ddprun.launch.fork_server import ForkServer
from ddprun.launch.launcher import Flags, Launcher, detect_launcher
from ddprun.standard_streams import say

if TYPE_CHECKING:
    from ddprun.run_files import ResumeMode


def start(loaded: LoadedPipeline, flags: Flags, run_dir: Path | None, *, resuming: "ResumeMode") -> int:
    """Run the checked pipeline, with those of torchrun's flags that were given; gives the exit code.

    `run_dir`: where the run's files go, or what is resumed; None makes a new folder. Raises PipelineError if
    the pipeline cannot run on this machine, LauncherError, UnsafeFolderError.
    """
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        say(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL makes every run that uses DDP end in a segmentation "
            "fault inside torch; INFO is safe, and OFF is the default"
        )
        return EXIT_BAD_INPUT
    launcher = detect_launcher(os.environ, flags)
    raise_file_limit()
    # Torch's C++ side warns about names it cannot look up, stack and all; what matters comes as an error.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if launcher is not None and not launcher.starts_ranks:  # this process is a rank
        with ExitStack() as stack:
            if LAUNCHED_BY_DDPRUN_VARIABLE not in os.environ:
                try:
                    stack.enter_context(private_code_caches(stack.enter_context(temporary_launcher_folder())))
                except (UnsafeFolderError, OSError) as error:
                    if os.environ.get("LOCAL_RANK", "0") == "0":
                        say(error)
                    return EXIT_BAD_INPUT
            code = _run_as_rank(loaded, launcher, run_dir, resuming)
        force_exit_after_delay(code, int(os.environ["RANK"]), loaded.secrets.redact)
        return code
    loaded.check_environment()
    # What the ranks inherit.
    os.environ[LAUNCHED_BY_DDPRUN_VARIABLE] = "1"
    os.environ["PYTHONSAFEPATH"] = "1"  # as `python -P`: the working directory shadows no package
    # As torchrun sets it, for one rank too: the same number of threads gives the same bits.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        with ExitStack() as stack:
            folder = stack.enter_context(temporary_launcher_folder())
            stack.enter_context(private_code_caches(folder))
            server, preload = None, loaded.pipeline.launch.preload
            if preload is not None:
                with suppress(OSError):  # too many processes: torchelastic fails, too, and says so
                    # Before torch is imported here.
                    server = ForkServer(preload, loaded.folder, loaded.secrets.redact)
                    stack.callback(server.close)
            # While torch is imported a KeyboardInterrupt can get lost in an extension module, and process 1
            # of a container has no default for SIGTERM and SIGHUP. Nothing is running yet, so ending at once
            # loses nothing; torchelastic puts its own handlers in place of these.
            hard_exit_on_signals(folder)
            from ddprun.launch.host_ranks import launch_host_ranks

            if launcher is not None:
                if launcher.is_first:
                    say(f"started by {launcher.summary}")
                    least, most = loaded.pipeline.launch.host_range
                    if least < most and "nnodes" in launcher.flags.keys() - flags.keys():
                        say("warning: launch.nnodes is a range, but hosts cannot leave or join a Slurm step")
                flags = {**launcher.flags, **flags}
            return launch_host_ranks(loaded, flags, run_dir, folder, server, resuming=resuming)
    except OSError as error:
        say(loaded.secrets.redact(f"cannot start the ranks: {error}{file_limit_hint(error)}"))
        return EXIT_FAILURE


def _run_as_rank(
    loaded: LoadedPipeline, launcher: Launcher, run_dir: Path | None, resuming: "ResumeMode"
) -> int:
    gc.disable()  # collecting what an import leaves takes a fifth of its time; `run_worker` enables it again
    from ddprun.engine.worker import run_worker

    for name, value in launcher.variables.items():
        os.environ.setdefault(name, value)
    address = os.environ["MASTER_ADDR"]
    if LAUNCHED_BY_DDPRUN_VARIABLE not in os.environ and launcher.is_first:
        say(f"started by {launcher.summary}")
        if warning := public_address_warning(address):
            say(warning)
    if os.environ.get("LOCAL_RANK", "0") == "0" and not resolve_addresses(address):
        # In Kubernetes a name may be known only later: torch asks again and again.
        say(
            f"warning: this host cannot resolve MASTER_ADDR={address}; trying for "
            f"{loaded.pipeline.launch.timeout_s:g} s (launch.timeout_s): check the name, or write an address"
        )
    return run_worker(loaded, run_dir, resuming=resuming)
