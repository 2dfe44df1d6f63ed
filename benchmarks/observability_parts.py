"""What each part of observability costs by itself, in CPU time: for `observability.py`.

What tells and what hears is measured with a real `RunMonitor` in a process of its own, with all
that Ray does to carry a report; the actors that tell are simulated in this process.
"""

from __future__ import annotations

import asyncio
import pickle
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import ray
from common import CpuMeter, CpuUse, median, on_their_loops, say, show
from ray.actor import ActorHandle

from areal_ray.actors.run_monitor import MonitorSpec, RunMonitor
from areal_ray.actors.telemetry import TELL_EVERY_S, MonitorAddress, Telemetry
from areal_ray.actors.trajectory_queue import TrajectoryQueue
from areal_ray.fleet import MemberStatus
from areal_ray.observability.activity import ActivityMeter
from areal_ray.observability.actor_report import (
    ActorReport,
    ControllerFacts,
    EngineFacts,
    Facts,
    QueueFacts,
    Totals,
    TrainerFacts,
    WorkerFacts,
)
from areal_ray.observability.spans import KEPT_SPANS, Span, SpanRecorder, Timing
from areal_ray.staleness import LedgerCounts

REPEATS = 7
SPANS = 20_000
TOLD = 500
ALIKE = 3
LOOP_TICKS_KEPT = 6000
ADDRESS = MonitorAddress("monitor of the parts", "areal_ray/parts")
CONTROL_PLANE = ("controller", "queue", "worker-0", "trainer")


@dataclass(frozen=True)
class Parts:
    span_ns: float
    switch_ns: float
    report_us: float
    """To make a report, once the loop's timer has ten minutes to tell of."""
    trace_ms: float
    """To gather and encode all spans that an actor keeps."""
    tell_ms: float
    """All that a report costs who tells it, Ray's part of it too."""
    hear_ms: float
    """All that it costs the monitor."""
    idle_actor_ms_per_s: dict[str, float]
    """Of an actor that has nothing to do: all in all, by what it measures and tells."""
    actors: int
    idle: CpuUse
    busy: CpuUse


async def measure_parts(actors: int, seconds: float) -> Parts:
    recorder, meter = SpanRecorder(), ActivityMeter("waiting for data")
    span_ns, switch_ns = cheapest_ns(timed(recorder)), cheapest_ns(switched(meter)) / 2
    full = SpanRecorder()
    for number in range(KEPT_SPANS):
        full.add(Span("generation", 1e9 + number, 0.5, f"group {number}"))
    trace_ms = 1e3 * min(spent_s(lambda: pickle.dumps(full.since(0.0))) for _ in range(REPEATS))
    async with monitor() as heard:
        say(f"{TOLD} reports, one after the other")
        teller = an_engine(meter)
        report_us = cheapest_ns(lambda: teller._report(None, False), times=100) / 1e3
        tell_ms, hear_ms = await cost_of_a_report(teller)
        idle_actors = await cost_of_idle_actors(seconds)
        say(f"a monitor that hears nobody, then {actors} actors, for {seconds:.0f} s each")
        idle = await cpu_use(lambda: asyncio.sleep(seconds))
        busy = await cpu_use(lambda: tell_for(heard, actors, seconds))
        await teller.close()
    return Parts(
        span_ns=span_ns,
        switch_ns=switch_ns,
        report_us=report_us,
        trace_ms=trace_ms,
        tell_ms=tell_ms,
        hear_ms=hear_ms,
        idle_actor_ms_per_s=idle_actors,
        actors=actors,
        idle=idle,
        busy=busy,
    )


def timed(recorder: SpanRecorder) -> Callable[[], None]:
    def once() -> None:
        with recorder.span("generation", "group 17"):
            pass

    return once


def switched(meter: ActivityMeter) -> Callable[[], None]:
    def once() -> None:
        with meter.during("busy"):
            pass

    return once


