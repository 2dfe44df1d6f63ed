"""The run's monitor in a rehearsed run: what it hears, writes, shows, and hands on."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from areal_ray.actors.telemetry import MAX_UNTOLD, MonitorAddress, Telemetry
from areal_ray.commands import Answer, Command, Pause, Resize, Resume
from areal_ray.observability.actor_report import (
    ActorReport,
    ControllerFacts,
    QueueFacts,
    RunFacts,
    WorkerFacts,
)
from areal_ray.observability.records import EvaluationRecord
from areal_ray.observability.run_status import ActorStatus, RunStatus
from areal_ray.observability.timeline import ActivityRecord, EventRecord, read_timeline
from areal_ray.tasks import guarded
from tests.rehearsing import LiveThrough, RehearsedCrew, busy_crew, kill, lasting, run

EVERYBODY = {"run", "engine-0", "engine-1", "trainer", "controller", "queue", "manager", "worker-0"}


@pytest.fixture(scope="module")
def crew_and_directory(
    ray_cluster: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LiveThrough, RehearsedCrew]]:
    crew = busy_crew(tiny_model, tmp_path_factory)
    for live_through in lasting(crew):
        yield live_through, crew


@pytest.fixture
def live_through(crew_and_directory: tuple[LiveThrough, RehearsedCrew]) -> LiveThrough:
    return crew_and_directory[0]


async def status_when(crew: RehearsedCrew, condition: Callable[[RunStatus], object]) -> RunStatus:
    while not condition(status := await crew.crew.monitor.status.remote()):
        await asyncio.sleep(0.1)
    return status


def by_name(status: RunStatus) -> dict[str, ActorStatus]:
    return {actor.report.who: actor for actor in status.actors}


async def tell(crew: RehearsedCrew, command: Command) -> Answer:
    """As somebody outside does, while the run obeys."""
    said: list[str] = []

    async def outside() -> Answer:
        return await crew.crew.monitor.tell.remote(command)

    return await guarded(outside(), crew.crew.obey(said.append), crew.crew.watch())


def test_everybody_tells_what_he_is_and_does(live_through: LiveThrough) -> None:
    async def scenario(crew: RehearsedCrew) -> None:
        await crew.steps(3)
        # All have told once, and the engines twice.
        status = await status_when(
            crew,
            lambda s: by_name(s).keys() >= EVERYBODY and by_name(s)["engine-0"].tokens_per_s > 0,
        )
        actors = by_name(status)
        assert actors["engine-0"].report.shown.startswith("GenerationActor[engine-0 v")
        assert actors["engine-0"].report.shown.endswith(" req]")
        assert actors["trainer"].report.shown.startswith("PacedTrainer[v")
        assert isinstance(actors["queue"].report.facts, QueueFacts)
        assert isinstance(actors["worker-0"].report.facts, WorkerFacts)
        controller = actors["controller"].report.facts
        assert isinstance(controller, ControllerFacts)
        assert {engine.name: engine.state for engine in controller.engines} == {
            "engine-0": "serving",
            "engine-1": "serving",
        }
        assert sum(actors["engine-0"].shares.values()) == pytest.approx(1.0)

    live_through(scenario)


def test_a_trace_has_what_each_did(live_through: LiveThrough) -> None:
    async def scenario(crew: RehearsedCrew) -> None:
        since = time.time()
        await crew.steps(2)
        await status_when(crew, lambda s: by_name(s).keys() >= EVERYBODY)
        given = await crew.crew.monitor.spans.remote(since)
        named = {actor.who: {span.name for span in actor.spans} for actor in given}
        assert named["engine-0"] >= {"generate", "stage", "commit"}
        assert named["worker-0"] >= {"episode", "generation", "reward", "wait for the queue"}
        assert named["queue"] == {"queue wait"}
        assert named["manager"] >= {"weight update"}
        assert named["run"] >= {"step", "weight update"}

    live_through(scenario)


def test_the_last_words_are_a_trace_of_the_end(
    ray_cluster: None, tiny_model: Path, tmp_path: Path
) -> None:
    rehearsal = RehearsedCrew(tiny_model, tmp_path, generation={"engines": 2})

    async def scenario() -> None:
        async with rehearsal as crew:
            await crew.steps(2)
            await crew.crew.resize(1)

    run(scenario())
    named = {one.who: {span.name for span in one.spans} for one in rehearsal.crew.last_spans}
    # Of those who were there: one engine had left.
    assert named.keys() == EVERYBODY - {"engine-1"}
    assert named["engine-0"] >= {"generate", "stage", "commit"}
    assert named["worker-0"] >= {"episode", "generation", "reward", "wait for the queue"}
    assert named["queue"] == {"queue wait"}
    assert named["manager"] >= {"weight update"}
    assert named["run"] >= {"step", "weight update"}


def test_it_is_paused_resumed_and_resized_from_outside(live_through: LiveThrough) -> None:
    async def scenario(crew: RehearsedCrew) -> None:
        assert await tell(crew, Pause()) == Answer("paused: no new groups are begun")
        await status_when(crew, lambda s: by_name(s)["controller"].report.facts.is_paused)
        await crew.until(lambda counts: counts.running == 0, "the groups under way to end")
        assert await tell(crew, Resume()) == Answer("resumed")
        await crew.steps(4)  # more than what waited was enough for
        assert await tell(crew, Resize(3)) == Answer("3 engines")
        await status_when(crew, lambda s: "engine-2" in by_name(s))
        assert await tell(crew, Resize(2)) == Answer("2 engines")
        await status_when(crew, lambda s: "engine-2" not in by_name(s))
        refused = await tell(crew, Resize(0))
        assert refused.is_refusal
        assert "expected at least generation.min_engines (1) engines, got 0" in refused.text

    live_through(scenario)


def test_losses_and_recoveries_are_events(live_through: LiveThrough) -> None:
    async def scenario(crew: RehearsedCrew) -> None:
        await kill(crew.crew.engines["engine-1"])
        status = await status_when(crew, lambda s: any(e.who == "engine-1" for e in s.events))
        (lost, *_) = [event for event in status.events if event.who == "engine-1"]
        assert lost.level == "warning"
        assert lost.text.startswith("is lost: ")
        await crew.check_that_all_is_well()

    live_through(scenario)


def test_a_monitor_that_dies_comes_back_and_nothing_waits_for_it(
    crew_and_directory: tuple[LiveThrough, RehearsedCrew],
) -> None:
    live_through, _ = crew_and_directory

    async def scenario(crew: RehearsedCrew) -> None:
        # The same all the time, as a run obeys.
        obeying = asyncio.ensure_future(crew.crew.obey(lambda _: None))
        assert await crew.crew.monitor.tell.remote(Resume()) == Answer("resumed")
        await kill(crew.crew.monitor)
        record = EvaluationRecord(step=1, version=1, seconds=1.0, prompts=1, reward=0.75)
        crew.crew.telemetry.record(record)
        await crew.steps(2)
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline
            try:
                status = await crew.crew.monitor.status.remote()
            except Exception:  # noqa: BLE001 - while Ray brings it back
                await asyncio.sleep(0.2)
                continue
            if by_name(status).keys() >= EVERYBODY and status.last_evaluation is not None:
                break
            await asyncio.sleep(0.2)
        assert status.last_evaluation == record
        assert await crew.crew.monitor.tell.remote(Resume()) == Answer("resumed")
        assert not obeying.done()
        obeying.cancel()
        await asyncio.gather(obeying, return_exceptions=True)

    live_through(scenario)


async def test_what_nobody_hears_is_kept_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[ActorReport] = []

    class Monitor:
        class hear:  # noqa: N801
            @staticmethod
            async def remote(report: ActorReport) -> None:
                heard.append(report)

    telemetry = Telemetry(
        "run",
        monitor=MonitorAddress("monitor", "areal_ray/test"),
        facts=lambda: RunFacts(phase="training"),
        shown=lambda: "Run",
    )
    for number in range(MAX_UNTOLD + 5):
        telemetry.event("info", f"event {number}")
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: Monitor())
    telemetry.start()
    telemetry.record(EvaluationRecord(step=1, version=1, seconds=1.0, prompts=1, reward=0.5))
    await telemetry.close()
    (report,) = heard
    assert report.is_last
    assert [event.text for event in report.events[:2]] == ["event 0", "event 1"]
    assert len(report.events) == MAX_UNTOLD
    assert len(report.records) == 1


def test_the_timeline_tells_all_of_it(
    crew_and_directory: tuple[LiveThrough, RehearsedCrew],
) -> None:
    _, crew = crew_and_directory
    records = read_timeline(crew.run_dir / "timeline.jsonl")
    cells = [record for record in records if isinstance(record, ActivityRecord)]
    events = [record for record in records if isinstance(record, EventRecord)]
    assert {cell.who for cell in cells} >= {"engine-0", "engine-1", "trainer"}
    assert sum(cell.tokens for cell in cells) > 0
    assert {"busy", "paused", "restarting"} <= {name for cell in cells for name in cell.seconds}
    # No moment is told twice: a cell begins where the one before it ended, or later.
    own = [cell for cell in cells if cell.who == "engine-0"]
    for before, after in itertools.pairwise(own):
        assert after.began >= before.at - 0.05
    said = [(event.who, event.text) for event in events]
    assert ("engine-1", "serves again") in said
