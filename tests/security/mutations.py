"""Mutated pipelines: real files and bad ones, changed as text and as structure, and overrides for them."""

import json
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from ddprun.config.yaml_reader import read_pipeline_file

ROOT = Path(__file__).parents[2]
MAX_BYTES = 100_000
"""More than a pipeline file may have."""
FILES = [
    path
    for folder in ("pipelines", "tests/bad", "tests/bad/run")
    for path in sorted((ROOT / folder).glob("*.yaml"))
]
SEEDS = [path.read_bytes() for path in FILES]
GOOD = [path.read_bytes() for path in FILES if path.parent.name == "pipelines"]

TOKENS = [
    *("&a ", "*a", "&a [*a]", "<<: *a", "!!python/object/apply:os.system [true]", "!x ", "!!str ", "!<x> "),
    *(
        "%YAML 1.1\n",
        "%TAG ! x:\n",
        "---\n",
        "...\n",
        "? ",
        ": ",
        "- ",
        "\t",
        "\r",
        "\r\n",
        " ",
        "\n",
        "\n\n",
    ),
    *("[", "]", "{", "}", "{{", "[[", '"', "'", "|", ">", "|-9\n", ">+\n", "#", "\\", "@", "`", ",", "%"),
    *(
        "\0",
        "\x1b[31m",
        "\x7f",
        "\x85",
        "\u2028",
        "\u202e",
        "\ufeff",
        "\ufffe",
        "é",
        "e\u0301",
        "\U0001d54f",
        "١٢",
    ),
    *(
        "1e999",
        "-1e-999",
        "9" * 40,
        "9" * 5000,
        "0x" + "f" * 60,
        "0o777",
        "010",
        "1_000",
        "12:30:45",
        "0.1.2",
    ),
    *(".nan", "-.inf", ".INF", "~", "null", "NULL", "yes", "on", "true", "False", "-0", "+1", "1.", ".5"),
    *("stages[0].train", "${env:HOME}", "${env:", "${env:X}", "[redacted]", "https://u:p@h/", "password: x"),
    *("os.system", "a.b", "a..b", ".a", "a.", "__import__.x", "torch.nn.Linear", "lambda", "None.x", "{}.x"),
    *(
        '"\\x00"',
        '"\\ud800"',
        '"\\U00110000"',
        '"\\N"',
        '"\\\n"',
        "'it''s'",
        "a: b: c",
        "*",
        "&",
        "!",
        "=",
        "<<",
    ),
]
KEYS = [
    *(
        "name",
        "seed",
        "model",
        "data",
        "loader",
        "loss",
        "optimizer",
        "schedule",
        "warmup_steps",
        "clip_norm",
    ),
    *("precision", "ddp", "accumulate", "sync", "hooks", "buffers", "stages", "launch", "timings", "audit"),
    *(
        "train",
        "evaluate",
        "save",
        "forward",
        "average",
        "broadcast",
        "steps",
        "epochs",
        "metrics",
        "to",
        "update",
    ),
    *(
        "mutate",
        "mlp",
        "cnn",
        "transformer",
        "digits",
        "text",
        "synthetic",
        "files",
        "sgd",
        "AdamW",
        "lr",
        "betas",
    ),
    *(
        "every",
        "within",
        "across",
        "hosts",
        "hierarchical",
        "int8",
        "topk",
        "density",
        "powersgd",
        "rank",
        "held_out",
    ),
    *(
        "local_sgd",
        "diloco",
        "independent",
        "source",
        "inputs",
        "outputs",
        "hidden",
        "StepLR",
        "CosineAnnealingLR",
    ),
    *(
        "cross_entropy",
        "weight",
        "reduction",
        "noise",
        "std",
        "evolution_strategies",
        "population",
        "auto",
        "reduce",
    ),
    *("password", "api_key", "a.b", "", " ", "é", "x" * 300, "1", "null", "<<", "=", "-"),
]
SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**63 - 1, 2**63, 10**30]),
    st.floats(),
    st.sampled_from([*KEYS, *TOKENS]),
    st.text(max_size=12),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    ),
    max_leaves=8,
)


