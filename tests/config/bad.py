"""The bad pipelines under `tests/bad`: what each header says."""

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "bad"


@dataclass(frozen=True)
class Bad:
    """A bad pipeline and the faults that must come out of it."""

    path: Path
    expected: tuple[str, ...]
    """`LINE:COLUMN: key.path: message`, or with `--set N:` in front; `[...]` stands for any text."""

    overrides: tuple[str, ...]
    schema_refuses: bool | None
    """Whether the JSON Schema can tell; None where no schema comes to see it: the file is no
    YAML, or the fault is in an override."""


def read(path: Path) -> Bad:
    """Read the comment lines at a file's top."""
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    expected = tuple(line.removeprefix("# expect: ") for line in lines if line.startswith("# expect: "))
    overrides = tuple(line.removeprefix("# set: ") for line in lines if line.startswith("# set: "))
    schema = {"# schema: refuses": True, "# schema: cannot tell": False}
    return Bad(path, expected, overrides, next((schema[line] for line in lines if line in schema), None))


def matches(expected: str, told: str) -> bool:
    """Whether a fault is the expected one."""
    pattern = ".*".join(re.escape(part) for part in expected.split("[...]"))
    return re.fullmatch(pattern, told) is not None


ALL = [read(path) for path in sorted(FOLDER.glob("*.yaml"))]
