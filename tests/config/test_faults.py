"""How a fault looks."""

from typing import Any

from ddprun.config.faults import PipelineError, PipelineFault, Place, Source, closest_match


def fault(line: str, column: int, **more: Any) -> PipelineFault:
    return PipelineFault(Place(Source("a.yaml", 0, ("", "", line)), 3, column), "x", "is bad", **more)


def test_a_fault_is_one_line_and_the_quoted_line_with_a_caret() -> None:
    """The head has file, line, column, path, problem, what is allowed and what was meant."""
    told = fault("x: 1", 4, allowed="allowed: a, b", suggestion="a")
    assert str(told) == 'a.yaml:3:4: x: is bad; allowed: a, b (did you mean "a"?)\n    x: 1\n       ^'


def test_a_warning_says_so() -> None:
    """A warning is told apart from an error."""
    assert fault("x: 1", 4, severity="warning").headline == "a.yaml:3:4: warning: x: is bad"


def test_the_caret_counts_characters() -> None:
    """A tab stays a tab."""
    assert str(fault("é: y", 4)).endswith("\n       ^")
    assert str(fault("\tx: y", 5)).endswith("\n    \t   ^")


def test_a_long_line_is_cut_around_the_fault() -> None:
    """A line of thousands of characters is not poured over the terminal."""
    quoted, caret = str(fault("a" * 5000 + "X" + "b" * 5000, 5001)).split("\n")[1:]
    assert len(quoted) < 130
    assert quoted[caret.index("^")] == "X"


def test_an_error_tells_all_its_faults() -> None:
    """The exception's text holds every fault, in order."""
    both = PipelineError([fault("x: 1", 1), fault("y: 1", 1)])
    assert str(both).count("is bad") == 2
    assert len(both.faults) == 2


def test_suggestions_ignore_case() -> None:
    """What differs in case only is the nearest of all; what is far away is not suggested."""
    assert closest_match("ADAMW", ["SGD", "AdamW", "Adam"]) == "AdamW"
    assert closest_match("xyzzy", ["SGD", "AdamW"]) is None


def test_no_fault_moves_the_cursor() -> None:
    """Whatever a file holds, or is called, reaches a terminal as text: no escape sequence, no line break."""
    place = Place(Source("a\x1b[2J.yaml", 0, ("x: \x1b[31m",)), 1, 4)
    told = PipelineFault(place, "x", 'got "\x1b[31m\n"')
    assert str(told) == 'a\\u001b[2J.yaml:1:4: x: got "\\u001b[31m\\u000a"\n    x: \ufffd[31m\n       ^'
