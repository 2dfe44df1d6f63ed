"""The board: the last word of every actor, and what follows from it. A pure state machine.

    actor's report -> cells and events for timeline.jsonl, and the run's status for who asks

Reports carry totals, so a report that is lost costs a cell's sharpness and nothing else. Totals
begin anew with a new process, which is then counted from its beginning. A new board goes on from
what each actor has told the one before.

Example: engine-0 has told {"busy": 7.0} and tells {"busy": 7.6, "paused": 0.4} a second later: that
is a cell {"busy": 0.6, "paused": 0.4}. After a restart it tells {"restarting": 0.9}: so is that.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from areal_ray.observability.actor_report import (
    ActorReport,
    EngineFacts,
    RunFacts,
    SpansWanted,
    TrainerFacts,
)
from areal_ray.observability.records import EvaluationRecord, Record, StepRecord
from areal_ray.observability.run_status import ActorSpans, ActorStatus, RunStatus
from areal_ray.observability.timeline import (
    Activity,
    ActivityRecord,
    EventRecord,
    TimelineRecord,
)

KEPT_EVENTS = 50
KEPT_REWARDS = 120
RECENT_CELLS = 5
"""Over so many cells an actor's tokens/s and the shares of its time are told."""
SILENT_S = 8.0
"""Who has not told anything for so long is not waited for."""


class SpanCollection:
    """Who is still to give its spans since some moment, and who has."""

    def __init__(self, since: float, asked: Sequence[str]) -> None:
        self._since = since
        self._missing = set(asked)
        self.given: list[ActorSpans] = []

    @property
    def is_whole(self) -> bool:
        return not self._missing

    def take(self, report: ActorReport) -> SpansWanted | None:
        """What to answer a report with."""
        if report.who not in self._missing:
            return None
        if report.spans is None:
            return SpansWanted(self._since)
        self._missing.discard(report.who)
        self.given.append(ActorSpans(report.who, report.shown, report.spans))
        return None


class Board:
    def __init__(
        self, name: str, directory: str, steps: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._name = name
        self._directory = directory
        self._steps = steps
        self._clock = clock
        self._began = clock()
        self._last: dict[str, ActorReport] = {}
        self._heard_at: dict[str, float] = {}
        self._cells: dict[str, deque[ActivityRecord]] = {}
        self._step: StepRecord | None = None
        self._evaluations: list[EvaluationRecord] = []
        self._rewards: deque[float] = deque(maxlen=KEPT_REWARDS)
        self._events: deque[EventRecord] = deque(maxlen=KEPT_EVENTS)

    def last(self, who: str) -> ActorReport | None:
        return self._last.get(who)

    def hear(self, report: ActorReport) -> list[TimelineRecord]:
        """What is new in it."""
        before = self._last.get(report.who)
        self._last[report.who] = report
        self._heard_at[report.who] = self._clock()
        self._events.extend(event for event in report.events if event.level != "info")
        for record in report.records:
            self._note(record)
        cell = cell_between(before, report)
        if cell is None:
            return list(report.events)
        self._cells.setdefault(report.who, deque(maxlen=RECENT_CELLS)).append(cell)
        return [*report.events, cell]

    def _note(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self._step = record
            self._rewards.append(record.reward)
        else:
            self._evaluations = [*self._evaluations[:1], record]

    def those_who_tell(self) -> list[str]:
        now = self._clock()
        return [
            who
            for who, heard_at in self._heard_at.items()
            if now - heard_at < SILENT_S and not self._last[who].is_last
        ]

    def forget(self, who: str) -> None:
        """It has left for good."""
        for known in (self._last, self._heard_at, self._cells):
            known.pop(who, None)

    def status(self) -> RunStatus:
        now = self._clock()
        run = self._last.get("run")
        return RunStatus(
            name=self._name,
            directory=self._directory,
            steps=self._steps,
            began=self._began,
            phase=run.facts.phase if run and isinstance(run.facts, RunFacts) else "starting",
            step=self._step,
            first_evaluation=self._evaluations[0] if self._evaluations else None,
            last_evaluation=self._evaluations[-1] if self._evaluations else None,
            rewards=list(self._rewards),
            actors=[
                self._status_of(report, now - self._heard_at[who])
                for who, report in self._last.items()
            ],
            events=list(self._events),
        )

    def _status_of(self, report: ActorReport, age_s: float) -> ActorStatus:
        cells = self._cells.get(report.who, ())
        spent: Counter[Activity] = Counter()
        for cell in cells:
            spent.update(cell.seconds)
        seconds = spent.total()
        if not seconds:
            return ActorStatus(report, age_s)
        return ActorStatus(
            report,
            age_s,
            tokens_per_s=sum(cell.tokens for cell in cells) / seconds,
            shares={activity: share / seconds for activity, share in spent.items()},
        )


def cell_between(before: ActorReport | None, now: ActorReport) -> ActivityRecord | None:
    """What an actor did between two of its reports, if it tells such things."""
    if not now.totals.activity:
        return None
    is_same = before is not None and before.process == now.process
    known = before.totals if is_same else now.told
    seconds = {
        activity: round(total - known.activity.get(activity, 0.0), 4)
        for activity, total in now.totals.activity.items()
    }
    return ActivityRecord(
        who=now.who,
        at=round(now.at, 3),
        seconds={activity: spent for activity, spent in seconds.items() if spent > 0},
        tokens=now.totals.tokens - known.tokens,
        requests=now.facts.requests if isinstance(now.facts, EngineFacts) else 0,
        version=now.facts.version if isinstance(now.facts, EngineFacts | TrainerFacts) else None,
    )
