"""A trainer's side of the queue: batches on loan, over a restart of the queue if need be.

    await batches.take(version)
    batch = batches.taken
    ...                                     learn from batch.groups
    await batches.done(batch)               or `give_back`, if it was not learnt from

When the queue dies it takes along what it held. A batch that is whole here by the time the
controller asks is trained on; one that is not is never used, since its prompts are drawn again.
So no group is lost, and none is trained on twice. Before the next batch is asked for, the
controller has been told what was trained on: until then a batch that is done counts as here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, ObjectLostError

from areal_ray import logs
from areal_ray.actors.calls import ASK_TIMEOUT_S, RETRY_EVERY_S, until_back
from areal_ray.actors.trajectory_queue import Lease, Place
from areal_ray.types import TrajectoryGroup, WeightVersion


@dataclass(frozen=True)
class Batch:
    groups: list[TrajectoryGroup]
    lease: Lease
    version: WeightVersion
    """That it was fresh enough for."""
    waited_s: float

    @property
    def group_ids(self) -> list[int]:
        return [group.group_id for group in self.groups]


class Batches:
    def __init__(
        self,
        queue: ActorHandle,
        *,
        holder: str,
        read_elsewhere: Callable[[Sequence[Place]], Awaitable[bool]] | None = None,
    ) -> None:
        """`holder`: who takes them. It stays the same over a restart of the trainer, so that the
        queue knows which batch will not be ended any more. `read_elsewhere`: for others who need
        a batch as well; tells whether they could read it."""
        self._queue = queue
        self._holder = holder
        self._read_elsewhere = read_elsewhere
        self._incarnation = ""
        self._in_hand: Batch | None = None
        self._taken: Batch | None = None

    async def take(self, version: WeightVersion) -> None:
        """Wait for a batch that is fresh enough at this version, unless there is one already."""
        if self._taken is None:
            self._taken = await self._next(version)

    @property
    def taken(self) -> Batch:
        assert self._taken is not None, "take a batch first"
        return self._taken

    async def _next(self, version: WeightVersion) -> Batch:
        began = time.perf_counter()
        self._in_hand = None
        while True:
            try:
                lease: Lease = await self._queue.get_batch.remote(version, self._holder)
            except ActorUnavailableError:
                await asyncio.sleep(RETRY_EVERY_S)
                continue
            groups = await self._read(lease)
            if groups is not None and self._incarnation in ("", lease.incarnation):
                self._in_hand = Batch(groups, lease, version, time.perf_counter() - began)
                return self._in_hand

    async def done(self, batch: Batch) -> None:
        """It was learnt from."""
        self._taken = None
        lease = batch.lease
        await self._tell(lambda: self._queue.acknowledge.remote(lease.incarnation, lease.lease_id))

    async def give_back(self, batch: Batch) -> None:
        """It was not: its groups go first the next time."""
        self._in_hand = self._taken = None
        await self._release(batch.lease, lost=[])

    def queue_restarted(self, incarnation: str) -> list[int]:
        """From now on only batches of this incarnation are used, and the one that is here
        already: the ids of its groups."""
        self._incarnation = incarnation
        return [] if self._in_hand is None else self._in_hand.group_ids

    async def _read(self, lease: Lease) -> list[TrajectoryGroup] | None:
        """None if some of it can't be read: the node where it lay, or the queue, is gone."""
        references = list(dict.fromkeys(place.chunk for place in lease.places))
        outcomes = await asyncio.gather(*references, return_exceptions=True)
        chunks = dict(zip(references, outcomes, strict=True))
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, ObjectLostError):
                raise outcome
        lost = [
            group_id
            for group_id, place in zip(lease.group_ids, lease.places, strict=True)
            if isinstance(chunks[place.chunk], ObjectLostError)
        ]
        if not lost and self._read_elsewhere and not await self._read_elsewhere(lease.places):
            lost = lease.group_ids
        if not lost:
            return [chunks[place.chunk][place.position] for place in lease.places]
        logs.warning("{} of {} groups of a batch are lost", len(lost), len(lease.places))
        await self._release(lease, lost)
        return None

    async def _release(self, lease: Lease, lost: Sequence[int]) -> None:
        await self._tell(
            lambda: self._queue.release.remote(lease.incarnation, lease.lease_id, lost)
        )

    async def _tell(self, call: Callable[[], Awaitable[None]]) -> None:
        """A queue that was restarted meanwhile knows of no such lease, and does nothing."""
        await until_back(ASK_TIMEOUT_S, call, who="the trajectory queue", doing="ending a lease")
