"""What the Tab key completes to in bash, zsh and fish: files, and keys of `--set`.

Click makes the script that a shell reads (`_DDPRUN_COMPLETE=bash_source ddprun`), which asks ddprun itself.
https://click.palletsprojects.com/en/stable/shell-completion/
"""

import click
from click.shell_completion import CompletionItem

from ddprun.config.errors import section_model_of
from ddprun.config.schema import pipeline_with_cluster_keys
from ddprun.plugins import CLUSTERS


def complete_setting(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Keys of a pipeline that begin like `incomplete`, with what follows a key."""
    keys = []
    for name, field in pipeline_with_cluster_keys(CLUSTERS.names()).model_fields.items():
        section = section_model_of(field)
        keys += [name] if section is None else [f"{name}.{key}" for key in section.model_fields]
    return [CompletionItem(f"{key}=") for key in sorted(keys) if key.startswith(incomplete)]
