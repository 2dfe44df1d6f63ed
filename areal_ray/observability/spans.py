"""A flight recorder: the last spans of what a process did, kept at hand for whoever asks.

It is always on and costs a few microseconds a span, since nothing is sent or written until a trace
is asked for: so one can look at the minute before the trouble was seen. Beside the spans it keeps
how often and how long each kind of work was done, as totals that only grow: two tasks that time the
same thing at once both count, and no reader takes a value away from another.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

KEPT_SPANS = 20_000


class Span(msgspec.Struct, frozen=True, array_like=True):
    name: str
    began: float
    """In seconds since the epoch."""
    seconds: float
    detail: str = ""


class Timing(msgspec.Struct, frozen=True):
    """All that was done under one name."""

    times: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0

    def with_one_more(self, seconds: float) -> Timing:
        return Timing(self.times + 1, self.seconds + seconds, max(self.longest_s, seconds))


class SpanRecorder:
    """Spans may end on any thread."""

    def __init__(self, kept: int = KEPT_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=kept)
        self._timings: dict[str, Timing] = {}
        self._turn = threading.Lock()

    @contextmanager
    def span(self, name: str, detail: str = "") -> Iterator[None]:
        began, clock = time.time(), time.perf_counter()
        try:
            yield
        finally:
            self.add(Span(name, began, time.perf_counter() - clock, detail))

    def add(self, span: Span) -> None:
        with self._turn:
            self._spans.append(span)
            before = self._timings.get(span.name, Timing())
            self._timings[span.name] = before.with_one_more(span.seconds)

    def since(self, when: float) -> list[Span]:
        """Those that ended after `when`, and are still kept."""
        with self._turn:
            spans = list(self._spans)
        return [span for span in spans if span.began + span.seconds >= when]

    @property
    def timings(self) -> dict[str, Timing]:
        with self._turn:
            return dict(self._timings)
