"""Whatever dies, by real signals to real processes: nothing is lost, nothing is used twice.

One crew lives through most of it, one death after the other, as a long run does.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from rehearsing import (
    PROMPTS,
    LiveThrough,
    RehearsedCrew,
    busy_crew,
    kill,
    lasting,
    pid_of,
)

from areal_ray.deadlines import within
from areal_ray.generation.faults import Die, FailStep, Wedge

pytestmark = pytest.mark.usefixtures("ray_cluster")

STEPS = 5


@pytest.fixture(scope="module")
def crew(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveThrough]:
    yield from lasting(busy_crew(tiny_model, tmp_path_factory, rollout={"workers": 2}))


async def incarnations(rehearsal: RehearsedCrew) -> list[int]:
    rollout, _ = await rehearsal.crew.status()
    return [engine.incarnation for engine in rollout.engines]


async def work_with(rehearsal: RehearsedCrew, *deaths: Callable[[], Awaitable[object]]) -> None:
    """Steps, and after each two of them a death; then all is well."""
    begin = rehearsal.version
    working = asyncio.ensure_future(rehearsal.steps(STEPS))
    for number, death in enumerate(deaths):
        await rehearsal.step_reached(begin + 1 + 2 * number)
        await death()
    await working
    await rehearsal.check_that_all_is_well()


def test_an_engine_process_killed_in_flight_loses_no_group(crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        first, second = await incarnations(rehearsal)
        await work_with(rehearsal, lambda: kill(rehearsal.crew.engines["engine-0"]))
        assert await incarnations(rehearsal) == [first + 1, second]

    crew(scenario)


def test_an_engine_that_dies_inside_its_actor_is_replaced(crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        first, second = await incarnations(rehearsal)
        await work_with(rehearsal, lambda: rehearsal.inject("engine-1", Die()))
        assert await incarnations(rehearsal) == [first, second + 1]

    crew(scenario)


def test_an_engine_that_answers_nothing_any_more_is_found_and_replaced(crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        first, second = await incarnations(rehearsal)
        await work_with(rehearsal, lambda: rehearsal.inject("engine-0", Wedge()))
        rollout, _ = await rehearsal.crew.status()
        assert await incarnations(rehearsal) == [first + 1, second]
        assert rollout.engines[0].cause.startswith("no answer for 3.")

    crew(scenario)


def test_an_engine_that_can_t_stage_weights_is_replaced(crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        first, second = await incarnations(rehearsal)
        await rehearsal.inject("engine-0", FailStep(step="receive", how="raise", when="before"))
        await rehearsal.steps(2)
        await rehearsal.check_that_all_is_well()
        assert await incarnations(rehearsal) == [first + 1, second]

    crew(scenario)


def test_a_stopped_engine_process_is_killed_and_replaced(crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        engine = rehearsal.crew.engines["engine-0"]
        pid = await pid_of(engine)
        await work_with(rehearsal, lambda: kill(engine, signal.SIGSTOP))
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    crew(scenario)


def test_a_worker_killed_in_flight_loses_no_group(crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        workers = rehearsal.workers
        await work_with(
            rehearsal, lambda: kill(workers["worker-0"]), lambda: kill(workers["worker-1"])
        )

    crew(scenario)


def test_a_killed_controller_goes_on_from_its_journal(crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        async def death() -> None:
            before, _ = await rehearsal.crew.status()
            await kill(rehearsal.crew.controller)
            after, _ = await rehearsal.crew.status()
            assert after.ledger.submitted >= before.ledger.submitted
            assert after.ledger.version >= before.ledger.version
            assert after.generated_tokens >= before.generated_tokens > 0

        processes = [await pid_of(engine) for engine in rehearsal.crew.engines.values()]
        await work_with(rehearsal, death, death)
        # The engines were left alone: they hold the weights, and had work all the while.
        assert processes == [await pid_of(engine) for engine in rehearsal.crew.engines.values()]

    crew(scenario)


def test_a_paused_controller_that_is_killed_stays_paused(crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        watching = asyncio.ensure_future(rehearsal.crew.watch())
        held = await rehearsal.until_full()
        await rehearsal.crew.controller.pause.remote()
        await kill(rehearsal.crew.controller)
        rollout, _ = await rehearsal.crew.status()
        assert rollout.paused
        working = asyncio.ensure_future(rehearsal.step())
        # Drawn, but not started: the next version lets four more in, besides what grows too old.
        await rehearsal.until(
            lambda c: c.running >= 4 and c.running + c.accepted == held + 4, "a pause"
        )
        await rehearsal.crew.controller.resume.remote()
        await working
        await rehearsal.check_that_all_is_well()
        watching.cancel()

    crew(scenario)


def test_an_evaluation_outlives_the_engine_the_worker_and_the_controller(crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        watching = asyncio.ensure_future(rehearsal.crew.watch())
        evaluating = asyncio.ensure_future(rehearsal.crew.evaluate(PROMPTS))
        await kill(rehearsal.crew.engines["engine-0"])
        await kill(rehearsal.workers["worker-0"])
        await kill(rehearsal.crew.controller)
        evaluation = await evaluating
        assert (evaluation.prompts, evaluation.mean_reward) == (40, 0.0)
        watching.cancel()

    crew(scenario)


async def all_busy(rehearsal: RehearsedCrew, engines: int) -> None:
    while True:
        rollout, _ = await rehearsal.crew.status()
        if sum(load > 0 for load in rollout.engine_loads.values()) == engines:
            return


def test_the_pool_grows_and_shrinks_while_it_works(crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        begin = rehearsal.version
        working = asyncio.ensure_future(rehearsal.steps(8))
        await rehearsal.step_reached(begin + 1)
        await rehearsal.crew.resize(3)
        rollout, _ = await rehearsal.crew.status()
        assert [(e.name, e.state) for e in rollout.engines] == [
            (f"engine-{index}", "serving") for index in range(3)
        ]
        await within(30, all_busy(rehearsal, 3), who="the pool", doing="using all engines")
        await rehearsal.crew.resize(1)
        rollout, _ = await rehearsal.crew.status()
        assert [engine.name for engine in rollout.engines] == ["engine-0"]
        await working
        await rehearsal.check_that_all_is_well()

    crew(scenario)
