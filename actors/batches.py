"""A trainer's side of the queue: batches on loan, over a restart of the queue if need be.

    batch = await batches.next(version)
    ...                                     learn from batch.groups
    await batches.done(batch)               or `give_back`, if it was not learnt from

When the queue dies it takes along what it held. A batch that is whole here by the time the
controller asks is trained on; one that is not is never used, since its prompts are drawn again.
So no group is lost, and none is trained on twice. Before the next batch is asked for, the
controller has been told what was trained on: until then a batch that is done counts as here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, ObjectLostError

from areal_ray import logs
from areal_ray.actors.calls import RETRY_EVERY_S
from areal_ray.actors.trajectory_queue import Lease
from areal_ray.types import TrajectoryGroup, WeightVersion


@dataclass(frozen=True)
class Batch:
    groups: list[TrajectoryGroup]
    lease: Lease

    @property
    def group_ids(self) -> list[int]:
        return [group.group_id for group in self.groups]


class Batches:
    def __init__(self, queue: ActorHandle) -> None:
        self._queue = queue
        self._incarnation = ""
        self._in_hand: Batch | None = None

    async def next(self, version: WeightVersion) -> Batch:
        """The next batch that is fresh enough at this version. Waits for it."""
        self._in_hand = None
        while True:
            try:
                lease: Lease = await self._queue.get_batch.remote(version)
                groups = await asyncio.gather(*lease.references)
            except (ActorUnavailableError, ObjectLostError):
                await asyncio.sleep(RETRY_EVERY_S)
                continue
            if self._incarnation in ("", lease.incarnation):
                self._in_hand = Batch(groups, lease)
                return self._in_hand

    async def done(self, batch: Batch) -> None:
        """It was learnt from."""
        await self._tell(self._queue.acknowledge.remote, batch.lease)

    async def give_back(self, batch: Batch) -> None:
        """It was not: its groups go first the next time."""
        self._in_hand = None
        await self._tell(self._queue.release.remote, batch.lease)

    def queue_restarted(self, incarnation: str) -> list[int]:
        """From now on only batches of this incarnation are used, and the one that is here
        already: the ids of its groups."""
        self._incarnation = incarnation
        return [] if self._in_hand is None else self._in_hand.group_ids

    async def _tell(self, tell: Callable[[str, int], Awaitable[None]], lease: Lease) -> None:
        try:
            await tell(lease.incarnation, lease.lease_id)
        except ActorUnavailableError:
            logs.warning("the queue died with a batch on loan: there is no lease to end any more")
