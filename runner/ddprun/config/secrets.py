"""Secrets: a pipeline takes them from the environment, `${env:NAME}`, and nothing writes their values.

What ddprun writes says `${env:NAME}` wherever the exact value of a variable stands that the file takes. A
literal secret is an error, by the name of its key. Passwords in URLs are masked, whoever wrote them.
"""

import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddprun.config.faults import PipelineFault
from ddprun.config.tree import KeyPath, map_strings
from ddprun_hooks.config.trust import TRUST_VARIABLE

# While `DDPRUN_TRUSTED` is set, the only variables that a pipeline may take.
ALLOWED_ENV_VARIABLE = "DDPRUN_ENV"
_LOCAL_MLFLOW_STORE = re.compile(r"file:|sqlite:|[^:$]+\$")
"""A store of MLflow's in a file or folder; a variable that begins a URI says itself where the store is."""

REDACTED = "[redacted]"  # written instead of the password in a URL; a pipeline with it does not load
MIN_SECRET_LENGTH = 8  # characters: shorter values stand in too many words to be replaced

ENV_REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_ENV_PREFIX = "${env:"

_SECRET_NAME = (
    r"(?!(?:bos|eos|unk|sep|pad|cls|mask)_token)"  # special tokens of a tokenizer
    r"[\w.-]*(?:token|secret|password|passwd|passphrase|credentials?|(?:api|access)[_-]?key)"
)
_SECRET = re.compile(_SECRET_NAME, re.IGNORECASE)
_URL_PASSWORD = re.compile(
    r"(?P<before>[A-Za-z][A-Za-z0-9+.-]{0,20}://(?:\$\{env:\w+\}|[^\s/?#\"'<>:@]){0,200}:)"
    r"(?P<value>[^\s/?#\"'<>]{1,500})(?=@)"
)
_URL_QUERY = re.compile(rf"(?P<before>[?&]{_SECRET_NAME}=)(?P<value>[^&\s\"'<>#]+)", re.IGNORECASE)
_KEY_AND_VALUE = re.compile(
    rf"""(?P<before>(?<![\w.-]){_SECRET_NAME}["']?\s*[:=]\s*)"""
    r"""(?P<value>"[^"]*"?|'[^']*'?|\[[^\]]*|[^\s"'\[{][^,}\]]*)""",
    re.IGNORECASE,
)  # in a line that may be no YAML: a key with a secret's name, and its value


def is_secret_name(name: str) -> bool:
    """Whether a name ends in token, secret, password or the like; a tokenizer's `pad_token` does not."""
    return _SECRET.fullmatch(name) is not None


def referenced_variables(text: str) -> Iterator[str]:
    """The variables that a string names."""
    return (match[1] for match in ENV_REFERENCE.finditer(text))


def fill_references(text: str, environment: Mapping[str, str]) -> str:
    """The string with each `${env:NAME}` replaced; raises KeyError with the name of one that is not set."""
    return ENV_REFERENCE.sub(lambda match: environment[match[1]], text)


@dataclass(frozen=True)
class PipelineString:
    """A string of a pipeline, or a key."""

    path: KeyPath
    text: str
    is_key: bool = False

    @property
    def has_secret_key_name(self) -> bool:
        """Whether it is the value of a key with a secret's name, or one of a list of them."""
        keys = (step for step in reversed(self.path) if isinstance(step, str))
        return not self.is_key and is_secret_name(next(keys, ""))

    @property
    def is_literal_secret(self) -> bool:
        taken = _ENV_PREFIX in self.text
        return self.has_secret_key_name and len(self.text) >= MIN_SECRET_LENGTH and not taken


_POD_SECRET_HINT = "put it into the Secret that kubernetes.env_from names"


