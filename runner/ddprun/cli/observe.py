"""`ddprun observe`."""

import os
from pathlib import Path
from typing import Any

import click

from ddprun.cli.run import FiniteRange

_MAX_TIMEOUT_S = 366 * 86_400


@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
@click.option(
    "--hooks", metavar="HOOKS", default="[]", help="A list as in a pipeline, such as [fp16]; by default none."
)
@click.option("--run-dir", type=click.Path(file_okay=False, path_type=Path), help="Folder for the records.")
@click.option(
    "--timeout-s",
    type=FiniteRange(min=0, min_open=True, max=_MAX_TIMEOUT_S),
    help="Seconds that a collective may take before a hang is reported; by default the script's own limit.",
)
@click.option(
    "--track", metavar="TRACK", default="[]", help="A list as in a pipeline, such as [tensorboard]."
)
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module's name, as for `python -m`.")
@click.argument("script")
@click.argument("arguments", metavar="[ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
def observe(
    hooks: str,
    run_dir: Path | None,
    timeout_s: float | None,
    track: str,
    is_module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Run your own training script under torchrun, and record its steps like those of a pipeline.

    `torchrun --nproc-per-node 2 -m ddprun observe train.py --lr 0.1` does for train.py what a call of
    `ddprun.observe` in it would do, for the first DistributedDataParallel and GradScaler that it makes. The
    constructors of these classes are replaced in this process until then; nothing else is. The exit code is
    the script's.
    """
    if not is_module and not os.path.isfile(script):
        raise click.BadParameter(f"there is no file {script!r}", param_hint="SCRIPT")
    from ddprun.config import load_trackers
    from ddprun.config.faults import PipelineError, Source
    from ddprun.config.yaml_reader import parse_yaml
    from ddprun.observer.run import run_observed_script
    from ddprun_hooks.errors import HookSetupError
    from ddprun_hooks.registry import make_stack

    found, faults = parse_yaml(hooks, Source.from_text("--hooks", 1, hooks))
    if faults:
        raise PipelineError(faults)
    chosen: Any = [] if found is None else found.data()
    try:
        make_stack(chosen)
    except HookSetupError as error:
        raise click.BadParameter(str(error), param_hint="--hooks") from None
    trackers, _ = load_trackers(track, "--track")
    options: dict[str, Any] = {"hooks": chosen, "track": trackers.root.data()["track"]}
    return run_observed_script(script, is_module, arguments, run_dir=run_dir, timeout_s=timeout_s, **options)
