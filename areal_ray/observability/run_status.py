"""A run as it is now, for somebody who looks at it from outside."""

from __future__ import annotations

import msgspec

from areal_ray.observability.actor_report import ActorReport
from areal_ray.observability.records import EvaluationRecord, StepRecord
from areal_ray.observability.spans import Span
from areal_ray.observability.timeline import Activity, EventRecord


class ActorStatus(msgspec.Struct, frozen=True):
    report: ActorReport
    age_s: float
    """How long ago it told so."""
    tokens_per_s: float = 0.0
    """Over the last cells, as the shares of its time."""
    shares: dict[Activity, float] = {}


class RunStatus(msgspec.Struct, frozen=True):
    name: str
    directory: str
    steps: int
    """That it is to take, at most."""
    began: float
    phase: str
    """What the run is doing, in its own words."""
    step: StepRecord | None
    """The last one."""
    first_evaluation: EvaluationRecord | None
    last_evaluation: EvaluationRecord | None
    rewards: list[float]
    """Of the last steps."""
    actors: list[ActorStatus]
    events: list[EventRecord]
    """The last ones that are more than news."""


class ActorSpans(msgspec.Struct, frozen=True):
    """What one actor did in a window of the run."""

    who: str
    shown: str
    spans: list[Span]
