"""Secrets: how a pipeline names them, `${env:NAME}`, and how their values are kept out of what is written.

A value is secret by its *name*: an option or environment variable with one of a few words in it, on strings
only, so that `key_dim: 64` and `monkey: banana` stay. So is the password in a URL, and whatever a pipeline
takes from the environment.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from ddprun.spec.tree import KeyPath, is_choice

REDACTED = "[redacted]"
"""Stands in a written pipeline for a secret that the file held as it is; such a pipeline does not load."""

REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_BEGINS = "${env:"

_SECRET_WORDS = frozenset(
    {
        *(
            "token",
            "secret",
            "secrets",
            "password",
            "passwd",
            "passphrase",
            "key",
            "credential",
            "credentials",
        ),
        *("apikey", "accesskey", "secretkey", "authtoken", "pgpassword"),
    }
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

_WHOLE_WORDS_FROM, _ANYWHERE_FROM = 4, 8
"""Values of fewer characters than the second are replaced as whole words only, of fewer than the first not at
all: `1` or `on` would be replaced in every other message."""

_USER = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,20}://)(?P<user>[^\s/?#\"'<>]+)@")
_QUERY = re.compile(r"(?P<before>[?&](?P<name>[\w.-]+)=)(?P<value>[^&\s\"'<>#]+)")
_LONG_USER = 20
"""A user name of so many characters in a URL is a token: `https://ghp_…@github.com`."""

_LINE = re.compile(
    r"""(?P<before>(?<![\w.-])(?P<name>[A-Za-z_][\w.-]*)["']?\s*:\s*)(?P<value>"[^"]*"?|'[^']*'?|[^\s,\[{}\]#][^,}\]#]*)"""
)
_OVERRIDE = re.compile(r"(?P<before>\A(?P<name>[^=]*)=)(?P<value>.*)", re.DOTALL)
_PLAIN_VALUE = re.compile(r"[-+0-9.eExXo_]+|true|false|null|~|", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether one of the name's words says that its value is a secret: `API_KEY`, `apiKey`, `hf-token`."""
    return any(word.lower() in _SECRET_WORDS for word in _WORD.findall(name))


def references(text: str) -> Iterator[str]:
    """The variables that a string names."""
    return (match[1] for match in REFERENCE.finditer(text))


def fault_of(text: str) -> tuple[str, str] | None:
    """What is wrong with a string of a pipeline, and what to write instead; None if nothing is."""
    if REDACTED in text:
        what = "a secret stood here, which is not written to files"
        return what, "write ${env:NAME} and set the variable, or give the value by --set"
    if text.count(_BEGINS) > len(REFERENCE.findall(text)):
        what = '"${env:" is not followed by a variable\'s name and "}"'
        return what, "write ${env:NAME}; a name holds letters, digits and _"
    return None


def filled(text: str, environment: Mapping[str, str]) -> str:
    """The string with each `${env:NAME}` replaced.

    Raises:
        KeyError: a variable that is not set; `args[0]` is its name.
    """
    return REFERENCE.sub(lambda match: environment[match[1]], text)


class Secrets:
    """Values that must not be written, each with what is written in its place.

    Args:
        known: by value.
    """

    def __init__(self, known: Mapping[str, str]) -> None:
        self._instead: dict[str, str] = {}
        for value, instead in known.items():
            for form in _forms(value):
                self._instead.setdefault(form, instead)
        longest_first = sorted(self._instead, key=len, reverse=True)
        anywhere = [re.escape(form) for form in longest_first if len(form) >= _ANYWHERE_FROM]
        words = [rf"(?<!\w){re.escape(form)}(?!\w)" for form in longest_first if len(form) < _ANYWHERE_FROM]
        self._anywhere = re.compile("|".join(anywhere)) if anywhere else None
        self._all = re.compile("|".join([*anywhere, *words])) if anywhere or words else None

    @classmethod
    def of(
        cls, strings: Iterable[tuple[str, bool]] = (), environment: Mapping[str, str] | None = None
    ) -> "Secrets":
        """The secrets of the environment and of a pipeline.

        Args:
            strings: each string of the pipeline, and whether a name above it says that it is a secret.
            environment: by default that of the process.
        """
        environment = os.environ if environment is None else environment
        known: dict[str, str] = {}
        for name, value in environment.items():
            known |= dict.fromkeys(_in_urls(value), REDACTED)
            # A variable that says where a key lies is no key, and the path may stand in every message.
            if is_secret_name(name) and not (os.path.isabs(value) and os.path.exists(value)):
                known[value] = f"${{env:{name}}}"
        for text, secret in strings:
            for name in references(text):
                value = environment.get(name, "")
                if is_secret_name(name) or len(value) >= _ANYWHERE_FROM:
                    known[value] = f"${{env:{name}}}"
            for value in (text,) if secret else _in_urls(text):
                if _BEGINS not in value:
                    known.setdefault(value, REDACTED)
        known.pop(REDACTED, None)
        return cls(known)

    def redact(self, text: str) -> str:
        """A text with every known secret, and every password in a URL, replaced."""
        return _without_passwords(self._replaced(text, self._all))

    def redact_line(self, line: str, *, override: bool = False) -> str:
        """The same for a line of a file or for a `--set`, which may be too broken to know its values."""
        return self.redact((_OVERRIDE if override else _LINE).sub(_without_value, line))

    def redact_all(self, value: Any) -> Any:
        """Plain data with every string in it redacted."""
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, dict):
            return {key: self.redact_all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.redact_all(item) for item in value]
        return value

    def hidden(self, data: Any, path: KeyPath = (), *, secret: bool = False) -> Any:
        """A pipeline's plain data as it may be written. What came by `${env:NAME}` still says so.

        Args:
            data: as `resolved.plain` gives it.
            path: where it stands.
            secret: a name above it says that it is a secret.
        """
        if isinstance(data, dict):
            return {
                key: self.hidden(item, (*path, key), secret=secret or names_secret(path, key, item))
                for key, item in data.items()
            }
        if isinstance(data, list):
            return [self.hidden(item, (*path, place), secret=secret) for place, item in enumerate(data)]
        if not isinstance(data, str) or not data:
            return data
        if secret and _BEGINS not in data:
            return REDACTED
        return _without_passwords(self._replaced(data, self._anywhere))

    def _replaced(self, text: str, pattern: re.Pattern[str] | None) -> str:
        return pattern.sub(lambda match: self._instead[match[0]], text) if pattern else text


def names_secret(path: KeyPath, key: str, value: Any) -> bool:
    """Whether a key says that what stands below it is secret.

    A choice's name says nothing of its options; pods name secrets without holding them, and have other keys:
    `tolerations: [{key: gpu}]`.
    """
    if tuple(path[:2]) == ("kubernetes", "pod"):
        return False
    return is_secret_name(key) and not (is_choice(path) and not isinstance(value, str | list))


def _forms(value: str) -> Iterator[str]:
    """A value as messages may show it: itself, escaped, in a URL, line by line."""
    lines = [line.strip() for line in value.splitlines()]
    long_lines = [line for line in lines if len(line) >= _ANYWHERE_FROM] if len(lines) > 1 else []
    for text in (value, value.strip(), *long_lines):
        escaped = repr(text)[1:-1], json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]
        for form in (text, *escaped, *(quote(text, safe, errors="replace") for safe in ("/", ""))):
            if len(form) >= _WHOLE_WORDS_FROM:
                yield form


def _in_urls(text: str) -> Iterator[str]:
    """Passwords in URLs, and values of secret names in their queries."""
    if "://" not in text:
        return
    for match in _USER.finditer(text):
        user, colon, password = match["user"].partition(":")
        if colon and password:
            yield password
            yield unquote(password)
        elif not colon and len(user) >= _LONG_USER:
            yield user
    for match in _QUERY.finditer(text):
        if is_secret_name(match["name"]):
            yield match["value"]
            yield unquote(match["value"])


def _without_passwords(text: str) -> str:
    if "://" not in text:
        return text
    text = _USER.sub(_without_user, text)
    return _QUERY.sub(_without_value, text)


def _without_user(match: re.Match[str]) -> str:
    user = match["user"]
    if _BEGINS in user or (":" not in user and len(user) < _LONG_USER):
        return match[0]
    return f"{match['scheme']}{REDACTED}@"


def _without_value(match: re.Match[str]) -> str:
    value = match["value"].strip()
    if not is_secret_name(match["name"]) or _BEGINS in value or _PLAIN_VALUE.fullmatch(value):
        return match[0]
    return match["before"] + REDACTED
