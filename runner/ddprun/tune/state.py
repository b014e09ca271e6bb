"""What a search has measured so far, on disk: the same command continues after Ctrl-C.

`state.json` names the short runs that came to their ends; what came out is read from their own folders, as
any run's is. Nothing in the file is believed: it is checked against this model, and a candidate that it names
counts only if it changes nothing but what a search changes, and `ddprun check` accepts it.
"""

import json
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field

from ddprun.options import Options
from ddprun.run_files import describe_invalid, names_in, read_json_object, replace_atomically

FILE = "state.json"
_MAX_STATE_BYTES = 1 << 20
_MAX_FOLDERS = 1000  # that are looked at, the newest


class Round(BaseModel):
    """Runs that took turns: the file as it is, its twin, and candidates."""

    model_config = Options.model_config

    folder: Annotated[str, Field(pattern=r"^round-[0-9]{1,3}$")]
    # The changes of each.
    candidates: Annotated[tuple[dict[str, Any], ...], Field(strict=False, min_length=1, max_length=64)]

    codes: Annotated[tuple[int, ...], Field(strict=False)]  # exit codes: of the file, its twin, candidates
    turn_steps: Annotated[int, Field(ge=1)]
    steps: Annotated[int, Field(ge=1)]  # of each run


class State(BaseModel):
    """A search so far."""

    model_config = Options.model_config

    v: Literal[1] = 1
    inputs: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # SHA-256 of all that decides what is measured
    spent_s: Annotated[float, Field(ge=0)] = 0.0
    costs: Annotated[str, Field(pattern=r"^costs-[0-9]{1,3}$")] | None = None  # the run that gave the costs
    started_s: Annotated[float, Field(ge=0)] = 0.0  # how long one run takes to start here
    rounds: Annotated[tuple[Round, ...], Field(strict=False, max_length=100)] = ()
    finished: bool = False

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the state from a search's folder; raises OSError, or ValueError (`describe_invalid`)."""
        return cls.model_validate(read_json_object(folder, FILE, _MAX_STATE_BYTES))

    def write(self, folder: Path) -> None:
        """Put it in a search's folder, whole or not at all; raises OSError."""
        with replace_atomically(folder, FILE) as file:
            file.write(json.dumps(self.model_dump(mode="json"), indent=1).encode() + b"\n")


def resume_or_create_search(
    runs: Path, name: str, inputs: str, say: Callable[[str], None]
) -> tuple[Path, State]:
    """The folder of the newest unfinished search with these inputs for the pipeline `name`, or a new one;
    `say` takes a line about each folder that cannot be read.
    """
    names = [one for one in names_in(runs) if one.startswith(f"{name}-")] if runs.exists() else []
    for folder in (runs / one for one in reversed(names[-_MAX_FOLDERS:])):
        if not folder.is_dir() or folder.is_symlink():
            continue
        try:
            state = State.read(folder)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            say(f"{folder} is skipped: its {FILE} cannot be used: {describe_invalid(error)}")
            continue
        if state.inputs == inputs and not state.finished:
            return folder, state
    folder = runs / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists():
        folder = next_numbered_folder(runs, folder.name)
    folder.mkdir(parents=True)
    state = State(inputs=inputs)
    state.write(folder)
    return folder, state


def next_numbered_folder(parent: Path, name: str) -> Path:
    """The first of `costs-0`, `costs-1` … that does not exist: what an interrupted run left is kept."""
    folders = (parent / f"{name}-{number}" for number in count())
    return next(folder for folder in folders if not folder.exists())
