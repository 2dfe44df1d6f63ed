from __future__ import annotations

import base64
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from made_run import (
    append,
    make_run,
    rollouts,
)

from areal_ray.observability.ending import RunEnd, write_end
from areal_ray.observability.report.curves import Curve, Lags
from areal_ray.observability.report.data import RunReader
from areal_ray.observability.report.lanes import FULL, Timeline, TimelineData
from areal_ray.observability.report.samples import pick_samples
from areal_ray.observability.report.tail import Tail
from areal_ray.observability.timeline import ActivityRecord, EventRecord


def cell(who: str, at: float, **seconds: float) -> ActivityRecord:
    named = {name.replace("_", " "): value for name, value in seconds.items()}
    return ActivityRecord(who=who, at=at, seconds=named, tokens=10)


def shares(data: TimelineData, who: str, activity: str) -> list[float]:
    (lane,) = [lane for lane in data.lanes if lane.who == who]
    raw = np.frombuffer(base64.b64decode(lane.shares[activity]), "<u2")
    return [round(float(share), 3) for share in raw / FULL]


def test_a_curve_joins_neighbours_when_it_gets_too_long() -> None:
    curve = Curve(limit=2)
    for step, value in ((1, 5.0), (2, 7.0), (3, 3.0)):
        curve.add(step, [value])
    assert curve.width == 2
    assert curve.steps() == [2, 3]
    column = curve.column(0)
    assert (column.low, column.mean, column.high) == ([5.0, 3.0], [6.0, 3.0], [7.0, 3.0])
    # Step 5 is of a third pair, so that pairs become fours: (5 + 7 + 3 + 9) / 4 = 6, and 1.
    curve.add(4, [9.0])
    curve.add(5, [1.0])
    assert curve.width == 4
    assert curve.column(0).mean == [6.0, 1.0]


def test_a_curve_counts_only_the_steps_that_have_a_value() -> None:
    curve = Curve(limit=1)
    for step, value in ((1, 4.0), (2, None), (3, 8.0)):
        curve.add(step, [value])
    assert (curve.column(0).low, curve.column(0).mean) == ([4.0], [6.0])


def test_a_step_that_is_taken_again_replaces_the_first() -> None:
    curve = Curve()
    for step, value in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.9)):
        curve.add(step, [value])
    assert curve.steps() == [1, 2]
    assert curve.column(0).mean == [0.1, 0.9]


def test_the_lags_keep_the_worst_of_each_actor() -> None:
    lags = Lags(limit=2)
    for step, queue_ms in enumerate((1.0, 40.0, 2.0, 3.0), start=1):
        lags.add(step, {"queue": queue_ms, "trainer": 5.0} if step < 3 else {"queue": queue_ms})
    queue, trainer = lags.curves()
    assert (queue.who, queue.steps, queue.p99_ms) == ("queue", [2, 4], [40.0, 3.0])
    assert (queue.worst_ms, queue.last_ms) == (40.0, 3.0)
    assert (trainer.steps, trainer.p99_ms) == ([2], [5.0])


def test_a_cell_is_divided_among_the_bins_it_lies_in() -> None:
    timeline = Timeline(first_width_s=1.0)
    timeline.take(
        [cell("engine-0", 101.0, busy=1.0), cell("engine-0", 103.5, busy=2.0, paused=0.5)]
    )
    data = timeline.data()
    # From 100 on: the second cell, 101 to 103.5, lies in bins 1, 2 and the half of 3.
    assert data.bins == 4
    assert shares(data, "engine-0", "busy") == [1.0, 0.8, 0.8, 0.4]
    assert shares(data, "engine-0", "paused") == [0.0, 0.2, 0.2, 0.1]
    assert data.lanes[0].seconds == {"busy": 3.0, "paused": 0.5}
    assert (data.lanes[0].absent_s, data.lanes[0].tokens) == (0.0, 20)


def test_bins_are_joined_and_the_sums_stay_exact() -> None:
    timeline, chance = Timeline(max_bins=512, first_width_s=1.0), random.Random(3)
    busy = {"engine-0": 0.0, "engine-1": 0.0}
    for ten in range(500):
        cells = []
        for second in range(10 * ten + 1, 10 * ten + 11):
            for who in busy:
                part = chance.random()
                busy[who] += part
                cells.append(cell(who, second + 0.37, busy=part, idle=1 - part))
        timeline.take(cells)
    data = timeline.data()
    # 5,000 s in at most 256 bins a lane: 5000 / 32 = 156.25.
    assert (data.width_s, data.bins) == (32.0, 157)
    for lane in data.lanes:
        assert lane.seconds["busy"] == pytest.approx(busy[lane.who], abs=0.01)
        assert sum(shares(data, lane.who, "busy")) * 32 == pytest.approx(busy[lane.who], rel=1e-3)


