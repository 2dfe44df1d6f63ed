"""Everything that a report shows, read from a run's files as they grow.

reader = RunReader(directory)
while reader.read():        # a piece at a time
    ...
reader.data()               # as of now; then read() on, whenever there may be more
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from areal_ray.errors import NoRun
from areal_ray.observability.ending import RunEnd, read_end
from areal_ray.observability.report.curves import (
    EvaluationLine,
    Evaluations,
    LagCurve,
    Metrics,
    StepCurves,
    StepLine,
)
from areal_ray.observability.report.lanes import Timeline, TimelineData
from areal_ray.observability.report.samples import ROLLOUTS, SamplePlace, pick_samples
from areal_ray.observability.report.tail import LineDecoder, Tail
from areal_ray.observability.timeline import TIMELINE, TimelineRecord

CONFIG, METRICS = "config.yaml", "metrics.jsonl"
MAX_CONFIG = 64_000


class Summary(msgspec.Struct, frozen=True):
    """The head of the page."""

    name: str
    step: int
    steps: int | None
    """Wanted, if the config tells."""
    goal: float | None
    version: int | None
    reward: float | None
    seconds: float
    generated_tokens: int
    retried_updates: int
    groups_failed: int
    groups_expired: int
    groups_filtered: int
    ended: str
    """How. Empty: it goes on."""


class ReportData(msgspec.Struct, frozen=True):
    made_at: float
    read: float
    """The part of the files that is read by now."""
    unreadable_lines: int
    summary: Summary
    curves: StepCurves
    step_t: list[float | None]
    """When each point of the curves was reached, in the timeline's time."""
    evaluations: Evaluations
    lags: list[LagCurve]
    timeline: TimelineData
    samples: list[SamplePlace]
    config: str


class _Wanted(msgspec.Struct, frozen=True):
    steps: int | None = None
    goal: float | None = None


def check_is_run(directory: Path) -> None:
    if not directory.is_dir():
        raise NoRun(f"{directory}: no such directory; expected a run's, as runs/<name>")
    if not any((directory / name).is_file() for name in (CONFIG, METRICS)):
        raise NoRun(
            f"{directory}: no run: it holds neither {CONFIG} nor {METRICS}; expected a run's "
            "directory, as runs/<name>"
        )


class RunReader:
    """Not for several threads at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._metrics_tail = Tail(directory / METRICS)
        self._timeline_tail = Tail(directory / TIMELINE)
        self._metrics_lines = LineDecoder(StepLine | EvaluationLine)
        self._timeline_lines = LineDecoder(TimelineRecord)
        self._metrics = Metrics()
        self._timeline = Timeline()
        self._samples: list[SamplePlace] = []
        self._samples_size: int | None = None

    def read(self) -> bool:
        """Take in the next piece of the files; whether there was any."""
        metrics = self._metrics_tail.read()
        if metrics.begins_anew:
            self._metrics = Metrics()
        for line in self._metrics_lines.decode(metrics.text):
            self._metrics.take(line)
        timeline = self._timeline_tail.read()
        if timeline.begins_anew:
            self._timeline = Timeline()
        self._timeline.take(self._timeline_lines.decode(timeline.text))
        return bool(metrics.text or timeline.text)

    def read_samples(self) -> bool:
        """Choose the samples anew, if the file has changed; whether it has."""
        path = self._directory / ROLLOUTS
        size = path.stat().st_size if path.exists() else 0
        if size == self._samples_size:
            return False
        self._samples, self._samples_size = pick_samples(path), size
        return True

    def data(self) -> ReportData:
        curves = self._metrics.curves()
        tails = (self._metrics_tail, self._timeline_tail)
        size = sum(tail.size for tail in tails)
        unread = sum(tail.unread_bytes for tail in tails)
        timeline = self._timeline.data()
        config = self._config()
        return ReportData(
            made_at=time.time(),
            read=1.0 - unread / size if size else 1.0,
            unreadable_lines=self._metrics_lines.unreadable + self._timeline_lines.unreadable,
            summary=self._summary(config),
            curves=curves,
            step_t=[
                None if at is None or not timeline.spans else round(self._timeline.t_of(at), 2)
                for at in curves.at
            ],
            evaluations=self._metrics.evaluations(),
            lags=self._metrics.lags(),
            timeline=timeline,
            samples=self._samples,
            config=config[:MAX_CONFIG],
        )

    def _summary(self, config: str) -> Summary:
        try:
            wanted = msgspec.yaml.decode(config or "{}", type=_Wanted)
        except msgspec.MsgspecError:  # it is just being written
            wanted = _Wanted()
        last = self._metrics.last_step
        return Summary(
            name=self._directory.resolve().name,
            step=last.step if last else 0,
            steps=wanted.steps,
            goal=wanted.goal,
            version=last.version if last else None,
            reward=last.reward if last else None,
            seconds=last.seconds if last else 0.0,
            generated_tokens=round(self._metrics.generated_tokens),
            retried_updates=self._metrics.retried_updates,
            groups_failed=last.groups_failed if last else 0,
            groups_expired=last.groups_expired if last else 0,
            groups_filtered=last.groups_filtered if last else 0,
            ended=_shown(read_end(self._directory)),
        )

    def _config(self) -> str:
        try:
            return (self._directory / CONFIG).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""


def _shown(end: RunEnd | None) -> str:
    if end is None:
        return ""
    return f"{end.how}: {end.cause.splitlines()[0]}" if end.cause else end.how
