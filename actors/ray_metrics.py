"""A run's metrics in Ray's own Prometheus endpoint, set by the monitor from what it hears."""

from __future__ import annotations

from typing import get_args

from ray.util.metrics import Counter, Gauge, Histogram

from areal_ray.fleet import State
from areal_ray.observability import metrics
from areal_ray.observability.actor_report import (
    ActorReport,
    ControllerFacts,
    EngineFacts,
    QueueFacts,
)
from areal_ray.observability.metrics import METRICS, Metric
from areal_ray.observability.records import Record, StepRecord
from areal_ray.observability.timeline import ActivityRecord

LEDGER_STATES = ("running", "accepted", "filtered", "failed", "expired")
ENGINE_STATES: tuple[State, ...] = get_args(State)


class RunMetrics:
    def __init__(self, run: str) -> None:
        self._run = run
        self._instruments = {metric.name: _instrument(metric) for metric in METRICS}
        self._served = 0

    def hear(self, report: ActorReport, cell: ActivityRecord | None) -> None:
        self._set(metrics.LOOP_LAG_P99_MS, report.loop_p99_ms, actor=report.who)
        for event in report.events:
            if event.level != "info":
                self._count(metrics.EVENTS, 1, who=event.who, level=event.level)
        for record in report.records:
            self._note(record)
        match report.facts:
            case EngineFacts() as engine:
                lag = max(0, self._served - engine.version)
                self._set(metrics.REQUESTS, engine.requests, engine=report.who)
                self._set(metrics.VERSION_LAG, lag, engine=report.who)
            case QueueFacts() as queue:
                self._set(metrics.QUEUE_GROUPS, queue.groups)
                self._set(metrics.QUEUE_BYTES, queue.nbytes)
            case ControllerFacts() as controller:
                self._hear_controller(controller)
        if cell is not None:
            self._hear_cell(cell, report)

    def _hear_controller(self, facts: ControllerFacts) -> None:
        self._served = facts.ledger.version
        self._set(metrics.VERSION, facts.ledger.version)
        for state in LEDGER_STATES:
            self._set(metrics.GROUPS, getattr(facts.ledger, state), state=state)
        for engine in facts.engines:
            for state in ENGINE_STATES:
                is_so = float(engine.state == state)
                self._set(metrics.ENGINE_STATE, is_so, engine=engine.name, state=state)

    def _hear_cell(self, cell: ActivityRecord, report: ActorReport) -> None:
        if isinstance(report.facts, EngineFacts):
            self._count(metrics.GENERATED_TOKENS, cell.tokens, engine=cell.who)
        for activity, seconds in cell.seconds.items():
            self._count(metrics.ACTIVITY_SECONDS, seconds, actor=cell.who, activity=activity)
            if activity != "busy":
                idle_s = seconds * report.devices
                self._count(metrics.GPU_IDLE_SECONDS, idle_s, actor=cell.who, cause=activity)

    def _note(self, record: Record) -> None:
        if not isinstance(record, StepRecord):
            self._set(metrics.HELD_OUT_REWARD, record.reward)
            return
        for metric, value in (
            (metrics.REWARD, record.reward),
            (metrics.STEP, record.step),
            (metrics.TRAIN_SECONDS, record.train_s),
            (metrics.TRAINER_WAITED_SECONDS, record.waited_s),
            (metrics.LOSS, record.loss),
            (metrics.GRAD_NORM, record.grad_norm),
            (metrics.KL_TO_BEHAVIOUR, record.kl_to_behaviour),
            (metrics.RESPONSE_TOKENS, record.response_tokens),
            (metrics.STALENESS_MEAN, record.staleness_mean),
        ):
            self._set(metric, value)
        for versions_old, samples in enumerate(record.staleness_samples):
            for _ in range(samples):
                self._instruments[metrics.STALENESS.name].observe(
                    versions_old or 0.01, {"run": self._run}
                )
        for phase, seconds in (
            ("stage", record.staged_s),
            ("commit", record.commit_s),
            ("pause", record.pause_s),
        ):
            if seconds is not None:
                self._set(metrics.UPDATE_PHASE_SECONDS, seconds, phase=phase)

    def _set(self, metric: Metric, value: float, **tags: str) -> None:
        self._instruments[metric.name].set(value, {"run": self._run, **tags})

    def _count(self, metric: Metric, amount: float, **tags: str) -> None:
        if amount > 0:
            self._instruments[metric.name].inc(amount, {"run": self._run, **tags})


def _instrument(metric: Metric) -> Gauge | Counter | Histogram:
    name, tags = metric.full_name, metric.tags
    if metric.kind == "histogram":
        return Histogram(name, metric.description, boundaries=list(metric.bounds), tag_keys=tags)
    kind = Gauge if metric.kind == "gauge" else Counter
    return kind(name, metric.description, tag_keys=tags)
