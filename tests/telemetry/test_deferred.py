"""Chores: done in their order, and no longer than there is time."""

from collections.abc import Iterator

import pytest

from ddprun.telemetry import deferred
from ddprun.telemetry.deferred import DeferredWork


def test_chores_stop_when_their_time_is_over_and_go_on_where_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each part takes 200 µs; the rest is done when it is wanted."""
    now, done = 0, list[str]()

    def chore(name: str, parts: int) -> Iterator[None]:
        nonlocal now
        for part in range(parts):
            done.append(f"{name}{part}")
            now += 200
            yield

    monkeypatch.setattr(deferred, "now_us", lambda: now)
    monkeypatch.setattr(deferred, "_A_WHILE_US", 500)
    row = DeferredWork()
    row.do_some()
    row.add(chore("a", 2))
    row.add(chore("b", 4))
    row.add(chore("c", 1))
    row.do_some()
    assert done == ["a0", "a1", "b0"], "so long it may take"
    row.do_some()
    assert done[3:] == ["b1", "b2", "b3"]
    row.add(chore("d", 1))
    row.do_all()
    assert done[6:] == ["c0", "d0"]
    row.do_all()
    assert len(done) == 8


def test_a_chore_that_fails_does_not_hold_up_those_behind_it() -> None:
    """What it has not done is lost; the others are done when they are wanted."""
    done = list[str]()

    def chore(name: str, *, fails: bool) -> Iterator[None]:
        done.append(name)
        if fails:
            raise RuntimeError(name)
        yield

    row = DeferredWork()
    row.add(chore("a", fails=True))
    row.add(chore("b", fails=False))
    with pytest.raises(RuntimeError, match="a"):
        row.do_all()
    row.do_all()
    assert done == ["a", "b"]
