"""What everybody did when, in timeline.jsonl: how each actor spent its time, and what happened.

An actor tells every two seconds or so how long it did what since its last word; the seconds of a
cell add up to its length, so that sums over any stretch are exact and a long run can be drawn from
sums of cells. Where an actor has no cell, nobody heard of it: it was not there.

Example: engine-0 tells at 100.0 and 101.0. A commit of 60 ms and 0.3 s without a request make

    {"kind":"activity","who":"engine-0","at":101.0,"version":17,"tokens":812,"requests":63,
     "seconds":{"busy":0.64,"waiting for data":0.3,"paused":0.06}}
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import msgspec

from areal_ray.types import WeightVersion

TIMELINE = "timeline.jsonl"

Activity = Literal[
    "busy",
    "waiting for data",
    "waiting for weights",
    "paused",
    "resting",
    "saving",
    "restarting",
    "idle",
]
"""`waiting for weights`: an engine that has none yet, or a trainer that sends them. `paused`: while
weights are swapped. `resting`: while the others have the devices. `saving`: the copy for a
checkpoint, or the export. `idle`: none of these, as a trainer between two calls."""

ACTIVITIES: tuple[Activity, ...] = get_args(Activity)


class ActivityRecord(msgspec.Struct, frozen=True, tag="activity", tag_field="kind"):
    """A cell: what one actor did since the cell before, or for as long as it has been there."""

    who: str
    at: float
    """Its end, in seconds since the epoch."""
    seconds: dict[Activity, float]
    """Those that are not 0."""
    tokens: int = 0
    """Generated (an engine) or trained on (the trainer) in it."""
    requests: int = 0
    """In flight at its end."""
    version: WeightVersion | None = None

    @property
    def began(self) -> float:
        return self.at - sum(self.seconds.values())


class EventRecord(msgspec.Struct, frozen=True, tag="event", tag_field="kind"):
    """Something that happened once: a loss, a recovery, a command, a phase of the run."""

    at: float
    who: str
    """`engine-0`, `worker-1`, `trainer`, `queue`, `controller` or `run`."""
    level: Literal["info", "warning", "error"]
    text: str


TimelineRecord = ActivityRecord | EventRecord


def read_timeline(path: Path) -> list[TimelineRecord]:
    """All whole lines, in the order in which they were heard; none if there is no file."""
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return msgspec.json.Decoder(TimelineRecord).decode_lines(whole)
