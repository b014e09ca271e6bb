"""YAML 1.2 core meaning of plain scalars, and how to write a value so that it reads back as itself."""

import json
import math
import re

Scalar = None | bool | int | float | str

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER_PATTERNS = (
    (re.compile(r"[-+]?(?:0|[1-9][0-9]*)"), 10),
    (re.compile(r"0x[0-9a-fA-F]+"), 16),
    (re.compile(r"0o[0-7]+"), 8),
)  # how whole numbers are written, and their base
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"([-+]?)\.(?:inf|Inf|INF)")
_NAN = re.compile(r"\.(?:nan|NaN|NAN)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_UNQUOTED_STRING = re.compile(r"[A-Za-z_./][A-Za-z0-9_./+-]*(?: [A-Za-z0-9_./+-]+)*")

INT_MAX = 2**63 - 1  # the largest whole number a pipeline may hold: what fits into 64 bits with a sign


def parse_scalar(text: str) -> Scalar:
    """Value of a plain (unquoted) scalar under the YAML 1.2 core schema; raises OverflowError.

    One exception: a whole number with a leading zero (`010`) stays a string, because YAML 1.1 reads 8 and
    YAML 1.2 reads 10.
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    for pattern, base in _INTEGER_PATTERNS:
        if pattern.fullmatch(text):
            whole = int(text, base) if len(text) < 32 else INT_MAX + 1
            if abs(whole) > INT_MAX:
                raise OverflowError(f"does not fit into 64 bits; whole numbers go up to {INT_MAX}")
            return whole
    if _LEADING_ZERO.fullmatch(text):
        return text
    if _FLOAT.fullmatch(text):
        number = float(text)
        if math.isinf(number):
            raise OverflowError("is larger than any 64-bit float; numbers go up to 1.8e308")
        return number
    if match := _INFINITY.fullmatch(text):
        return -math.inf if match.group(1) == "-" else math.inf
    if _NAN.fullmatch(text):
        return math.nan
    return text


def bool_hint(text: str, *, quoted: bool) -> str | None:
    """What to write instead of a string that was meant to be a boolean; None if it does not look like one."""
    lower = text.lower()
    if lower in ("true", "false"):
        return f"the quotes make it a string: write {lower}" if quoted else f"write {lower}"
    meant = "true" if lower in ("yes", "on", "y") else "false" if lower in ("no", "off", "n") else None
    return f"{lower} is a string in YAML 1.2: write {meant}" if meant else None


def format_scalar(value: Scalar) -> str:
    """The value as YAML that reads back as exactly this value, under YAML 1.1 readers too where possible."""
    if value is None or isinstance(value, int):  # a boolean is one, too
        return json.dumps(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
        mantissa, e, exponent = repr(value).partition("e")
        return f"{mantissa}.0e{exponent}" if e and "." not in mantissa else repr(value)
    if (
        _UNQUOTED_STRING.fullmatch(value)
        and not value.startswith("...")
        and parse_scalar(value) == value
        and bool_hint(value, quoted=False) is None
    ):
        return value
    return quote(value)


def quote(text: str) -> str:
    """The text in double quotes, with everything escaped that a reader may refuse or fold."""
    unsafe = "[\x7f-\xa0\xad\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]"
    return re.sub(unsafe, lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))
