"""Secrets: how a pipeline names them, `${env:NAME}`, and how their values are kept out of what is written.

A value is secret by its *name*: an option or environment variable with one of a few words in it, on strings
only, so that `key_dim: 64` and `monkey: banana` stay. So is the password in a URL, and whatever a pipeline
takes from the environment.
"""

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, get_origin
from urllib.parse import quote, unquote

from pydantic import BaseModel

from ddprun.config.faults import Fault
from ddprun.config.tree import KeyPath, is_choice_path
from ddprun.plugins import CLUSTERS
from ddprun_hooks.config.trust import TRUST_VARIABLE, TrustSettingError
from ddprun_hooks.errors import DottedNameError

FILLED_VARIABLE = "DDPRUN_ENV"
"""Environment variable: while `DDPRUN_TRUSTED` is set, the only variables that a pipeline may take."""

_LOCAL_STORE = re.compile(r"file:|sqlite:|[^:$]+\$")
"""A store of MLflow's in a file or folder; a variable that begins a URI says itself where the store is."""

REDACTED = "[redacted]"
"""Written instead of a secret that the file held in plain text; a pipeline with it does not load."""

_OPTION = re.compile(r"--?(?P<name>[A-Za-z][\w.-]*)")
_ASSIGNED_ARGUMENT = re.compile(
    r"""(?<![\w.-])-{0,2}(?P<name>[A-Za-z_][\w.-]*)=(?=(?P<value>"[^"]{0,200}"|'[^']{0,200}'|.\S{0,200}))""",
    re.DOTALL,
)
_SEPARATE_ARGUMENT = re.compile(
    rf"""(?<![\w.-]){_OPTION.pattern}\s+(?=(?P<value>"[^"]{{0,200}}"|'[^']{{0,200}}'|[^\s-]\S{{0,200}}))"""
)
"""Arguments with a value, also in the midst of a line for a shell; the value may begin the next one."""

_PATH_NAME_ENDING = re.compile(r"(file|path|dir)\Z", re.IGNORECASE)
_SHELL_VARIABLE = re.compile(r"\$(\(\w+\)|\{\w+\}|\w+)")
"""A variable of the pod's: `$(API_TOKEN)`, or in a shell `$API_TOKEN`."""

ENV_REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_ENV_PREFIX = "${env:"

