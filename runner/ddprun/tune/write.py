"""The winner as a pipeline file: the user's own keys with other values."""

import os
from collections.abc import Sequence
from pathlib import Path

from ddprun.config import LoadedPipeline, load
from ddprun.config.resolved import written_yaml
from ddprun.run_files import replace_atomically


def overrides_without_secrets(loaded: LoadedPipeline) -> list[str]:
    """The `--set` options that are written to a file."""
    return [text for text in loaded.overrides if loaded.secrets.redact(text) == text]


def tuned_text(loaded: LoadedPipeline, overrides: Sequence[str], heading: Sequence[str]) -> str:
    """The keys of the file with these overrides in place of its own; `heading`: comment lines at the top."""
    # A line break of any kind would end the comment.
    lines = (" ".join(loaded.secrets.redact(line).split()) for line in heading)
    head = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return head + written_yaml(load(loaded.path, overrides, loaded.folder).root)


def save(text: str, path: Path, permissions_from: Path) -> None:
    """Write a file whole or not at all; others may read it if they may read `permissions_from`."""
    with replace_atomically(path.parent, path.name) as file:
        os.fchmod(file.fileno(), os.stat(permissions_from).st_mode & 0o666)
        file.write(text.encode())
