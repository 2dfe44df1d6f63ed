"""Where the time of each actor went, from timeline.jsonl, in bounded memory.

Each actor is a lane of bins, all `width_s` long, which hold seconds by activity. A cell that lies
in several bins is divided among them by how much of it lies in each, so the sums stay exact. When
there would be too many bins, neighbours are joined and `width_s` doubles.

Time here is the run's own: `t` leaves out the stretches in which nobody was heard, as between a run
and its resumption a week later. `spans` tells where they were.
"""

from __future__ import annotations

import base64
import re
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence

import msgspec
import numpy as np

from areal_ray.observability.timeline import ACTIVITIES, ActivityRecord, EventRecord, TimelineRecord

MAX_BINS = 160_000
"""Of all lanes together."""
MIN_BINS = 256
"""Of each lane, however many there are."""
FIRST_WIDTH_S = 0.25
SILENCE_S = 120.0
"""When nobody was heard for longer, the run was not going on."""
KEPT_FIRST, KEPT_LAST = 100, 400
"""Of the events of each level."""
MAX_EVENT_TEXT = 2000
FULL = 65535
"""A share of 1 in a column of shares."""

_INDEX = {activity: index for index, activity in enumerate(ACTIVITIES)}


class Span(msgspec.Struct):
    """A stretch in which the run was going on."""

    t: float
    began_at: float
    ended_at: float


class Lane(msgspec.Struct, frozen=True):
    who: str
    seconds: dict[str, float]
    """By activity, over the whole run."""
    absent_s: float
    """How long nobody heard of it."""
    tokens: int
    shares: dict[str, str]
    """By activity: a share of each bin, as little-endian 16-bit numbers (65535: all of it) in
    base64. What is missing in a bin, the actor was not there."""


class Event(msgspec.Struct, frozen=True):
    t: float
    at: float
    who: str
    level: str
    text: str


class TimelineData(msgspec.Struct, frozen=True):
    began_t: float
    """Of the first bin."""
    width_s: float
    bins: int
    spans: list[Span]
    lanes: list[Lane]
    events: list[Event]
    """In order. Of very many, the first and the last."""
    counts: dict[str, int]
    """All events, by level."""


class _Kept:
    def __init__(self) -> None:
        self.first: list[EventRecord] = []
        self.last: deque[EventRecord] = deque(maxlen=KEPT_LAST)

    def add(self, event: EventRecord) -> None:
        (self.first if len(self.first) < KEPT_FIRST else self.last).append(event)


