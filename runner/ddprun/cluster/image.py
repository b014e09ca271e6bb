"""What backends share that run ddprun's image in containers."""

from typing import Annotated

from pydantic import Field

from ddprun.cluster.cluster import Submission
from ddprun.options import matching

PORT = 29400
"""Of the rendezvous of a job's hosts, on a network of its own: torchelastic's own default."""

RUNS = "/workspace/runs"
"""The image's folder for what runs leave."""

USER = 1000
"""The image's user."""

Image = Annotated[
    str,
    Field(max_length=300),
    matching(
        r"^[A-Za-z0-9][A-Za-z0-9_.:/@-]*$", 'letters, digits and "_.:/@-" only, a letter or a digit first'
    ),
]
Folder = Annotated[
    str, Field(max_length=1000), matching(r"^/[^:\x00-\x1f]+$", 'a path from "/" on, without ":"')
]


def arguments(submission: Submission, job: str, file: str, hosts: int, first: str) -> list[str]:
    """Ddprun's arguments in each container of a job; `first` is the name of the first one's host."""
    run_dir = f"{RUNS}/{submission.loaded.pipeline.name}/{job}"
    return submission.arguments(file, run_dir, hosts=hosts, endpoint=f"{first}:{PORT}", job=job)