_SECRET_WORDS = frozenset(
    {
        *("token", "secret", "secrets", "password", "passwd", "passphrase", "key"),
        *("credential", "credentials", "apikey", "accesskey", "secretkey", "authtoken", "pgpassword"),
    }
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

_MIN_WHOLE_WORD_LENGTH, _MIN_SUBSTRING_LENGTH = 4, 6
"""Secrets of at least `_MIN_SUBSTRING_LENGTH` characters are replaced anywhere in a text, shorter ones only
as whole words, those below `_MIN_WHOLE_WORD_LENGTH` never."""

_MIN_LINE_LENGTH = 8
"""Of a value with several lines, each line of at least so many characters is also searched for by itself."""

_MIN_REFERENCED_LENGTH = 8
"""The value of a variable that the pipeline refers to is a secret if it has at least so many characters, even
if the variable's name does not say so."""

_MAX_SHORT_WORD_LENGTH = 7
_ONE_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_VOWEL, _CONSONANTS = re.compile(r"[aeiouy]", re.IGNORECASE), re.compile(r"[^aeiouy]{5}", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?([0-9]{1,9}|[0-9]{0,9}\.[0-9]{1,17}|[0-9]{1,9}\.)([eE][-+]?[0-9]{1,3})?%?")
"""A number as settings have them: with ten digits and more it may be a secret."""

_COMMON = frozenset(
    {
        *("anonymous", "automatic", "disabled", "enabled", "explicit", "external", "implicit", "internal"),
        *("optional", "required", "undefined", "unlimited"),
        *("aes128", "aes256", "ed25519", "rsa2048", "rsa4096", "sha256", "sha384", "sha512", "x86_64"),
    }
)
"""Values of settings that are longer than a short word, or no word."""

_AUTH_SCHEME = re.compile(r"\s*(Basic|Bearer|Digest|Token)\s+", re.IGNORECASE)
"""Before a token in a header."""

_FILE_BELOW_VARIABLE = re.compile(r"\$\{env:\w+\}(/[\w.-]+)*/[\w-]*\.[\w.-]+")
"""A path to a file in a folder that a variable holds: `${env:HOME}/key.pem`."""

_MAX_WORD_LENGTH, _FEW_WORDS = 12, 2

_URL_USER = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,20}://)(?P<user>[^\s/?#\"'<>]+)@")
_QUERY = re.compile(r"(?P<before>[?&](?P<name>[\w.-]+)=)(?P<value>[^&\s\"'<>#]+)")
_USER_NAME = re.compile(r"(?:\$\{env:\w+\}|[^:])*")
_MIN_TOKEN_USER_LENGTH = 20
"""A user name of so many characters in a URL is a token: `https://ghp_…@github.com`."""

_KEY_VALUE_LINE = re.compile(
    r"""(?P<before>(?<![\w.-])(?P<name>[A-Za-z_][\w.-]*)["']?\s*:\s*)(?P<value>"[^"]*"?|'[^']*'?|\[[^\]]*|"""
    r"""(?:\$\{env:\w+\}|[^\s,\[{}\]#])(?:\$\{env:\w+\}|[^,}\]#])*)"""
)
_OVERRIDE = re.compile(r"(?P<before>\A(?P<name>[^=]*)=)(?P<value>.*)", re.DOTALL)
_PLAIN_VALUE = re.compile(r"[-+0-9.eExXo_]+|true|false|null|~|", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether one of the name's words says that its value is a secret: `API_KEY`, `apiKey`, `hf-token`."""
    return any(word.lower() in _SECRET_WORDS for word in _WORD.findall(name))


def referenced_variables(text: str) -> Iterator[str]:
    """The variables that a string names."""
    return (match[1] for match in ENV_REFERENCE.finditer(text))


def cannot_be_secret(value: str) -> bool:
    """Whether a value cannot be a secret, whatever its name is: true, false, a number, a short word.

    Messages are full of these, and a secret that is one could be guessed.
    """
    short = len(value) <= _MAX_SHORT_WORD_LENGTH and _is_word(value)
    return short or value.lower() in _COMMON or _NUMBER.fullmatch(value) is not None


def _is_word(text: str) -> bool:
    """Whether a text looks like a word of a language."""
    return bool(_ONE_WORD.fullmatch(text) and _VOWEL.search(text) and not _CONSONANTS.search(text))


def masked(value: str) -> str:
    """What is written for a secret value: `${env:NAME}` stays, and of the rest what cannot be the secret.

    `Bearer ${env:API_TOKEN}` stays: the secret is in the variable. It is not in `hunter2-${env:HOME}`.
    """
    return "".join(REDACTED if is_secret else part for part, is_secret in _split_secret(value))


def _split_secret(value: str) -> Iterator[tuple[str, bool]]:
    """The parts of a secret value, and whether each may be the secret; no `${env:NAME}` is."""
    if _ENV_PREFIX not in value or _FILE_BELOW_VARIABLE.fullmatch(value):
        yield value, _ENV_PREFIX not in value
        return
    named = any(is_secret_name(name) for name in referenced_variables(value))
    for part in filter(None, re.split(r"(\$\{env:[A-Za-z_][A-Za-z0-9_]*\})", value)):
        yield part, not (ENV_REFERENCE.fullmatch(part) or _is_harmless(part, beside_secret=named))


def _is_harmless(part: str, *, beside_secret: bool) -> bool:
    words = re.findall(r"\w+", part)
    if not words or _AUTH_SCHEME.fullmatch(part):
        return True
    few = len(words) <= _FEW_WORDS
    return beside_secret and all(
        cannot_be_secret(word)
        or (len(word) <= _MAX_WORD_LENGTH and _is_word(word))
        or (few and len(word) < _MIN_WHOLE_WORD_LENGTH)
        for word in words
    )


def fill_references(text: str, environment: Mapping[str, str]) -> str:
    """The string with each `${env:NAME}` replaced.

    Raises:
        KeyError: a variable that is not set; `args[0]` is its name.
    """
    return ENV_REFERENCE.sub(lambda match: environment[match[1]], text)


@dataclass(frozen=True)
class PipelineString:
    """A string of a pipeline, or a key."""

    path: KeyPath
    text: str
    secret: bool = False
    """A name above it says that it is a secret, or it holds one in an argument."""

    is_key: bool = False


def reference_problem(found: PipelineString) -> tuple[str, str] | None:
    """What is wrong with a string or key, such as one that holds `${env:NAME`, and what to write instead.

    None if nothing is wrong.
    """
    text = found.text
    if found.is_key and _ENV_PREFIX in text:
        return "${env:NAME} is not filled in for keys", "write the key itself"
    if REDACTED in text:
        for_value = "write ${env:NAME} and set the variable, or give the value by --set"
        hint = "write the key itself, or give it by --set" if found.is_key else for_value
        return "the secret that was here is not written to files", hint
    if text.count(_ENV_PREFIX) > len(ENV_REFERENCE.findall(text)):
        what = '"${env:" is not followed by a variable\'s name and "}"'
        return what, "write ${env:NAME}; a name holds letters, digits and _"
    if _ENV_PREFIX in text and _names_written_file(found.path, text):
        return "${env:NAME} is not filled in for the name of a file that is written", "write the name itself"
    for name in referenced_variables(text):
        if is_secret_name(name) and not found.secret:
            problem = f"{name} is a secret by its name, and goes only into an option that is one by its name"
            return problem, "such as password or api_token"
        allowed = os.environ.get(FILLED_VARIABLE, "").split(",")
        if TRUST_VARIABLE in os.environ and name not in map(str.strip, allowed):
            problem = (
                f"{name} is not filled in: {TRUST_VARIABLE} is set, and {FILLED_VARIABLE} does not name it"
            )
            names = ",".join([*filter(None, map(str.strip, allowed)), name])
            return problem, f"if the pipeline may have its value, set {FILLED_VARIABLE}={names}"
    return None


def _names_written_file(path: KeyPath, text: str) -> bool:
    """Whether a string that takes variables names a file or folder that a run writes. All other places of a
    run are fixed names below its folder.
    """
    match path[-2:]:
        case ("save", "to"):
            return True
        case ("mlflow", "tracking_uri"):
            return _LOCAL_STORE.match(text) is not None
    return False


class Secrets:
    """Values that must not be written, each with what is written in its place."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._replacements: dict[str, str] = {}
        for value, instead in known.items():
            for form in () if cannot_be_secret(value.strip()) else _escaped_forms(value):
                self._replacements.setdefault(form, instead)
        longest_first = sorted(self._replacements, key=len, reverse=True)
        anywhere = [re.escape(form) for form in longest_first if len(form) >= _MIN_SUBSTRING_LENGTH]
        words = [
            rf"(?<!\w){re.escape(form)}(?!\w)" for form in longest_first if len(form) < _MIN_SUBSTRING_LENGTH
        ]
        self._substring_pattern = re.compile("|".join(anywhere)) if anywhere else None
        self._secret_pattern = re.compile("|".join([*anywhere, *words])) if anywhere or words else None

    @classmethod
    def collect(
        cls, pipeline: Iterable[PipelineString] = (), environment: Mapping[str, str] | None = None
    ) -> "Secrets":
        """The secrets of the environment, by default that of the process, and of a pipeline."""
        environment = os.environ if environment is None else environment
        known: dict[str, str] = {}
        for name, value in environment.items():
            known |= dict.fromkeys(_secrets_in_urls(value), REDACTED)
            # The path of a key file is not a secret, and it may be part of any message.
            if is_secret_name(name) and not (os.path.isabs(value) and os.path.exists(value)):
                known[value] = f"${{env:{name}}}"
        for text, secret in ((found.text, found.secret) for found in pipeline if not found.is_key):
            for name in referenced_variables(text):
                value = environment.get(name, "")
                if is_secret_name(name) or len(value) >= _MIN_REFERENCED_LENGTH:
                    known[value] = f"${{env:{name}}}"
            for value in (text,) if secret else _secrets_in_urls(text):
                known = {**_plain_text_secrets(value, environment), **known}
        known.pop(REDACTED, None)
        return cls(known)

    def redact(self, text: str) -> str:
        """A text with every known secret, and every password in a URL, replaced."""
        return _without_passwords(self._replaced(text, self._secret_pattern))

    def redact_line(self, line: str, *, override: bool = False) -> str:
        """As `redact`, for a line of a file or an override that may be too broken to parse.

        Values of keys with a secret's name are redacted, too.
        """
        line = _OVERRIDE.sub(_without_value, line) if override else line
        return self.redact(_KEY_VALUE_LINE.sub(_without_value, line))

    def redact_faults(self, faults: Iterable[Fault]) -> list[Fault]:
        """The faults as they may be shown."""
        # Cached: many faults quote the same line.
        redact_text, redact_line = functools.cache(self.redact), functools.cache(self.redact_line)
        return [
            fault.redacted(redact_text, functools.partial(redact_line, override=fault.order > 0))
            for fault in faults
        ]

    def redact_all(self, value: Any) -> Any:
        """Plain data with every string in it redacted."""
        return map_strings(value, lambda _, text: self.redact(text), lambda _, key: self.redact(key))

    def redact_pipeline(self, data: Any) -> Any:
        """A pipeline's data (`resolved.to_plain_data`) without its secrets, as it may be written to files.

        Values that came from `${env:NAME}` are written as `${env:NAME}`.
        """
        secret = {found.path for found in pipeline_strings(data) if found.secret}

        def text_of(path: KeyPath, text: str) -> str:
            if not text or (path in secret and (text := masked(text)) == REDACTED):
                return text
            return _without_passwords(self._replaced(text, self._substring_pattern))

        def key_of(path: KeyPath, key: str) -> str:
            # Keys are not filled in from the environment, so none says `${env:NAME}`.
            pattern = self._substring_pattern
            return pattern.sub(REDACTED, key) if pattern and _has_own_keys(path) else key

        return map_strings(data, text_of, key_of)

    def _replaced(self, text: str, pattern: re.Pattern[str] | None) -> str:
        return pattern.sub(lambda match: self._replacements[match[0]], text) if pattern else text


def pipeline_strings(data: Any, path: KeyPath = (), *, secret: bool = False) -> Iterator[PipelineString]:
    """Every string and every key of a pipeline's plain data."""
    if isinstance(data, str):
        yield PipelineString(path, data, secret or _holds_secret(path, data))
    elif isinstance(data, list):
        for index, (before, item) in enumerate(zip((None, *data), data, strict=False)):
            at = (*path, index)
            by_option = isinstance(item, str) and _holds_secret(at, item, before)
            yield from pipeline_strings(item, at, secret=secret or by_option)
    elif isinstance(data, dict):
        for key, item in data.items():
            at = (*path, key)
            yield PipelineString(at, key, is_key=True)
            by_key = _names_secret(path, key, item, data.get("name"))
            yield from pipeline_strings(item, at, secret=secret or by_key)


def _names_secret(path: KeyPath, key: str, value: Any, name: Any) -> bool:
    """Whether a key says that its value is secret; `name` as in `{name: API_TOKEN, value: …}`.

    A choice's name says nothing of its options. Kubernetes' pods name secrets without holding them, and have
    other keys: `tolerations: [{key: gpu}]`.
    """
    if key == "value" and isinstance(name, str) and is_secret_name(name):
        return True
    if key in (_free_form(path) or ()):
        return False
    return is_secret_name(key) and not (is_choice_path(path) and not isinstance(value, str | list))


def _holds_secret(path: KeyPath, text: str, before: Any = None) -> bool:
    """Whether a string of Kubernetes' pod, or of an option like it, holds a secret in an argument:
    `--token=…`, `curl --token …`, or the `…` after `--token`, the item before it in a list.
    """
    if _free_form(path) is None:
        return False
    option = _OPTION.fullmatch(before) if isinstance(before, str) else None
    if option and not text.startswith("-") and _is_secret_argument(option["name"], text, number=False):
        return True
    return any(
        _is_secret_argument(match["name"], match["value"], number=pattern is _ASSIGNED_ARGUMENT)
        for pattern in (_ASSIGNED_ARGUMENT, _SEPARATE_ARGUMENT)
        for match in pattern.finditer(text)
    )


def _is_secret_argument(name: str, value: str, *, number: bool) -> bool:
    """Whether an argument's value, quotes included, is a secret. `number` is not in `sort --key 2`."""
    if not is_secret_name(name) or _PATH_NAME_ENDING.search(name):
        return False
    value = value.strip("\"'")
    return not _SHELL_VARIABLE.fullmatch(value) and (number or not _PLAIN_VALUE.fullmatch(value))


_Replace = Callable[[KeyPath, str], str]
"""Gives what is written for a string at a path, or for a key of the mapping at a path."""


def map_strings(
    data: Any, text_of: _Replace, key_of: _Replace = lambda _, key: key, path: KeyPath = ()
) -> Any:
    """Plain data with its strings and keys replaced; keys that become equal are numbered."""
    if isinstance(data, str):
        return text_of(path, data)
    if isinstance(data, list | tuple):
        items = [map_strings(item, text_of, key_of, (*path, index)) for index, item in enumerate(data)]
        return tuple(items) if isinstance(data, tuple) else items
    if not isinstance(data, dict):
        return data
    made: dict[Any, Any] = {}
    for key, item in data.items():
        new = first = key_of(path, key) if isinstance(key, str) else key
        numbers = count(2)
        while new in made:
            new = f"{first} {next(numbers)}"
        made[new] = map_strings(item, text_of, key_of, (*path, key))
    return made


def _has_own_keys(path: KeyPath) -> bool:
    """Whether the keys of a mapping are the user's, and not ddprun's: options of dotted names, and those of
    cluster backends that are mappings.
    """
    if any(isinstance(step, str) and "." in step for step in path):
        return True
    field = options.model_fields.get(str(path[1])) if (options := _cluster_options(path)) else None
    return field is not None and get_origin(field.annotation) is dict


def _cluster_options(path: KeyPath) -> type[BaseModel] | None:
    """The options of the cluster backend below whose key a path leads, if it may be imported."""
    if len(path) < 2 or str(path[0]) not in CLUSTERS:
        return None
    try:
        return CLUSTERS.options_model(str(path[0]))
    except (DottedNameError, TrustSettingError):
        return None  # `check` refuses the key


def _free_form(path: KeyPath) -> frozenset[str] | None:
    """Of an option in another tool's format, the keys that only name a secret; None of anything else."""
    forms: Mapping[str, frozenset[str]] = getattr(_cluster_options(path), "free_form", {})
    return forms.get(str(path[1])) if forms else None


def _plain_text_secrets(value: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The parts of a secret value that the pipeline holds in plain text, and what is written instead."""
    if _ENV_PREFIX not in value:
        return {value: REDACTED}
    found = {part.strip(): REDACTED for part, is_secret in _split_secret(value) if is_secret}
    if found and all(name in environment for name in referenced_variables(value)):
        found[fill_references(value, environment)] = masked(value)
    return found


def _escaped_forms(value: str) -> Iterator[str]:
    """A value as messages may show it: itself, escaped, in a URL, line by line."""
    lines = [line.strip() for line in value.splitlines()]
    long_lines = [line for line in lines if len(line) >= _MIN_LINE_LENGTH] if len(lines) > 1 else []
    for text in (value, value.strip(), *long_lines):
        if cannot_be_secret(text):
            continue
        escaped = repr(text)[1:-1], json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]
        for form in (text, *escaped, *(quote(text, safe, errors="replace") for safe in ("/", ""))):
            if len(form) >= _MIN_WHOLE_WORD_LENGTH:
                yield form


def _secrets_in_urls(text: str) -> Iterator[str]:
    """Passwords in URLs, and values of secret names in their queries."""
    if "://" not in text:
        return
    for match in _URL_USER.finditer(text):
        user, password = _user_and_password(match["user"])
        if password:
            yield password
            yield unquote(password)
        elif password is None and len(ENV_REFERENCE.sub("", user)) >= _MIN_TOKEN_USER_LENGTH:
            yield user
    for match in _QUERY.finditer(text):
        if is_secret_name(match["name"]):
            yield match["value"]
            yield unquote(match["value"])


def _without_passwords(text: str) -> str:
    if "://" not in text:
        return text
    text = _URL_USER.sub(_without_user, text)
    return _QUERY.sub(_without_value, text)


def _without_user(match: re.Match[str]) -> str:
    user, password = _user_and_password(match["user"])
    if password is None and len(ENV_REFERENCE.sub("", user)) < _MIN_TOKEN_USER_LENGTH:
        return match[0]
    if _ENV_PREFIX not in match["user"]:
        return f"{match['scheme']}{REDACTED}@"
    shown = masked(user) if password is None else f"{user}:{masked(password)}"
    return f"{match['scheme']}{shown}@"


def _user_and_password(text: str) -> tuple[str, str | None]:
    """The parts before the @ of a URL; the colon of a `${env:NAME}` does not count."""
    match = _USER_NAME.match(text)
    user = match[0] if match else ""
    return (user, None) if user == text else (user, text[len(user) + 1 :])


def _without_value(match: re.Match[str]) -> str:
    value = match["value"].strip()
    if not is_secret_name(match["name"]) or _PLAIN_VALUE.fullmatch(value):
        return match[0]
    return match["before"] + masked(value)
