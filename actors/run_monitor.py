"""RunMonitor: the run's front desk. Everybody tells it how he does; who is outside asks here.

It hears every actor every two seconds, writes timeline.jsonl, sets the metrics on Ray's endpoint,
answers `areal-ray status`, gathers traces, and hands commands to the run. No work waits for it: if
it dies, Ray brings it back, actors find it by its name, and what they have to tell is told then.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import ray

from areal_ray import logs
from areal_ray.actors.ray_metrics import RunMetrics
from areal_ray.changes import Changes
from areal_ray.commands import Answer, Command, Order
from areal_ray.deadlines import within
from areal_ray.errors import DeadlineExceeded, described
from areal_ray.observability.actor_report import ActorReport, SpansWanted
from areal_ray.observability.board import Board, SpanCollection
from areal_ray.observability.jsonl import JsonlWriter
from areal_ray.observability.run_status import ActorSpans, RunStatus
from areal_ray.observability.timeline import ActivityRecord, TimelineRecord

GATHER_TIMEOUT_S = 5.0
"""For spans: who has not given his by then is left out."""


class MonitorSpec(msgspec.Struct, frozen=True):
    run: str
    directory: str
    timeline: str
    steps: int
    trace_s: float
    """How much of its end everybody tells with his last word."""


@ray.remote(max_concurrency=1024)
class RunMonitor:
    def __init__(self, spec: MonitorSpec) -> None:
        self._spec = spec
        self._board = Board(spec.run, spec.directory, spec.steps)
        self._metrics = RunMetrics(spec.run)
        self._timeline: JsonlWriter[list[TimelineRecord]] = JsonlWriter(
            Path(spec.timeline), lambda records: records
        )
        self._cant_write = False
        self._gathering = asyncio.Lock()
        self._spans: SpanCollection | None = None
        self._last_spans: dict[str, ActorSpans] = {}
        """Of those who have said their last word, and have not left the run before its end."""
        self._orders: dict[int, Order] = {}
        """Those that are not answered yet."""
        # Later than any of a monitor before this one: the run asks for what came after its last.
        self._orders_made = time.time_ns()
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._changed = Changes()

    def __repr__(self) -> str:
        return f"RunMonitor[{self._spec.run}]"

    # Ray lists the last tasks only: in an hour these would have pushed out all others.
    @ray.method(enable_task_events=False)
    async def hear(self, report: ActorReport) -> SpansWanted | None:
        """One actor's word; the answer is what else is wanted of it."""
        news = self._board.hear(report)
        cell = news[-1] if news and isinstance(news[-1], ActivityRecord) else None
        self._metrics.hear(report, cell)
        self._write(news)
        wanted = [self._take_leave(report)] if report.is_last else []
        if self._spans is not None:
            wanted.append(self._spans.take(report))
            self._changed.notify()
        return min(filter(None, wanted), key=lambda one: one.since, default=None)

    def _take_leave(self, report: ActorReport) -> SpansWanted | None:
        if report.spans is not None:
            self._last_spans[report.who] = ActorSpans(report.who, report.shown, report.spans)
            return None
        return SpansWanted(report.at - self._spec.trace_s) if self._spec.trace_s else None

    async def status(self) -> RunStatus:
        return self._board.status()

    async def spans(self, since: float) -> list[ActorSpans]:
        """What every actor has done since then, as far as it remembers."""
        async with self._gathering:
            collection = self._spans = SpanCollection(since, self._board.those_who_tell())
            try:
                await within(
                    GATHER_TIMEOUT_S,
                    self._changed.until(lambda: collection.is_whole),
                    who="an actor",
                    doing="giving its spans",
                )
            except DeadlineExceeded:
                pass  # who is silent has none to give
            finally:
                self._spans = None
            return collection.given

    async def tell(self, command: Command) -> Answer:
        """From outside: hand it to the run, and wait for what comes of it."""
        order = Order(self._orders_made, command)
        self._orders_made += 1
        answer = self._answers[order.number] = asyncio.get_running_loop().create_future()
        self._orders[order.number] = order
        self._changed.notify()
        try:
            return await answer
        finally:
            del self._answers[order.number]

    async def next_order(self, after: int) -> Order:
        """For the run: the first that came after this one; waits until there is one. It stays until
        it is answered, so that a call that nobody waits for any more takes none away."""
        await self._changed.until(lambda: any(number > after for number in self._orders))
        return self._orders[min(number for number in self._orders if number > after)]

    async def answer(self, number: int, answer: Answer) -> None:
        self._orders.pop(number, None)
        waiting = self._answers.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def forget(self, who: str) -> None:
        """It has left the run."""
        self._board.forget(who)
        self._last_spans.pop(who, None)

    def _write(self, news: list[TimelineRecord]) -> None:
        try:
            if news and not self._cant_write:
                self._timeline.write(news)
        except OSError as error:
            # A full disk must not silence everything else.
            self._cant_write = True
            logs.warning("timeline.jsonl ends here: {}", described(error))

    async def close(self) -> list[ActorSpans]:
        """All that was heard is in the file, when this returns. It returns what everybody has done
        at the end."""
        await asyncio.to_thread(self._timeline.close)
        return list(self._last_spans.values())
