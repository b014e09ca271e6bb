"""Which candidates run, which are out, and which one wins."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddprun.tune.selection import (
    QualityFloors,
    Trial,
    next_candidates,
    parse_quality_floors,
    pick_predicted_winner,
    pick_winner,
    rejection_reason,
)
from tests.tune.figures import Figures

SYNC = [{"local_sgd": {"every": every}} for every in (2, 8, 32)]
CHANGES: list[dict[str, Any]] = [
    {"hooks": ["shared_memory"]},
    {"hooks": ["fp16"]},
    {"hooks": ["int4"]},
    *({"sync": sync} for sync in SYNC),
    {"sync": SYNC[0], "hooks": ["int8"]},
]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    return Figures(tmp_path_factory.mktemp("figures"))


TRIALS = st.lists(
    st.fixed_dictionaries(
        {
            "speed": st.floats(0.5, 4),
            "reach": st.floats(0, 0.5),
            "verdict": st.sampled_from(["faster", "slower", "no difference beyond noise", "failed"]),
            "cosine": st.none() | st.floats(0, 1),
            "loss": st.none() | st.floats(0.5, 2) | st.just(float("nan")),
            "finite": st.booleans(),
            "changes": st.sampled_from(CHANGES),
        }
    ),
    max_size=6,
)


@given(
    TRIALS,
    st.builds(QualityFloors, cosine=st.none() | st.floats(0.5, 1), loss=st.none() | st.floats(0, 0.5)),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_the_winner_is_never_below_a_floor(
    figures: Figures, made: list[dict[str, Any]], floors: QualityFloors
) -> None:
    """Whatever was measured: it is faster beyond noise, came to its end, and holds every floor."""
    trials = [figures.trial(**one) for one in made]
    found = pick_winner(trials, floors)
    if found is None:
        assert all(one.verdict != "faster" or rejection_reason(one, floors) for one in trials)
        return
    assert found.verdict == "faster"
    assert found.loss_is_finite
    if floors.cosine is not None:
        assert found.cosine is not None
        assert found.cosine >= floors.cosine
        assert found.entry.candidate.kind != "rare exchange"
    if floors.loss is not None:
        assert found.loss is not None
        assert found.loss <= 1 + floors.loss + 1e-9


def test_equal_costs_change_nothing(figures: Figures) -> None:
    """By prediction as by real runs, and no run is started for what is not predicted to gain."""
    file = figures.entry(1000)
    alike = [figures.entry(1000, **changes) for changes in CHANGES]
    assert pick_predicted_winner(file, alike) is None
    assert next_candidates(file, alike, [], QualityFloors(), most=4, max_period=32) == []
    same = [figures.trial(1.0, verdict="no difference beyond noise", changes=one) for one in CHANGES]
    assert pick_winner(same, QualityFloors()) is None


def test_a_prediction_has_to_gain_more_than_it_may_miss(figures: Figures) -> None:
    """A tenth. Of those that are as fast as the fastest, give or take that, the one that loses least wins."""
    file = figures.entry(1000)
    assert pick_predicted_winner(file, [figures.entry(920, hooks=["int4"])]) is None
    close = [figures.entry(500, hooks=["int4"]), figures.entry(540, hooks=["fp16"])]
    found = pick_predicted_winner(file, [*close, figures.entry(600, hooks=["shared_memory"])])
    assert found is not None
    assert found.candidate.name == "hooks=[fp16]"


def test_of_equally_fast_ones_the_least_lossy_wins(figures: Figures) -> None:
    """As far as intervals can tell; a clearly faster one wins for its speed."""
    exact = figures.trial(2.00, changes={"hooks": ["shared_memory"]})
    lossy = figures.trial(2.02, reach=0.05, changes={"hooks": ["int4"]})
    rare = figures.trial(2.04, reach=0.05, changes={"sync": SYNC[2]})
    assert pick_winner([rare, lossy, exact], QualityFloors()) is exact
    assert pick_winner([rare, lossy], QualityFloors()) is lossy
    faster = figures.trial(2.5, changes={"sync": SYNC[2]})
    assert pick_winner([faster, lossy, exact], QualityFloors()) is faster


@pytest.mark.parametrize(
    ("made", "floors", "words"),
    [
        ({"verdict": "failed", "code": 3}, QualityFloors(), "its run failed with exit code 3"),
        ({"finite": False}, QualityFloors(), "its loss is not finite"),
        ({"cosine": 0.98}, QualityFloors(cosine=0.99), "its cosine is 0.9800, the floor 0.99"),
        ({"cosine": None}, QualityFloors(cosine=0.99), "its cosine was not measured"),
        ({"loss": 1.02}, QualityFloors(loss=0.01), "its loss is +2.0%, the floor +1.0%"),
        ({"loss": float("nan")}, QualityFloors(loss=0.01), "its loss is +nan%"),
        ({"loss": None}, QualityFloors(loss=0.01), "how far its loss is above the file's is not known"),
        (
            {"changes": {"sync": SYNC[0]}},
            QualityFloors(cosine=0.99),
            "gradients are not averaged at every step",
        ),
        ({"loss": 1.01, "cosine": 0.99}, QualityFloors(cosine=0.99, loss=0.0101), None),
    ],
)
def test_what_is_out_is_told_with_its_figure(
    figures: Figures, made: dict[str, Any], floors: QualityFloors, words: str | None
) -> None:
    found = rejection_reason(figures.trial(2.0, **{"changes": {"hooks": ["int4"]}, **made}), floors)
    assert found == words if words is None else words in (found or "")


def test_what_learns_more_slowly_gains_less(figures: Figures) -> None:
    """Without a floor on the loss, speed counts as far as it brings a candidate to a loss sooner."""
    exact = figures.trial(2.0, changes={"hooks": ["shared_memory"]})
    rare = figures.trial(4.0, to_loss=1.5, changes={"sync": SYNC[2]})
    never = figures.trial(4.0, to_loss=0.0, changes={"sync": SYNC[1]})
    assert pick_winner([rare, exact, never], QualityFloors()) is exact
    assert pick_winner([rare, never], QualityFloors()) is rare
    assert pick_winner([never], QualityFloors()) is None
    assert "never reaches the file's loss" in (rejection_reason(never, QualityFloors()) or "")
    slower = figures.trial(4.0, to_loss=0.8, changes={"sync": SYNC[1]})
    reason = rejection_reason(slower, QualityFloors())
    assert reason == "it takes 1.25 times as long as the file to reach the same loss"
    assert pick_winner([rare, exact, never], QualityFloors(loss=0.0)) is rare or never


def test_a_round_has_the_best_of_each_kind(figures: Figures) -> None:
    """And of rare exchange one that meets more often; none that is predicted to gain nothing."""
    file = figures.entry(1000)
    entries = [
        figures.entry(us, **changes)
        for us, changes in zip((900, 700, 600, 500, 300, 200, 450), CHANGES, strict=True)
    ]
    entries.append(figures.entry(990, hooks=["bf16"]))
    two_exact = [*entries, figures.entry(950, hooks=[{"hierarchical": {"hosts": 2}}])]
    (_, other, *_) = next_candidates(file, two_exact, [], QualityFloors(), most=4, max_period=32)
    assert other.candidate.name == "hooks=[{hierarchical: {hosts: 2}}]"
    names = [
        one.candidate.name
        for one in next_candidates(file, entries, [], QualityFloors(), most=4, max_period=32)
    ]
    assert names == [
        "hooks=[shared_memory]",
        "hooks=[int4]",
        "sync={local_sgd: {every: 32}}",
        "sync={local_sgd: {every: 8}}",
    ]
    short = next_candidates(file, entries, [], QualityFloors(), most=8, max_period=8)
    assert all(one.candidate.exchange_period <= 8 for one in short)
    assert len(short) == 6


def test_what_fell_rules_out_what_loses_more(figures: Figures) -> None:
    """The next round goes on with what loses less; after a winner only with what may beat it."""
    file = figures.entry(1000)
    entries = [
        figures.entry(us, **changes)
        for us, changes in zip((900, 700, 600, 500, 300, 200, 450), CHANGES, strict=True)
    ]
    floors = QualityFloors(loss=0.01)

    def after(*trials: Trial) -> list[str]:
        found = next_candidates(file, entries, trials, floors, most=8, max_period=32)
        return [one.candidate.name for one in found]

    fell = figures.trial(4.0, loss=1.5, changes={"sync": SYNC[1]})
    assert "sync={local_sgd: {every: 32}}" not in after(fell)
    assert "sync={local_sgd: {every: 2}}" in after(fell)
    crashed = figures.trial(4.0, verdict="failed", code=1, changes={"sync": SYNC[1]})
    assert "sync={local_sgd: {every: 32}}" in after(crashed)
    for to_loss, goes_on in ((1.5, True), (0.9, False)):
        learned = figures.trial(4.0, to_loss=to_loss, changes={"sync": SYNC[1]})
        found = next_candidates(file, entries, [learned], QualityFloors(), most=8, max_period=32)
        assert (32 in {one.candidate.exchange_period for one in found}) == goes_on
    held = figures.trial(2.1, changes={"hooks": ["int4"]})
    assert after(fell, held) == ["sync={local_sgd: {every: 2}}, hooks=[int8]"]


@pytest.mark.parametrize(
    ("texts", "floors"),
    [
        ([], QualityFloors()),
        (["cosine=0.99"], QualityFloors(cosine=0.99)),
        (["loss=+1%", "cosine = 1"], QualityFloors(1.0, 0.01)),
        (["loss=0.5 %"], QualityFloors(loss=0.005)),
    ],
)
def test_floors_are_read(texts: list[str], floors: QualityFloors) -> None:
    assert parse_quality_floors(texts) == floors


@pytest.mark.parametrize(
    "texts",
    [
        ["cosine=1.1"],
        ["cosine=nan"],
        ["cosine=0"],
        ["cosine"],
        ["loss=1"],
        ["loss=-1%"],
        ["speed=2"],
        ["loss=1%", "loss=2%"],
    ],
)
def test_other_floors_are_refused(texts: list[str]) -> None:
    with pytest.raises(ValueError, match="floor"):
        parse_quality_floors(texts)
