"""What the Tab key completes to in bash, zsh and fish: pipeline files, and keys of `--set`.

Click makes the script that a shell reads (`_DDPRUN_COMPLETE=bash_source ddprun`), which asks ddprun itself.
https://click.palletsprojects.com/en/stable/shell-completion/
"""

from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from ddprun.config.errors import section_model_of
from ddprun.config.schema import pipeline_with_cluster_keys
from ddprun.plugins import CLUSTERS

SUFFIXES = (".yaml", ".yml")


@add_completion_class
class _Bash(BashComplete):
    """Offers folders beside the files, and no space after a key of `--set`."""

    name = "bash"
    source_template = BashComplete.source_template.replace(
        "compopt -o dirnames", "compopt -o filenames -o plusdirs"
    ).replace("    return 0\n", "    [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace\n    return 0\n")


class PipelineFile(click.Path):
    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Files that end in .yaml, and folders that may hold some."""
        return complete_pipeline_file(incomplete)


def complete_pipeline_file(incomplete: str) -> list[CompletionItem]:
    """Files that end in .yaml and begin like `incomplete`; folders are the shell's to find."""
    head, slash, rest = incomplete.rpartition("/")
    try:
        found = sorted(entry.name for entry in Path(head + slash or ".").iterdir())
    except OSError:
        found = []
    files = [name for name in found if name.startswith(rest) and Path(name).suffix in SUFFIXES]
    return [CompletionItem(incomplete, type="dir"), *(CompletionItem(head + slash + name) for name in files)]


def complete_setting(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Keys of a pipeline that begin like `incomplete`, with what follows a key."""
    keys = []
    for name, field in pipeline_with_cluster_keys(CLUSTERS.names()).model_fields.items():
        section = section_model_of(field)
        keys += [name] if section is None else [f"{name}.{key}" for key in section.model_fields]
    return [CompletionItem(f"{key}=") for key in sorted(keys) if key.startswith(incomplete)]
