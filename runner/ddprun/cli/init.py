"""`ddprun init`."""

import os
from pathlib import Path

import click

from ddprun import EXIT_SUCCESS
from ddprun.cli import printing

_STARTER = """\
# A pipeline: what is trained, on what, and how the ranks exchange gradients.
#
#   ddprun {file}                                 run it
#   ddprun check {file} --resolved                show it with every default filled in
#   ddprun {file} --set optimizer.sgd.lr=0.2      try another value without editing
#   ddprun catalog                                everything that can be chosen here
#
# Everything that is chosen is written `name` or `name: {{options}}`.

seed: 0                 # of weights, shuffling and dropout

model:                  # built in: mlp, cnn, transformer; or your own, as package.module.Class
  mlp: {{inputs: 64, hidden: [256, 256], outputs: 10}}

data: digits            # 1,797 handwritten digits of 8x8 pixels, a fifth of them held out

loader: {{batch_size: 32}}    # samples per rank

loss: cross_entropy     # any loss of torch
optimizer:              # any optimizer of torch, with torch's own options
  sgd: {{lr: 0.1, momentum: 0.9}}

hooks: [fp16]           # gradients travel in half precision; [] sends them as they are

stages:                 # done one after the other
  - train: {{epochs: 10}}
  - evaluate: {{metrics: [accuracy]}}
  - save: {{to: model.safetensors}}

launch: {{nproc_per_node: 2}}    # two ranks on this machine
"""


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default="pipeline.yaml")
def init(file: Path) -> int:
    """Write a pipeline to start from (pipeline.yaml, or FILE), which runs as it is."""
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(_STARTER.format(file=os.fsencode(file).decode("utf-8", "replace")))
    except FileExistsError:
        raise click.UsageError(f"{file} already exists; name another file, or remove it") from None
    except OSError as error:
        raise printing.write_error(file, error) from None
    click.echo(f"wrote {file}; run it with `ddprun {file}`")
    return EXIT_SUCCESS