class Timeline:
    def __init__(self, max_bins: int = MAX_BINS, first_width_s: float = FIRST_WIDTH_S) -> None:
        self._max_bins = max_bins
        self._width_s = first_width_s
        self._began_t = 0.0
        self._lanes: dict[str, int] = {}
        self._tokens: list[int] = []
        self._seconds = np.zeros((0, MIN_BINS, len(ACTIVITIES)))
        """By lane, bin and activity; a part of the bins is spare."""
        self._low_t, self._high_t = np.inf, -np.inf
        self._spans: list[Span] = []
        self._counts: Counter[str] = Counter()
        self._kept: dict[str, _Kept] = {}

    def take(self, records: Sequence[TimelineRecord]) -> None:
        """The next lines of the file, many at a time."""
        lanes, lengths, ends = [], [], []
        rows, columns, amounts = [], [], []
        for row, record in enumerate(records):
            length = 0.0
            if type(record) is EventRecord:
                self._take_event(record)
                lanes.append(-1)
            else:
                for activity, seconds in record.seconds.items():
                    rows.append(row)
                    columns.append(_INDEX[activity])
                    amounts.append(seconds)
                    length += seconds
                lane = self._lane(record)
                lanes.append(lane)
                self._tokens[lane] += record.tokens
            lengths.append(length)
            ends.append(record.at)
        if not lanes:
            return
        length, end, lane = np.array(lengths), np.array(ends), np.array(lanes)
        self._hear(end - length, end)
        cells = np.zeros((len(lane), len(ACTIVITIES)))
        cells[rows, columns] = amounts
        is_cell = lane >= 0
        if is_cell.any():
            ended = self._t(end)
            self._add(lane[is_cell], (ended - length)[is_cell], ended[is_cell], cells[is_cell])

    def t_of(self, at: float) -> float:
        """The run's own time at a moment; in a silence, the time at which it began."""
        if not self._spans:
            return 0.0
        nth = max(bisect_right(self._spans, at, key=lambda span: span.began_at) - 1, 0)
        span = self._spans[nth]
        t = at - span.began_at + span.t
        return min(t, self._spans[nth + 1].t) if nth + 1 < len(self._spans) else t

    def data(self) -> TimelineData:
        lanes = [self._lane_data(who) for who in sorted(self._lanes, key=_place)]
        return TimelineData(
            began_t=self._began_t,
            width_s=self._width_s,
            bins=self._used_bins() if lanes else 0,
            spans=self._spans,
            lanes=lanes,
            events=self._events(),
            counts=dict(self._counts),
        )

    def _lane(self, record: ActivityRecord) -> int:
        if record.who not in self._lanes:
            self._lanes[record.who] = len(self._lanes)
            self._tokens.append(0)
            more = np.zeros((1, *self._seconds.shape[1:]))
            self._seconds = np.concatenate([self._seconds, more])
        return self._lanes[record.who]

    def _take_event(self, event: EventRecord) -> None:
        self._counts[event.level] += 1
        self._kept.setdefault(event.level, _Kept()).add(event)

    def _hear(self, begun: np.ndarray, ended: np.ndarray) -> None:
        """Begin a new span wherever nobody was heard for long."""
        if not self._spans:
            self._spans.append(Span(0.0, float(begun[0]), float(begun[0])))
        until = np.maximum.accumulate([self._spans[-1].ended_at, *ended])
        for nth in np.nonzero(begun > until[:-1] + SILENCE_S)[0]:
            last = self._spans[-1]
            last.ended_at = float(until[nth])
            t = last.t + last.ended_at - last.began_at
            self._spans.append(Span(t, float(begun[nth]), float(begun[nth])))
        self._spans[-1].ended_at = float(until[-1])

    def _t(self, at: np.ndarray) -> np.ndarray:
        began = np.array([span.began_at for span in self._spans])
        shift = np.array([span.t - span.began_at for span in self._spans])
        return at + shift[np.maximum(np.searchsorted(began, at, side="right") - 1, 0)]

    def _add(
        self, lanes: np.ndarray, begun: np.ndarray, ended: np.ndarray, cells: np.ndarray
    ) -> None:
        self._make_room(float(begun.min()), float(ended.max()))
        width = self._width_s
        first = np.floor((begun - self._began_t) / width).astype(np.int64).clip(0)
        last = np.ceil((ended - self._began_t) / width).astype(np.int64) - 1
        parts = np.maximum(last - first, 0) + 1
        which = np.repeat(np.arange(len(lanes)), parts)
        nth = np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)
        bins = first[which] + nth
        bin_began = self._began_t + bins * width
        inside = np.minimum(ended[which], bin_began + width) - np.maximum(begun[which], bin_began)
        length = np.maximum(ended - begun, 1e-9)[which]
        share = np.where(parts[which] == 1, 1.0, inside / length)
        np.add.at(self._seconds, (lanes[which], bins), cells[which] * share[:, None])

    def _make_room(self, low_t: float, high_t: float) -> None:
        self._low_t, self._high_t = min(self._low_t, low_t), max(self._high_t, high_t)
        limit = max(self._max_bins // len(self._lanes), MIN_BINS)
        while self._bins_before() + self._used_bins() > limit:
            self._resize_to(max(self._seconds.shape[1], 2 * MIN_BINS))
            self._seconds = self._seconds.reshape(len(self._seconds), -1, 2, len(ACTIVITIES)).sum(2)
            self._width_s *= 2
        before = self._bins_before()
        self._began_t -= before * self._width_s
        bins = self._seconds.shape[1]
        while bins < self._used_bins():
            bins *= 2
        if before:
            self._seconds = np.pad(self._seconds, ((0, 0), (before, 0), (0, 0)))
        self._resize_to(bins)

    def _resize_to(self, bins: int) -> None:
        """By spare bins at the end."""
        more = bins - self._seconds.shape[1]
        if more > 0:
            self._seconds = np.pad(self._seconds, ((0, 0), (0, more), (0, 0)))
        self._seconds = self._seconds[:, :bins]

    def _bins_before(self) -> int:
        return max(0, int(np.ceil((self._began_t - self._low_t) / self._width_s)))

    def _used_bins(self) -> int:
        return max(1, int(np.ceil((self._high_t - self._began_t) / self._width_s)))

    def _lane_data(self, who: str) -> Lane:
        lane = self._lanes[who]
        seconds = self._seconds[lane, : self._used_bins()]
        totals = seconds.sum(0)
        shares = np.minimum(np.rint(seconds / self._width_s * FULL), FULL).astype("<u2")
        return Lane(
            who=who,
            seconds={name: round(float(totals[i]), 3) for name, i in _INDEX.items() if totals[i]},
            absent_s=round(max(0.0, self._high_t - self._low_t - float(totals.sum())), 3),
            tokens=self._tokens[lane],
            shares={
                name: base64.b64encode(shares[:, i].tobytes()).decode()
                for name, i in _INDEX.items()
                if totals[i]
            },
        )

    def _events(self) -> list[Event]:
        kept = [event for one in self._kept.values() for event in (*one.first, *one.last)]
        return [
            Event(self.t_of(one.at), one.at, one.who, one.level, one.text[:MAX_EVENT_TEXT])
            for one in sorted(kept, key=lambda event: event.at)
        ]


def _place(who: str) -> tuple[bool, list[tuple[int, str]]]:
    """The trainer first, and engine-10 behind engine-9."""
    parts = re.findall(r"\d+|\D+", who)
    return not who.startswith("trainer"), [
        (int(part), "") if part.isdigit() else (-1, part) for part in parts
    ]
