"""The clock of a GPU, on one that is none and whose time drifts."""

import pytest

from ddprun.telemetry import clock as clock_module
from ddprun.telemetry.clock import StreamClock
from tests.fake_gpu import FakeGpu


class Time:
    """The host's, in microseconds; the device's runs faster by a share of it."""

    def __init__(self, drift: float) -> None:
        self.us, self._drift = 5e6, drift

    def host(self) -> int:
        return round(self.us)

    def device(self) -> float:
        return 123.0 + self.us * (1 + self._drift)


@pytest.fixture
def drifting(monkeypatch: pytest.MonkeyPatch) -> tuple[Time, FakeGpu, StreamClock]:
    time = Time(drift=2e-5)
    monkeypatch.setattr(clock_module, "now_us", time.host)
    gpu = FakeGpu(time.device)
    return time, gpu, StreamClock(gpu)


def test_marks_follow_the_hosts_clock_though_the_device_drifts(
    drifting: tuple[Time, FakeGpu, StreamClock],
) -> None:
    """20 ppm are 1.2 ms in a minute; and time never runs backwards."""
    time, _, clock = drifting
    last = 0
    for _ in range(1200):  # ten minutes
        for _ in range(5):
            time.us += 100_000
            now = clock.mark_to_us(clock.mark())
            assert now > last
            assert abs(now - time.us) < 40
            last = now
        clock.reanchor()
    assert abs(last - time.us) < 25


def test_a_mark_is_read_once_and_its_event_used_again(drifting: tuple[Time, FakeGpu, StreamClock]) -> None:
    """A step's last mark is the next one's first, and buckets share marks with their collectives."""
    time, gpu, clock = drifting
    for _ in range(100):
        mark = clock.mark()
        assert mark.has_passed()
        first = clock.mark_to_us(mark)
        time.us += 1000
        assert clock.mark_to_us(mark) == first
        assert clock.marks_to_us([mark, first]) == [first, first]
        assert mark.has_passed()
    assert gpu.events_made == 2  # the base's, and one for all marks


def test_an_event_goes_back_to_the_gpu_object_that_made_it(
    drifting: tuple[Time, FakeGpu, StreamClock],
) -> None:
    """The exchange records timestamps, and the clock reads them: 25 buckets a step, and none is left over."""
    time, of_clock, clock = drifting
    of_exchange = FakeGpu(time.device)
    for _ in range(40):
        for timestamp in [of_exchange.record_timestamp() for _ in range(25)]:
            clock.mark_to_us(timestamp)
        clock.reanchor()
    assert of_exchange.events_made == 25
    assert of_clock.events_made == 2  # the base's, and the next one's