def test_one_word_about_a_very_long_time_takes_no_memory() -> None:
    timeline = Timeline()
    timeline.take([cell("trainer", 2e9, busy=1e9), cell("engine-0", 2e9, idle=1.0)])
    data = timeline.data()
    assert data.bins <= 80_000
    assert data.lanes[0].seconds == {"busy": 1e9}


def test_who_begins_before_the_first_that_was_heard_loses_nothing() -> None:
    timeline = Timeline(first_width_s=1.0)
    timeline.take([cell("trainer", 100.0, idle=1.0)])
    timeline.take([cell("engine-0", 101.0, restarting=30.0)])
    data = timeline.data()
    assert data.began_t == -28.0
    assert shares(data, "engine-0", "restarting") == [1.0] * 30
    assert shares(data, "trainer", "idle") == [0.0] * 28 + [1.0, 0.0]


def test_a_week_in_which_the_run_did_not_go_on_is_left_out() -> None:
    timeline, week = Timeline(first_width_s=1.0), 7 * 86400.0
    timeline.take([cell("trainer", 1000.0 + second, busy=1.0) for second in range(1, 11)])
    timeline.take([cell("trainer", 1000.0 + week + second, idle=1.0) for second in range(1, 11)])
    data = timeline.data()
    assert data.bins == 20
    assert [(span.t, span.began_at, span.ended_at) for span in data.spans] == [
        (0.0, 1000.0, 1010.0),
        (10.0, 1000.0 + week, 1010.0 + week),
    ]
    assert timeline.t_of(1004.0) == 4.0
    assert timeline.t_of(1000.0 + week / 2) == 10.0
    assert timeline.t_of(1003.0 + week) == 13.0


def test_of_very_many_events_the_first_and_the_last_are_kept() -> None:
    timeline = Timeline()
    flood = [EventRecord(at=float(n), who="run", level="info", text=str(n)) for n in range(5000)]
    timeline.take([*flood, EventRecord(at=9.0, who="queue", level="error", text="lost")])
    data = timeline.data()
    assert data.counts == {"info": 5000, "error": 1}
    assert len(data.events) == 501
    assert [event.text for event in data.events if event.level == "error"] == ["lost"]
    assert (data.events[0].text, data.events[-1].text) == ("0", "4999")


def test_lanes_are_in_the_order_people_count_in() -> None:
    timeline = Timeline()
    timeline.take([cell(who, 1.0, idle=1.0) for who in ("engine-10", "engine-9", "trainer")])
    assert [lane.who for lane in timeline.data().lanes] == ["trainer", "engine-9", "engine-10"]


def test_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.read().text == b""
    path.write_bytes(b"one\ntw")
    assert tail.read().text == b"one\n"
    assert tail.read().text == b""
    assert tail.unread_bytes == 0
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    # A piece of 3 bytes ends in mid-line: it is read on from there.
    assert [tail.read(3).text for _ in range(4)] == [b"two\n", b"", b"three\n", b""]


def test_a_file_that_was_taken_back_is_read_anew(tmp_path: Path) -> None:
    path, other = tmp_path / "lines", tmp_path / "other"
    tail = Tail(path)
    path.write_bytes(b"one\ntwo\n")
    assert not tail.read().begins_anew
    other.write_bytes(b"one\n")
    other.replace(path)
    again = tail.read()
    assert (again.text, again.begins_anew) == (b"one\n", True)
    path.unlink()
    assert tail.read().begins_anew


def test_samples_come_from_everywhere_in_a_file_too_big_to_read(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    append(path, rollouts(400, random.Random(2)))
    early, middle, late = pick_samples(path, place_bytes=20_000)
    assert early.first_step == 1
    assert early.last_step < middle.first_step <= 200 <= middle.last_step + 10
    assert middle.last_step < late.first_step
    assert late.last_step == 400
    for place in (early, middle, late):
        assert [sample.reward for sample in place.best] == [1.0, 1.0, 1.0]
        assert len({sample.prompt for sample in place.best}) == 3
    assert [sample.reward for sample in early.worst] == [0.0, 0.0, 0.0]
    assert (late.best[0].oldest_version, late.best[0].newest_version) == (
        late.best[0].step - 2,
        late.best[0].step - 1,
    )


def test_a_line_longer_than_what_is_read_is_read_nevertheless(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    line = next(rollouts(1, random.Random(2)))
    append(path, [msgspec.structs.replace(line, step=n, text="x" * 9000) for n in range(1, 31)])
    places = pick_samples(path, place_bytes=500)
    assert [place.samples for place in places] == [1, 1]
    assert "6,000 characters left out" in places[0].worst[0].text


def test_the_head_tells_how_a_run_ended(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "made", steps=3)
    reader = RunReader(directory)
    assert reader.data().summary.ended == ""
    write_end(directory, RunEnd("goal reached", 1.0))
    assert reader.data().summary.ended == "goal reached"
    write_end(directory, RunEnd("failed", 1.0, "EngineError: engine-0 died\n  and more"))
    assert reader.data().summary.ended == "failed: EngineError: engine-0 died"