def secret_or_reference_problem(found: PipelineString) -> tuple[str, str] | None:
    """What is wrong with a string or key, and what to write instead; None: nothing is."""
    text = found.text
    if found.is_key and _ENV_PREFIX in text:
        return "${env:NAME} is not filled in for keys", "write the key itself"
    # Kubernetes starts a pod with these as they are: ddprun, which fills in references, comes later.
    of_pods = found.path[:2] == ("kubernetes", "env")
    if of_pods and _ENV_PREFIX in text:
        return "${env:NAME} is not filled in for pods", _POD_SECRET_HINT
    if found.is_literal_secret:
        hint = _POD_SECRET_HINT if of_pods else "write ${env:NAME} and set the variable"
        return "a secret in plain text", hint
    if REDACTED in text:
        return "the password that was here is not written to files", "write ${env:NAME} and set the variable"
    if text.count(_ENV_PREFIX) > len(ENV_REFERENCE.findall(text)):
        what = '"${env:" is not followed by a variable\'s name and "}"'
        return what, "write ${env:NAME}; a name holds letters, digits and _"
    if _ENV_PREFIX in text and _is_output_path(found.path, text):
        return "${env:NAME} is not filled in for the name of a file that is written", "write the name itself"
    for name in referenced_variables(text):
        if is_secret_name(name) and not found.has_secret_key_name:
            problem = f"{name} has the name of a secret, so only an option with such a name may hold it"
            return problem, "such as password or api_token"
        allowed = [one.strip() for one in os.environ.get(ALLOWED_ENV_VARIABLE, "").split(",")]
        if TRUST_VARIABLE in os.environ and name not in allowed:
            problem = f"{name} is not filled in: {TRUST_VARIABLE} is set, and {ALLOWED_ENV_VARIABLE} lacks it"
            names = ",".join([*filter(None, allowed), name])
            return problem, f"if the pipeline may have its value, set {ALLOWED_ENV_VARIABLE}={names}"
    return None


def _is_output_path(path: KeyPath, text: str) -> bool:
    """Whether a string names a file or folder that a run writes; all others are fixed names in its folder."""
    in_store = path[-2:] == ("mlflow", "tracking_uri") and _LOCAL_MLFLOW_STORE.match(text) is not None
    return in_store or path[-2:] == ("save", "to")


class Secrets:
    """Values that must not be written, each with what is written in its place."""

    def __init__(self, known: Mapping[str, str] | None = None) -> None:
        self._known = {
            value: name for value, name in (known or {}).items() if len(value) >= MIN_SECRET_LENGTH
        }
        longest_first = sorted(self._known, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if self._known else None

    @classmethod
    def collect(cls, pipeline: Iterable[PipelineString]) -> "Secrets":
        """The values of the variables that a pipeline takes, and what it holds in plain text."""
        known: dict[str, str] = {}
        for found in pipeline:
            if found.is_literal_secret:
                known[found.text] = REDACTED
            for name in referenced_variables(found.text):
                known[os.environ.get(name, "")] = f"${{env:{name}}}"
        return cls(known)

    def redact(self, text: str) -> str:
        """A text with every known secret, and every password in a URL, replaced."""
        if self._pattern is not None:
            text = self._pattern.sub(lambda match: self._known[match[0]], text)
        return _URL_QUERY.sub(_mask_match, _URL_PASSWORD.sub(_mask_match, text)) if "://" in text else text

    def redact_line(self, line: str) -> str:
        """As `redact`, for a line that may be no YAML; values of keys with a secret's name are masked."""
        return self.redact(_KEY_AND_VALUE.sub(_mask_match, line))

    def redact_faults(self, faults: Iterable[PipelineFault]) -> list[PipelineFault]:
        # Cached: many faults quote the same line.
        redact, redact_line = functools.cache(self.redact), functools.cache(self.redact_line)
        return [fault.redacted(redact, redact_line) for fault in faults]

    def redact_all(self, value: Any) -> Any:
        """Plain data with every string in it redacted; keys stay."""
        return map_strings(value, lambda _, text: self.redact(text))


def _mask_match(match: re.Match[str]) -> str:
    """What stands before the value of a `_URL_PASSWORD` or the like; `${env:NAME}` may stay."""
    return match[0] if _ENV_PREFIX in match["value"] else match["before"] + REDACTED


def pipeline_strings(data: Any, path: KeyPath = ()) -> Iterator[PipelineString]:
    """Every string and every key of a pipeline's plain data."""
    if isinstance(data, str):
        yield PipelineString(path, data)
    elif isinstance(data, list):
        for index, item in enumerate(data):
            yield from pipeline_strings(item, (*path, index))
    elif isinstance(data, dict):
        for key, item in data.items():
            yield PipelineString((*path, key), key, is_key=True)
            yield from pipeline_strings(item, (*path, key))
