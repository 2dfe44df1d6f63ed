"""A pool over members that are played."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from areal_ray.actors.pool import ActorPool, Care
from areal_ray.deadlines import within
from areal_ray.observability.loop_health import LoopReport
from areal_ray.tasks import TaskRunner

CARE = Care(
    prove_every_s=60.0,
    suspect_after_s=100.0,
    dead_after_s=200.0,
    may_restart=True,
    max_failed_starts=3,
    min_members=1,
)


class Healthy:
    """All that its members are asked, they do at once."""

    what = "engine"

    async def bring_up(self, name: str, handle: object) -> None: ...

    async def sync(self, name: str, handle: object) -> None: ...

    async def prove(self, name: str, handle: object) -> LoopReport | None: ...

    async def lost(self, name: str) -> None: ...


@pytest.mark.parametrize("turns_of_the_loop", range(8))
async def test_a_member_that_is_doubted_as_the_pool_is_closed_does_not_hold_it_up(
    turns_of_the_loop: int,
) -> None:
    tasks: TaskRunner[None] = TaskRunner()
    pool = ActorPool(Healthy(), CARE, tasks)
    pool.add("engine-0", SimpleNamespace(), has_served=False)
    await pool.until_settled()
    await asyncio.sleep(0.05)  # it has proved itself, and the next proof is a minute away
    pool.doubt("engine-0")
    for _ in range(turns_of_the_loop):
        await asyncio.sleep(0)
    await within(5, tasks.close(), who="the pool", doing="its end")
