"""What every actor tells every two seconds: all totals only grow, so that a word may be lost."""

from __future__ import annotations

import msgspec

from areal_ray.fleet import MemberStatus
from areal_ray.observability.records import Record
from areal_ray.observability.spans import Span, Timing
from areal_ray.observability.timeline import Activity, EventRecord
from areal_ray.staleness import LedgerCounts
from areal_ray.types import WeightVersion


class EngineFacts(msgspec.Struct, frozen=True, tag="engine"):
    version: WeightVersion
    requests: int
    """In flight."""


class TrainerFacts(msgspec.Struct, frozen=True, tag="trainer"):
    version: WeightVersion


class WorkerFacts(msgspec.Struct, frozen=True, tag="worker"):
    groups: int
    """That run here."""


class QueueFacts(msgspec.Struct, frozen=True, tag="queue"):
    groups: int
    """That wait, or are on loan."""
    nbytes: int


class ControllerFacts(msgspec.Struct, frozen=True, tag="controller"):
    ledger: LedgerCounts
    engines: list[MemberStatus]
    workers: list[MemberStatus]
    is_paused: bool


class ManagerFacts(msgspec.Struct, frozen=True, tag="manager"):
    members: int
    """Engines that take part in weight updates."""


class RunFacts(msgspec.Struct, frozen=True, tag="run"):
    """Of the process that drives the run."""

    phase: str
    """What it is at, in its own words."""


Facts = (
    RunFacts
    | EngineFacts
    | TrainerFacts
    | WorkerFacts
    | QueueFacts
    | ControllerFacts
    | ManagerFacts
)


class Totals(msgspec.Struct, frozen=True):
    """Of one process, since its beginning."""

    activity: dict[Activity, float] = {}
    """Seconds by activity, of those that have devices or wait for them."""
    tokens: int = 0


class ActorReport(msgspec.Struct, frozen=True):
    who: str
    shown: str
    """Its repr: what it is, and does."""
    process: str
    """Unlike that of the same actor before a restart: totals begin anew with it."""
    at: float
    facts: Facts
    loop_p99_ms: float
    loop_worst_ms: float
    totals: Totals = Totals()
    told: Totals = Totals()
    """What was heard before, for a monitor that was restarted since."""
    devices: int = 0
    """GPUs that it has, or 1 on CPUs; 0 for the control plane."""
    timings: dict[str, Timing] = {}
    events: list[EventRecord] = []
    """Since the last report."""
    records: list[Record] = []
    """Steps and evaluations since then; the driver tells them."""
    is_last: bool = False
    """Nothing more will come of this process, but the spans that it is then asked for."""
    spans: list[Span] | None = None
    """If it was asked for them."""


class SpansWanted(msgspec.Struct, frozen=True):
    """The answer to a report: the next one shall bring the spans since then."""

    since: float
