"""TrajectoryQueue: references to finished groups, on their way from rollout to training.

It holds references, never arrays. In Ray the caller of a method owns what it returns: so the
queue calls the worker for a finished group, and the group, wherever it lies in the object
store, outlives the worker that made it. A full queue makes producers wait; a trainer waits for
a batch; nobody polls.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
import ray
from ray.actor import ActorHandle

from areal_ray.deadlines import within
from areal_ray.errors import QueueClosed
from areal_ray.trajectory_buffer import TrajectoryBuffer
from areal_ray.types import GroupSummary, WeightVersion

HAND_OVER_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Lease:
    """A batch that is on loan to the trainer until it acknowledges it."""

    lease_id: int
    references: list[ray.ObjectRef]
    summaries: list[GroupSummary]


class QueueStatus(msgspec.Struct, frozen=True):
    waiting_groups: int
    held_groups: int
    held_bytes: int


@ray.remote(max_concurrency=4096)
class TrajectoryQueue:
    def __init__(self, *, batch: int, max_groups: int, max_bytes: int, max_staleness: int) -> None:
        self._batch = batch
        self._buffer: TrajectoryBuffer[ray.ObjectRef] = TrajectoryBuffer(
            batch=batch, max_groups=max_groups, max_bytes=max_bytes, max_staleness=max_staleness
        )
        self._changed = asyncio.Condition()
        self._closed = False

    async def put(self, worker: ActorHandle, summary: GroupSummary) -> None:
        """Take over a group that `worker` has finished. Waits while the queue is full."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._closed or self._buffer.has_room(summary.nbytes)
            )
            self._refuse_if_closed()
            self._buffer.reserve(summary)
        try:
            # The second return value only tells that the first is stored: awaiting the group
            # itself would bring it here.
            group, stored = worker.hand_over.options(num_returns=2).remote(summary.group_id)
            await within(
                HAND_OVER_TIMEOUT_S, stored, who="a rollout worker", doing="handing a group over"
            )
        except BaseException:
            async with self._changed:
                self._buffer.cancel(summary)
                self._changed.notify_all()
            raise
        async with self._changed:
            self._buffer.put(group, summary)
            self._changed.notify_all()

    async def get_batch(self, version: WeightVersion) -> Lease:
        """Lend out the oldest groups that are fresh enough. Waits until they make a batch."""
        async with self._changed:
            while (leased := self._buffer.lease(self._batch, version)) is None:
                self._refuse_if_closed()
                # Groups may have expired just now: room for producers, work for the controller.
                self._changed.notify_all()
                await self._changed.wait()
            self._changed.notify_all()
        lease_id, entries = leased
        return Lease(
            lease_id=lease_id,
            references=[entry.payload for entry in entries],
            summaries=[entry.summary for entry in entries],
        )

    async def acknowledge(self, lease_id: int) -> None:
        async with self._changed:
            self._buffer.acknowledge(lease_id)
            self._changed.notify_all()

    async def release(self, lease_id: int) -> None:
        async with self._changed:
            self._buffer.release(lease_id)
            self._changed.notify_all()

    async def expired(self) -> list[int]:
        """The ids of groups that grew too old here. Waits until there are any."""
        async with self._changed:
            while not (expired := self._buffer.take_expired()):
                self._refuse_if_closed()
                await self._changed.wait()
        return expired

    async def status(self) -> QueueStatus:
        return QueueStatus(
            waiting_groups=self._buffer.waiting,
            held_groups=self._buffer.groups,
            held_bytes=self._buffer.nbytes,
        )

    async def close(self) -> None:
        """Let everybody who waits go, with `QueueClosed`."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise QueueClosed("the trajectory queue is closed")
