"""Plain scalars mean what YAML 1.2's core schema says."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddprun.config.faults import Source
from ddprun.config.scalars import Scalar, format_scalar, parse_scalar
from ddprun.config.yaml_reader import parse_yaml

# The core schema's table (YAML 1.2.2, 10.3.2), and what YAML 1.1 reads otherwise.
CORE: list[tuple[str, Scalar]] = [
    ("null", None),
    ("Null", None),
    ("NULL", None),
    ("~", None),
    ("", None),
    ("nULL", "nULL"),
    ("true", True),
    ("True", True),
    ("TRUE", True),
    ("tRUE", "tRUE"),
    ("false", False),
    ("False", False),
    ("FALSE", False),
    ("0", 0),
    ("-0", 0),
    ("-19", -19),
    ("+12", 12),
    ("0o7", 7),
    ("0o17", 15),
    ("0x3A", 58),
    ("0x1f", 31),
    ("-0x1f", "-0x1f"),
    ("0o8", "0o8"),
    ("0X1F", "0X1F"),
    ("0b11", "0b11"),
    ("0.", 0.0),
    ("1.", 1.0),
    (".5", 0.5),
    ("-.5", -0.5),
    ("-0.0", -0.0),
    ("12e03", 12000.0),
    ("-2E+05", -200000.0),
    ("1e-3", 0.001),
    ("1.5e3", 1500.0),
    ("e3", "e3"),
    (".", "."),
    (".e3", ".e3"),
    (".inf", math.inf),
    ("-.Inf", -math.inf),
    ("+.INF", math.inf),
    ("inf", "inf"),
    ("nan", "nan"),
    ("yes", "yes"),
    ("no", "no"),
    ("on", "on"),
    ("Off", "Off"),
    ("y", "y"),
    ("12:30", "12:30"),
    ("12:30:45", "12:30:45"),
    ("1_000", "1_000"),
    ("1,5", "1,5"),
    ("2001-01-01", "2001-01-01"),
    ("=", "="),
    ("010", "010"),
    ("-007", "-007"),
    ("01.5", 1.5),
]


@pytest.mark.parametrize(("text", "value"), CORE)
def test_a_scalar_means_what_the_core_schema_says(text: str, value: Scalar) -> None:
    """Type and value are those of the core schema; a leading zero alone makes a string, YAMLs disagree."""
    read = parse_scalar(text)
    assert read == value
    assert type(read) is type(value)
    if isinstance(value, float) and isinstance(read, float):
        assert math.copysign(1, read) == math.copysign(1, value)


@pytest.mark.parametrize("text", [".nan", ".NaN", ".NAN"])
def test_nan_is_a_float(text: str) -> None:
    """The three spellings of not-a-number are one; others are strings."""
    read = parse_scalar(text)
    assert isinstance(read, float)
    assert math.isnan(read)


@pytest.mark.parametrize(
    "text", ["9223372036854775808", "0xffffffffffffffffff", "1e999", "-1e999", "9" * 5000]
)
def test_a_number_beyond_64_bits_is_refused(text: str) -> None:
    """No number becomes infinite or longer than 64 bits on the way."""
    with pytest.raises(OverflowError, match="64"):
        parse_scalar(text)


@given(st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats() | st.text())
def test_what_is_written_reads_back(value: Scalar) -> None:
    """Any scalar that a pipeline can hold is written so that the reader gives the same value and type."""
    if isinstance(value, str):
        value = value.encode("utf-8", "ignore").decode()
    text = f"a: {format_scalar(value)}  # comment\n"
    root, faults = parse_yaml(text, Source.from_text("a", 0, text))
    assert not faults
    assert root is not None
    back = root.data()["a"]
    assert type(back) is type(value)
    assert back == value or (str(back) == str(value) == "nan")


@pytest.mark.parametrize(
    "text", ["no", "Yes", "on", "y", "true", "null", "010", "1e3", "", "a: b", "a #b", "- a", "..."]
)
def test_what_some_yaml_reads_otherwise_is_quoted(text: str) -> None:
    """A resolved pipeline means the same to readers of YAML 1.1."""
    assert format_scalar(text) == f'"{text}"'
