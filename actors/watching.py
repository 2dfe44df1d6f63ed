"""The run as its monitor hears of it: one more view of it, beside the terminal's."""

from __future__ import annotations

from areal_ray.actors.crew import Crew
from areal_ray.observability.records import EvaluationRecord, StepRecord


class MonitorView:
    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def phase(self, text: str) -> None:
        self._crew.phase = text
        self._crew.telemetry.event("info", text)

    def warn(self, text: str) -> None:
        self._crew.phase = text
        self._crew.telemetry.event("warning", text)

    def step(self, record: StepRecord) -> None:
        self._crew.phase = "training"
        self._crew.telemetry.record(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._crew.telemetry.record(record)

    def close(self) -> None:
        pass