def cheapest_ns(once: Callable[[], object], times: int = SPANS) -> float:
    """The best of some repeats: what else the cores do only ever adds."""

    def all_of_them() -> None:
        for _ in range(times):
            once()

    return 1e9 * min(spent_s(all_of_them) for _ in range(REPEATS)) / times


def spent_s(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


@asynccontextmanager
async def monitor() -> AsyncIterator[ActorHandle]:
    with tempfile.TemporaryDirectory() as directory:
        spec = MonitorSpec("parts", directory, str(Path(directory) / "timeline.jsonl"), 1, 60.0)
        actor = RunMonitor.options(
            name=ADDRESS.name, namespace=ADDRESS.namespace, num_cpus=0
        ).remote(spec)
        try:
            await actor.status.remote()
            yield actor
            await actor.close.remote()
        finally:
            ray.kill(actor)


def an_engine(meter: ActivityMeter) -> Telemetry:
    telemetry = Telemetry(
        "engine-0",
        monitor=ADDRESS,
        facts=lambda: EngineFacts(version=17, requests=63),
        shown=lambda: "GenerationActor[engine-0 v17 busy 63 req]",
        meter=meter,
        tokens=lambda: 812_000,
        devices=1,
    )
    for name in ("start", "generate", "stage", "commit"):
        telemetry.spans.add(Span(name, 1e9, 0.5))
    for _ in range(LOOP_TICKS_KEPT):
        telemetry._health._window.add(0.001)
    return telemetry


async def cost_of_a_report(teller: Telemetry) -> tuple[float, float]:
    """In milliseconds of CPU: for who tells it, and for who hears it."""
    await teller._tell(10.0)
    began = time.process_time()

    async def tell_them() -> None:
        for _ in range(TOLD):
            await teller._tell(10.0)

    use = await cpu_use(tell_them)
    tell_ms = 1e3 * (time.process_time() - began) / TOLD
    return tell_ms, 1e3 * use.seconds["RunMonitor"] / TOLD


async def cost_of_idle_actors(seconds: float) -> dict[str, float]:
    """Milliseconds of CPU a second, the median of some queues that nobody uses."""

    async def fall_silent(telemetry: Telemetry) -> None:
        await telemetry.close()

    async def grow_old(telemetry: Telemetry) -> None:
        for _ in range(LOOP_TICKS_KEPT):
            telemetry._health._window.add(0.001)

    async def spent_s() -> list[list[float]]:
        return [
            await asyncio.gather(
                *(one.__ray_call__.remote(lambda _: __import__("time").process_time()) for one in q)
            )
            for q in queues.values()
        ]

    queues = {
        "silent": [a_queue(None) for _ in range(ALIKE)],
        "telemetry: false": [a_queue(None) for _ in range(ALIKE)],
        "telling": [a_queue(ADDRESS) for _ in range(ALIKE)],
    }
    try:
        await on_their_loops(chain(*queues.values()), grow_old)
        await on_their_loops(queues["silent"], fall_silent)
        say(f"{3 * ALIKE} idle actors, for {seconds:.0f} s")
        began, before = time.perf_counter(), await spent_s()
        await asyncio.sleep(seconds)
        elapsed_s, after = time.perf_counter() - began, await spent_s()
    finally:
        for queue in chain(*queues.values()):
            ray.kill(queue)
    return {
        kind: 1e3 * median([b - a for a, b in zip(first, last, strict=True)]) / elapsed_s
        for kind, first, last in zip(queues, before, after, strict=True)
    }


def a_queue(monitor: MonitorAddress | None) -> ActorHandle:
    return TrajectoryQueue.options(num_cpus=0).remote(
        batch=1, max_groups=1, max_bytes=1, max_staleness=0, window=None, monitor=monitor
    )


async def cpu_use(work: Callable[[], object]) -> CpuUse:
    meter = CpuMeter()
    await work()
    return meter.use()


async def tell_for(heard: ActorHandle, actors: int, seconds: float) -> None:
    """Each as often as actors do, one after the other."""
    loop = asyncio.get_running_loop()
    began, told, per_s = loop.time(), 0, actors / TELL_EVERY_S
    names = [*CONTROL_PLANE, *(f"engine-{n}" for n in range(actors - len(CONTROL_PLANE)))]
    while told < per_s * seconds:
        await asyncio.sleep(began + told / per_s - loop.time())
        await heard.hear.remote(a_report(names, names[told % actors], after_s=told / per_s))
        told += 1


def a_report(names: list[str], who: str, after_s: float) -> ActorReport:
    has_devices = who == "trainer" or who.startswith("engine")
    activity = {"busy": 0.9 * after_s, "waiting for data": 0.1 * after_s} if has_devices else {}
    return ActorReport(
        who=who,
        shown=f"{who}[v17 busy 63 req]",
        process="1f0e",
        at=1e9 + after_s,
        facts=facts_of(names, who, after_s),
        loop_p99_ms=1.3,
        loop_worst_ms=20.0,
        totals=Totals(activity, tokens=int(800 * after_s)),
        devices=int(has_devices),
        timings={name: Timing(1000, 500.0, 2.0) for name in ("generate", "stage", "commit")},
    )


def facts_of(names: list[str], who: str, after_s: float) -> Facts:
    match who:
        case "controller":
            serving = [MemberStatus(name, "serving", 1, False, "") for name in names]
            engines = [member for member in serving if member.name.startswith("engine")]
            ledger = LedgerCounts(version=17, running=512, accepted=int(100 * after_s))
            return ControllerFacts(ledger, engines, serving[2:3], is_paused=False)
        case "queue":
            return QueueFacts(groups=128, nbytes=1 << 27)
        case "worker-0":
            return WorkerFacts(groups=512)
        case "trainer":
            return TrainerFacts(version=17)
        case _:
            return EngineFacts(version=17, requests=63)


def report_parts(parts: Parts) -> None:
    share = 100.0 * parts.busy.cores("RunMonitor")
    idle_share = 100.0 * parts.idle.cores("RunMonitor")
    rays = 100.0 * (parts.busy.cores("Ray itself") - parts.idle.cores("Ray itself"))
    show(
        ["part", "CPU"],
        [
            ["a span", f"{parts.span_ns:,.0f} ns"],
            ["a switch of a meter", f"{parts.switch_ns:,.0f} ns"],
            ["making a report", f"{parts.report_us:,.0f} us"],
            ["telling it, all in all", f"{parts.tell_ms:.2f} ms"],
            ["hearing it, all in all", f"{parts.hear_ms:.2f} ms"],
            [f"giving {KEPT_SPANS:,} spans for a trace", f"{parts.trace_ms:.0f} ms"],
            *(
                [f"an idle actor, {kind}", f"{100 * ms / 1e3:.2f} % of a core"]
                for kind, ms in parts.idle_actor_ms_per_s.items()
            ),
            ["a monitor that hears nobody", f"{idle_share:.2f} % of a core"],
            [f"a monitor with {parts.actors} actors", f"{share:.2f} % of a core"],
            ["what it then adds to Ray's own processes", f"{rays:.2f} % of a core"],
        ],
        {
            "span_ns": parts.span_ns,
            "meter_switch_ns": parts.switch_ns,
            "make_report_us": parts.report_us,
            "tell_ms": parts.tell_ms,
            "hear_ms": parts.hear_ms,
            "trace_ms": parts.trace_ms,
            "idle_actor_ms_per_s": list(parts.idle_actor_ms_per_s.values()),
            "actors": parts.actors,
            "monitor_idle_percent_of_core": idle_share,
            "monitor_percent_of_core": share,
            "rays_own_added_percent_of_core": rays,
        },
    )
    print()
