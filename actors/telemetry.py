"""The part of an actor that tells how it does: every two seconds, to the run's monitor.

It owns the actor's loop timer, its flight recorder and its activity meter. Nothing depends on what
it tells: where the monitor is away, that is logged once, events and records are kept until somebody
hears them, and the actor goes on. Without a monitor it only measures.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, TypeVar

import ray
from ray.actor import ActorHandle

from areal_ray import logs
from areal_ray.deadlines import within
from areal_ray.errors import described
from areal_ray.observability.activity import ActivityMeter
from areal_ray.observability.actor_report import ActorReport, Facts, SpansWanted, Totals
from areal_ray.observability.loop_health import LoopHealth, LoopReport
from areal_ray.observability.records import Record
from areal_ray.observability.spans import SpanRecorder
from areal_ray.observability.timeline import EventRecord

T = TypeVar("T")

TELL_EVERY_S = 2.0
"""Most of what seeing a run costs is this call and its hearing: half as often costs half."""
TELL_TIMEOUT_S = 10.0
LAST_WORD_TIMEOUT_S = 4.0
MAX_UNTOLD = 1000
"""Events and records that are kept, each, while nobody hears them."""


@dataclass(frozen=True)
class MonitorAddress:
    """Where the run's monitor is found: by its name, so that one who was restarted finds it too."""

    name: str
    namespace: str


class Telemetry:
    def __init__(
        self,
        who: str,
        *,
        monitor: MonitorAddress | None,
        facts: Callable[[], Facts],
        shown: Callable[[], str],
        meter: ActivityMeter | None = None,
        tokens: Callable[[], int] = lambda: 0,
        devices: int = 0,
    ) -> None:
        """`facts`, `shown` and `tokens` (in all, by now) are asked for each report. `devices`: GPUs
        that this actor uses."""
        self._who = who
        self._address = monitor
        self._facts = facts
        self._shown = shown
        self._tokens = tokens
        self._devices = devices
        self._told = Totals()
        self._process = uuid.uuid4().hex
        self._health = LoopHealth(who=who)
        self._monitor: ActorHandle | None = None
        self._events: list[EventRecord] = []
        self._records: list[Record] = []
        self._telling: asyncio.Task[None] | None = None
        self._is_troubled = False
        self._given_up = 0
        self.meter = meter
        self.spans = SpanRecorder()

    def start(self) -> None:
        """Once, on the running loop."""
        self._health.start()
        if self._address is not None:
            self._telling = asyncio.create_task(self._tell_for_ever())

    def loop(self) -> LoopReport:
        return self._health.report()

    def span(self, name: str, detail: str = "") -> AbstractContextManager[None]:
        return self.spans.span(name, detail)

    def event(self, level: Literal["info", "warning", "error"], text: str, who: str = "") -> None:
        """`who`: if it happened to somebody else."""
        self._keep(self._events, EventRecord(time.time(), who or self._who, level, text))

    def record(self, record: Record) -> None:
        self._keep(self._records, record)

    def _keep(self, untold: list[T], one: T) -> None:
        if self._address is None:
            return
        if len(untold) < MAX_UNTOLD:
            untold.append(one)
        else:
            self._given_up += 1

    def stop(self) -> asyncio.Task[None] | None:
        """At once, without a word: a call after Ray is shut down would start another cluster."""
        self._health.close()
        telling, self._telling = self._telling, None
        if telling is not None:
            telling.cancel()
        return telling

    async def close(self) -> None:
        """With a last word, if somebody hears it, and the spans that are then wanted."""
        if (telling := self.stop()) is not None:
            await asyncio.gather(telling, return_exceptions=True)
            try:
                wanted = await self._tell(LAST_WORD_TIMEOUT_S, is_last=True)
                if wanted is not None:
                    await self._tell(LAST_WORD_TIMEOUT_S, spans_since=wanted.since, is_last=True)
            except Exception as error:  # noqa: BLE001 - what ends must end, heard or not
                logs.debug("{}: its last word was not heard: {}", self._who, described(error))

    async def _tell_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            try:
                wanted = await self._tell(TELL_TIMEOUT_S)
                if wanted is not None:
                    await self._tell(TELL_TIMEOUT_S, spans_since=wanted.since)
                self._is_troubled = False
            except Exception as error:  # noqa: BLE001 - what watches outlives what it meets
                self._monitor = None
                if not self._is_troubled:
                    logs.warning("{} is not heard by the monitor: {}", self._who, described(error))
                self._is_troubled = True

    async def _tell(
        self, timeout_s: float, *, spans_since: float | None = None, is_last: bool = False
    ) -> SpansWanted | None:
        if self._monitor is None:
            address = self._address
            self._monitor = await asyncio.to_thread(ray.get_actor, address.name, address.namespace)
        report = self._report(spans_since, is_last)
        wanted = await within(
            timeout_s, self._monitor.hear.remote(report), who="the monitor", doing="listening"
        )
        self._told = report.totals
        if self._given_up:
            logs.warning("{}: {} events and records were never heard", self._who, self._given_up)
            self._given_up = 0
        del self._events[: len(report.events)]
        del self._records[: len(report.records)]
        return wanted

    def _report(self, spans_since: float | None, is_last: bool) -> ActorReport:
        loop = self._health.report()
        return ActorReport(
            who=self._who,
            shown=self._shown(),
            process=self._process,
            at=time.time(),
            facts=self._facts(),
            loop_p99_ms=loop.p99_ms,
            loop_worst_ms=loop.worst_ms,
            totals=Totals(
                activity=self.meter.totals if self.meter is not None else {},
                tokens=self._tokens(),
            ),
            told=self._told,
            devices=self._devices,
            timings=self.spans.timings,
            events=list(self._events),
            records=list(self._records),
            is_last=is_last,
            spans=None if spans_since is None else self.spans.since(spans_since),
        )
