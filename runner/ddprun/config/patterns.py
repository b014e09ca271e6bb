"""What strings may look like, and how a message says so."""

from collections.abc import Mapping
from types import MappingProxyType

NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$"
SAVED = r"^[^\x00-\x1f\x7f]*\.safetensors$"
SLURM_NAME = r"^[A-Za-z0-9_.,:/@+-]+$"
IMAGE = r"^[A-Za-z0-9][A-Za-z0-9_.:/@-]*$"
LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
FOLDER = r"^/[^:\x00-\x1f]+$"
VOLUME = r"^(/[^:\x00-\x1f]+|[A-Za-z0-9][A-Za-z0-9_.-]*)$"
BYTES = r"^[1-9][0-9]*[bkmg]?$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$"

WORDS: Mapping[str, str] = MappingProxyType(
    {
        NAME: 'letters, digits, ".", "_" and "-" only, not "." first',
        SAVED: 'a file name that ends in ".safetensors", without control characters',
        SLURM_NAME: 'letters, digits and "_.,:/@+-" only',
        IMAGE: 'letters, digits and "_.:/@-" only, a letter or a digit first',
        LABEL: 'lower-case letters, digits and "-" only, not "-" first or last',
        VARIABLE: 'letters, digits and "_" only, not a digit first',
        FOLDER: 'a path from "/" on, without ":"',
        VOLUME: 'a volume\'s name, or a path from "/" on',
        BYTES: "a number of bytes, as in 512m or 8g",
        QUANTITY: "a number of bytes, as in 512Mi or 8Gi",
    }
)
"""What is allowed, by pattern."""
