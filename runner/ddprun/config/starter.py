"""The pipeline that `ddprun init` writes."""

import os
from pathlib import Path

TEXT = """\
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


def write(path: Path) -> None:
    """Write the starter file.

    Raises:
        FileExistsError: the file is there already; it is left as it is.
        OSError: it cannot be written.
    """
    with path.open("x", encoding="utf-8") as file:
        file.write(TEXT.format(file=os.fsencode(path).decode("utf-8", "replace")))
