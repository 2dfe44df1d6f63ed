"""Engines that share devices with the trainer, over a real Ray cluster: they take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from rehearsing import LiveThrough, RehearsedCrew, lasting

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def crew(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveThrough]:
    run_dir = tmp_path_factory.mktemp("run")
    changes = {"generation": {"engines": 2, "colocated": True}, "weights": {"staging": "host"}}
    yield from lasting(RehearsedCrew(tiny_model, run_dir, step_s=1.0, **changes))


def test_engines_that_share_devices_with_the_trainer_rest_while_it_trains(crew) -> None:
    def is_asleep(actor) -> bool:
        return actor._engine.weights.is_asleep

    async def asleep(rehearsal: RehearsedCrew) -> list[bool]:
        engines = rehearsal.crew.engines.values()
        return await asyncio.gather(*(one.__ray_call__.remote(is_asleep) for one in engines))

    async def scenario(rehearsal: RehearsedCrew) -> None:
        assert await asleep(rehearsal) == [False, False]
        stepping = asyncio.ensure_future(rehearsal.step())
        while await asleep(rehearsal) != [True, True]:
            assert not stepping.done()
        await stepping
        assert await asleep(rehearsal) == [False, False]
        await rehearsal.step()
        await rehearsal.check_that_all_is_well()

    crew(scenario)


def test_engines_wake_from_a_step_that_was_given_up_and_one_that_died_comes_back(crew) -> None:
    """Its memory is the trainer's until the turn ends: only then is it started again."""

    async def scenario(rehearsal: RehearsedCrew) -> None:
        engine = rehearsal.crew.engines["engine-1"]
        step = rehearsal.crew.train_step(rehearsal.version + 1, rehearsal.version)
        stepping = asyncio.ensure_future(step)
        while not await engine.__ray_call__.remote(lambda a: a._engine.weights.is_asleep):
            assert not stepping.done()
        ray.kill(engine, no_restart=False)
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        await rehearsal.steps(2)
        await rehearsal.check_that_all_is_well()

    crew(scenario)
