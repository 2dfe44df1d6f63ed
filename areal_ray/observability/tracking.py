"""Trackers: where a run's records go besides metrics.jsonl.

A tracker is called from one thread of its own, a call at a time and in order, so it may block and
needs no lock. One that fails is told of once and left out from then on: the run goes on, and
metrics.jsonl has everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from areal_ray.config import Config
from areal_ray.observability.records import EvaluationRecord, Record


class TrackedRun(msgspec.Struct, frozen=True):
    name: str
    """Of its directory, which no other run has."""
    directory: Path
    config: Config
    """As resolved."""
    is_resumed: bool = False


class Tracker(Protocol):
    def open(self, run: TrackedRun) -> None:
        """Before the first record."""

    def log(self, record: Record) -> None:
        """One step, or one evaluation."""

    def close(self, error: BaseException | None) -> None:
        """The run is over; `error`: what made it fail, if it did."""


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of a record by name: `reward`, `mismatch/kl`, `evaluation/reward`."""
    prefix = "evaluation/" if isinstance(record, EvaluationRecord) else ""
    yield from _numbers(msgspec.to_builtins(record), prefix)


def _numbers(fields: dict[str, object], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
            yield f"{prefix}{name}", float(value)
