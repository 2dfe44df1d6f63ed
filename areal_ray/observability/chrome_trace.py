"""A window of the run as a Chrome trace: opens in ui.perfetto.dev and chrome://tracing.

Every actor is a process there, every kind of span a row in it, or as many rows as were under way at
once. Times are the nodes' own clocks.

Example: an engine generates from 1.0 to 3.0 s and from 2.0 to 4.0 s: rows `generate` and
`generate 2`. A third, from 3.5 s on, is in the first row again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from areal_ray.observability.run_status import ActorSpans
from areal_ray.observability.spans import Span


class TraceEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    ph: str
    pid: int
    tid: int = 0
    ts: float = 0.0
    """In microseconds, as `dur`."""
    dur: float = 0.0
    args: dict[str, str | int] = {}


class ChromeTrace(msgspec.Struct, frozen=True, rename="camel"):
    trace_events: list[TraceEvent]
    display_time_unit: str = "ms"


def write_trace(path: Path, actors: Sequence[ActorSpans]) -> None:
    """Blocks: call it off the event loop."""
    path.write_bytes(msgspec.json.encode(chrome_trace(actors)))


def chrome_trace(actors: Sequence[ActorSpans]) -> ChromeTrace:
    events: list[TraceEvent] = []
    for pid, actor in enumerate(sorted(actors, key=lambda one: one.who), start=1):
        events.append(TraceEvent("process_name", "M", pid, args={"name": actor.who}))
        events.append(TraceEvent("process_labels", "M", pid, args={"labels": actor.shown}))
        events.append(TraceEvent("process_sort_index", "M", pid, args={"sort_index": pid}))
        for tid, (row, spans) in enumerate(_rows(actor.spans), start=1):
            events.append(TraceEvent("thread_name", "M", pid, tid, args={"name": row}))
            events += [
                TraceEvent(
                    name=span.name,
                    ph="X",
                    pid=pid,
                    tid=tid,
                    ts=round(span.began * 1e6, 1),
                    dur=round(span.seconds * 1e6, 1),
                    args={"detail": span.detail} if span.detail else {},
                )
                for span in spans
            ]
    return ChromeTrace(events)


def _rows(spans: Sequence[Span]) -> Iterator[tuple[str, list[Span]]]:
    """Spans of one name, as many rows as it takes that none overlaps another."""
    by_name: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda one: one.began):
        by_name.setdefault(span.name, []).append(span)
    for name, same in by_name.items():
        rows: list[list[Span]] = []
        free: list[int] = []
        busy: list[tuple[float, int]] = []
        for span in same:
            while busy and busy[0][0] <= span.began:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if free:
                row = heapq.heappop(free)
            else:
                row = len(rows)
                rows.append([])
            rows[row].append(span)
            heapq.heappush(busy, (span.began + span.seconds, row))
        for number, row_spans in enumerate(rows, start=1):
            yield (name if number == 1 else f"{name} {number}"), row_spans
