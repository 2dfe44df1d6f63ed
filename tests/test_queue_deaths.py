"""The queue, and what it has of the controller, killed by real signals: nothing is used twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from rehearsing import LiveThrough, RehearsedCrew, busy_crew, kill, lasting

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def strict_crew(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveThrough]:
    """In this order no group grows too old: what expires was lost with the queue."""
    crew = busy_crew(tiny_model, tmp_path_factory, step_s=0.5, rollout={"order": "strict"})
    yield from lasting(crew)


def test_a_killed_queue_comes_back_and_what_it_held_is_rolled_out_again(strict_crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        await rehearsal.until_full()
        lost = (await rehearsal.counts()).submitted
        await kill(rehearsal.crew.queue)
        await rehearsal.steps(5)
        await rehearsal.check_that_all_is_well()
        # Nothing was in training: all eight were lost with the queue, and drawn again.
        assert (await rehearsal.counts()).expired == 8
        assert min(rehearsal.trained) == lost == 8

    strict_crew(scenario)


def test_a_queue_killed_while_a_batch_is_trained_on_gives_no_group_twice(strict_crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        await rehearsal.until_full()
        before = (await rehearsal.counts()).expired
        working = asyncio.ensure_future(rehearsal.steps(3))
        while (await rehearsal.crew.queue.status.remote()).waiting_groups > 4:
            await asyncio.sleep(0.01)
        await kill(rehearsal.crew.queue)
        await working
        await rehearsal.check_that_all_is_well()
        # Four were in the trainer's hands, and are trained on; four were lost.
        assert (await rehearsal.counts()).expired == before + 4

    strict_crew(scenario)


def test_a_queue_killed_when_a_batch_was_just_trained_on_does_not_lose_it(strict_crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        await rehearsal.until_full()
        lost = (await rehearsal.counts()).expired + 4

        async def queue_dies() -> None:
            await kill(rehearsal.crew.queue)
            await rehearsal.until(lambda c: c.expired == lost, "the loss of the other four")

        await rehearsal.step(once_trained=queue_dies)
        await rehearsal.steps(2)
        await rehearsal.check_that_all_is_well()
        assert (await rehearsal.counts()).expired == lost

    strict_crew(scenario)


def test_a_group_that_the_queue_expects_in_vain_is_dropped_by_the_next_controller(
    strict_crew,
) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        # As if the controller had died between a failure and the word of it: in this order the
        # queue would wait for group 0 before all others, for ever.
        await rehearsal.crew.queue.update.remote([0], [])
        await kill(rehearsal.crew.controller)
        await rehearsal.steps(3)
        await rehearsal.check_that_all_is_well()

    strict_crew(scenario)


def test_a_group_withdrawn_by_a_controller_that_died_then_counts_as_timed_out(strict_crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        running: list[int] = []
        while not running:
            await rehearsal.step()
            places = [await one.running.remote() for one in rehearsal.workers.values()]
            running = [group_id for place in places for group_id in place]
        taken_by = await rehearsal.crew.queue.has_taken.remote(running[-1], withdraw=True)
        await kill(rehearsal.crew.controller)
        await rehearsal.steps(3)
        await rehearsal.check_that_all_is_well(may_fail=True)
        assert (await rehearsal.counts()).failed == (not taken_by)

    strict_crew(scenario)
