from __future__ import annotations

import pytest

from areal_ray.observability.activity import ActivityMeter


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_every_moment_is_of_one_activity(clock: Clock) -> None:
    meter = ActivityMeter("waiting for data", clock=clock)
    clock.now = 10.0
    meter.begin("busy")
    clock.now = 12.0
    with meter.during("paused"):
        assert meter.now == "paused"
        clock.now = 12.5
    clock.now = 15.0
    meter.end("busy")
    clock.now = 16.0
    # 10 s at first and 1 s at the end; 5 s of a request, of which 0.5 s stood still.
    assert meter.totals == {"waiting for data": 11.0, "busy": 4.5, "paused": 0.5}


def test_one_that_is_begun_twice_lasts_until_its_last_end(clock: Clock) -> None:
    meter = ActivityMeter("idle", clock=clock)
    meter.begin("busy")
    clock.now = 1.0
    meter.begin("busy")
    clock.now = 2.0
    meter.end("busy")
    clock.now = 3.0
    assert meter.now == "busy"
    meter.end("busy")
    clock.now = 4.0
    assert meter.totals == {"busy": 3.0, "idle": 1.0}


def test_reading_takes_nothing_away_from_the_next_reader(clock: Clock) -> None:
    meter = ActivityMeter("idle", clock=clock)
    clock.now = 1.0
    first = meter.totals
    clock.now = 3.0
    assert first == {"idle": 1.0}
    assert meter.totals == meter.totals == {"idle": 3.0}


def test_it_ends_with_an_error_too(clock: Clock) -> None:
    meter = ActivityMeter("idle", clock=clock)
    with pytest.raises(RuntimeError), meter.during("saving"):
        clock.now = 2.0
        raise RuntimeError
    clock.now = 3.0
    assert meter.totals == {"saving": 2.0, "idle": 1.0}


def test_what_did_not_begin_can_not_end(clock: Clock) -> None:
    with pytest.raises(ValueError, match="saving was ended before it began"):
        ActivityMeter("idle", clock=clock).end("saving")
