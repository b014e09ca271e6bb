"""`ddprun observe`: a script that may not be changed, whose first DistributedDataParallel is observed."""

import functools
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ddprun import EXIT_FAILURE, EXIT_SUCCESS
from ddprun.observer.run import observe
from ddprun.standard_streams import say


def run_observed_script(script: Path, arguments: Sequence[str], **options: Any) -> int:
    """Run a script as `python script arguments…` would, with `observe(model, **options)` for its first
    DistributedDataParallel; gives the exit code. The constructor of that class is replaced in this process,
    until it has been called.
    """
    construct: Any = DistributedDataParallel.__init__

    @functools.wraps(construct)
    def construct_and_observe(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        construct(model, *args, **kwargs)
        setattr(DistributedDataParallel, "__init__", construct)  # noqa: B010
        observe(model, **options)

    setattr(DistributedDataParallel, "__init__", construct_and_observe)  # noqa: B010
    sys.argv[:] = [str(script), *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except KeyboardInterrupt as error:
        sys.last_value = error
        raise
    except Exception as error:
        sys.last_value = error  # as the interpreter does when nobody catches an exception
        sys.excepthook(type(error), error, error.__traceback__)
        return EXIT_FAILURE
    if DistributedDataParallel.__init__ is construct_and_observe:
        say(f"{script} made no DistributedDataParallel, so nothing was observed")
    return EXIT_SUCCESS
