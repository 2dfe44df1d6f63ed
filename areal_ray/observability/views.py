"""What a run tells about itself while it is on its way, and all who want to hear it."""

from __future__ import annotations

from typing import Protocol

from areal_ray.observability.records import EvaluationRecord, StepRecord


class View(Protocol):
    def phase(self, text: str) -> None:
        """What the run is doing now, when it is not training."""

    def warn(self, text: str) -> None:
        """What went wrong, and was mended or can be lived with."""

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, record: EvaluationRecord) -> None: ...

    def close(self) -> None: ...


class Views:
    """Several of them as one."""

    def __init__(self, *views: View) -> None:
        self._views = views

    def phase(self, text: str) -> None:
        for view in self._views:
            view.phase(text)

    def warn(self, text: str) -> None:
        for view in self._views:
            view.warn(text)

    def step(self, record: StepRecord) -> None:
        for view in self._views:
            view.step(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        for view in self._views:
            view.evaluation(record)

    def close(self) -> None:
        for view in self._views:
            view.close()
