"""What a tracker is, and what one needs to know of a run and of its records.

A tracker is called from one thread of its own, a call at a time and in order, so it may block and
needs no lock. One that fails is told of once and left out from then on: the run goes on, and
metrics.jsonl has everything. `areal_ray.observability.trackers` has those that come with areal_ray,
and says how to write another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from areal_ray.config import Config
from areal_ray.errors import root_cause
from areal_ray.observability.records import EvaluationRecord, Record
from areal_ray.stopping import StopRequested

RunStatus = Literal["finished", "killed", "failed"]

Hyperparameter = bool | int | float | str


class TrackedRun(msgspec.Struct, frozen=True):
    name: str
    """Of its directory, which no other run has."""
    directory: Path
    config: Config
    """As resolved."""
    resumed_step: int | None = None
    """The step that a run goes on from in its directory: what was logged of later ones is taken
    back. None: it begins."""

    @property
    def is_resumed(self) -> bool:
        return self.resumed_step is not None


class Tracker(Protocol):
    def open(self, run: TrackedRun) -> None:
        """Before the first record."""

    def log(self, record: Record) -> None:
        """One step, or one evaluation. An evaluation may come after steps that are later than its
        own: training does not wait for it."""

    def close(self, error: BaseException | None) -> None:
        """The run is over; `error`: what ended it before its end, if something did. `run_status`
        tells what that means."""


class NamedTracker(msgspec.Struct, frozen=True):
    name: str
    """As a message should call it."""
    tracker: Tracker


def run_status(error: BaseException | None) -> RunStatus:
    """`killed`: somebody wanted it to stop."""
    if error is None:
        return "finished"
    wanted = (StopRequested, KeyboardInterrupt, asyncio.CancelledError)
    return "killed" if isinstance(root_cause(error), wanted) else "failed"


def written_at(record: Record) -> float:
    """In seconds since the epoch."""
    return record.at or time.time()


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record by name: `reward`, `mismatch/kl`, `staleness_tokens/2`,
    `evaluation/reward`. Not when it was: that is `step` and `at`."""
    prefix = "evaluation/" if isinstance(record, EvaluationRecord) else ""
    fields = msgspec.to_builtins(record)
    del fields["step"], fields["at"]
    return dict(_numbers(fields.items(), prefix))


def _numbers(fields: Iterable[tuple[object, object]], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in fields:
        if isinstance(value, dict):
            yield from _numbers(value.items(), f"{prefix}{name}/")
        elif isinstance(value, list):
            yield from _numbers(enumerate(value), f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


def hyperparameters(config: Config) -> dict[str, Hyperparameter]:
    """Every value of the config by its key, `trainer.lr`, as an override on the command line has
    it: what is no single value as JSON."""
    return dict(_leaves(msgspec.to_builtins(config), ""))


def _leaves(section: dict[str, object], at: str) -> Iterator[tuple[str, Hyperparameter]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{at}{name}.")
        elif isinstance(value, Hyperparameter):
            yield f"{at}{name}", value
        else:
            yield f"{at}{name}", msgspec.json.encode(value).decode()