STRUCTURES = [root.data() for root, _ in map(read_pipeline_file, FILES) if root is not None]
WHOLE = STRUCTURES[: len(GOOD)]


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """A pipeline file's bytes."""
    raw = draw(st.one_of(st.sampled_from(GOOD), st.sampled_from(SEEDS), structures()))
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 4]))):
        raw = _mutated(draw, raw)[:MAX_BYTES]
    return raw


def _mutated(draw: st.DrawFn, raw: bytes) -> bytes:
    at = draw(st.integers(0, len(raw)))
    end = min(len(raw), at + draw(st.integers(1, 40)))
    lines = raw.splitlines(keepends=True) or [b""]
    line = draw(st.integers(0, len(lines) - 1))
    kind = draw(st.integers(0, 9))
    if kind == 0:  # flip bits
        return raw[:at] + bytes(byte ^ draw(st.integers(1, 255)) for byte in raw[at : at + 1]) + raw[at + 1 :]
    if kind == 1:
        return raw[: max(at, len(raw) // 4)]
    if kind == 2:
        return raw[:at] + raw[end:]
    if kind == 3:
        return b"".join([*lines[: line + 1], *lines[line:]])
    if kind == 4:
        return (
            b"".join(reversed(lines)) if draw(st.booleans()) else b"".join(lines[:line] + lines[line + 1 :])
        )
    if kind == 5:  # another indent
        lines[line] = b" " * draw(st.integers(0, 12)) + lines[line].lstrip(b" ")
        return b"".join(lines)
    if kind == 6:  # deep, wide, long
        return raw[:at] + raw[at:end] * draw(st.sampled_from([2, 40, 1000, 3000])) + raw[end:]
    if kind == 7:
        token = draw(st.sampled_from(TOKENS)).encode("utf-8", "surrogatepass")
        return raw[:at] + token * draw(st.sampled_from([1, 1, 1, 2, 50, 4000])) + raw[end:]
    if kind == 8:
        other = draw(st.sampled_from(SEEDS))
        return raw[:at] + other[draw(st.integers(0, len(other))) :]
    return raw[:at] + draw(st.binary(max_size=8)) + raw[at:]


@st.composite
def structures(draw: st.DrawFn) -> bytes:
    """A pipeline with values of other kinds, renamed keys, nested or missing parts."""
    data = json.loads(json.dumps(draw(st.one_of(st.sampled_from(WHOLE), st.sampled_from(STRUCTURES)))))
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        data = _changed(draw, data)
    if draw(st.booleans()):
        return json.dumps(data, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    return yaml.safe_dump(data, allow_unicode=True).encode("utf-8", "surrogatepass")


def _changed(draw: st.DrawFn, data: Any) -> Any:
    """One place changed; the way there is drawn step by step."""
    if isinstance(data, dict) and data and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(data, key=str)))
        kind = draw(st.integers(0, 7))
        if kind == 0:
            return {draw(st.sampled_from(KEYS)) if one == key else one: item for one, item in data.items()}
        if kind == 1:
            return {one: item for one, item in data.items() if one != key}
        if kind == 2:
            return {**data, draw(st.sampled_from(KEYS)): draw(VALUES)}
        return {**data, key: _changed(draw, data[key])}
    if isinstance(data, list) and data and draw(st.integers(0, 3)):
        place = draw(st.integers(0, len(data) - 1))
        kind = draw(st.integers(0, 5))
        if kind == 0:
            return [*data, *data]
        if kind == 1:
            return data[:place] + data[place + 1 :]
        return [*data[:place], _changed(draw, data[place]), *data[place + 1 :]]
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return [data]
    if kind == 1:
        for _ in range(draw(st.sampled_from([1, 3, 31, 40]))):
            data = {draw(st.sampled_from(KEYS)): data} if draw(st.booleans()) else [data]
        return data
    return draw(VALUES)


@st.composite
def overrides(draw: st.DrawFn) -> str:
    """A `--set` option."""
    path = ".".join(draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)))
    path += draw(st.sampled_from(["", "", "[0]", "[99]", "[0].train.steps", '."a.b"', "[", "]", "..", '"']))
    value = draw(st.one_of(st.sampled_from(TOKENS), VALUES.map(lambda value: json.dumps(value))))
    return path + draw(st.sampled_from(["=", "=", "=", "", "=="])) + value.replace("\0", "")
