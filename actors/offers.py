"""A worker's finished groups, until the queue has taken them over.

Groups that are finished while one offer is on its way go together in the next: under load a call
carries many. Where the queue has no room, the group waits here and is offered again. A queue that
was restarted is offered everything again that it has not confirmed.
"""

from __future__ import annotations

import asyncio

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError

from areal_ray.actors.calls import RETRY_EVERY_S
from areal_ray.types import GroupSummary, TrajectoryGroup

NOT_WANTED = ""
"""Instead of the incarnation of the queue that took a group."""


class Offers:
    def __init__(self, queue: ActorHandle, worker: ActorHandle) -> None:
        self._queue = queue
        self._worker = worker
        self._groups: dict[int, TrajectoryGroup] = {}
        self._next: list[tuple[GroupSummary, asyncio.Future[str | None]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def offer(self, group: TrajectoryGroup, summary: GroupSummary) -> str:
        """Returns the incarnation of the queue that has it, or `NOT_WANTED`."""
        while True:
            self._groups[summary.group_id] = group
            verdict: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
            self._next.append((summary, verdict))
            if self._sending is None:
                self._sending = asyncio.create_task(self._send())
            # Once it is on its way, only the queue can say what became of it: that goes on even
            # if nobody waits for it here any more.
            taken_by = await verdict
            if taken_by is not None:
                return taken_by
            await self._until_room(summary)

    def hand_over(self, group_ids: list[int]) -> list[TrajectoryGroup]:
        return [self._groups[group_id] for group_id in group_ids]

    async def _send(self) -> None:
        while self._next:
            batch, self._next = self._next, []
            try:
                await self._send_one(batch)
            except Exception as error:  # noqa: BLE001 - raised where each group is awaited
                for _, verdict in batch:
                    if not verdict.done():
                        verdict.set_exception(error)
            for summary, _ in batch:
                self._groups.pop(summary.group_id, None)
        self._sending = None

    async def _send_one(self, batch: list[tuple[GroupSummary, asyncio.Future[str | None]]]) -> None:
        while True:
            try:
                receipt = await self._queue.put.remote(self._worker, [s for s, _ in batch])
                break
            except ActorUnavailableError:
                await asyncio.sleep(RETRY_EVERY_S)
        fates: dict[int, str] = dict.fromkeys(receipt.taken, receipt.incarnation)
        fates |= dict.fromkeys(receipt.unwanted, NOT_WANTED)
        for summary, verdict in batch:
            if not verdict.done():
                verdict.set_result(fates.get(summary.group_id))

    async def _until_room(self, summary: GroupSummary) -> None:
        try:
            await self._queue.until_room.remote(summary)
        except ActorUnavailableError:
            await asyncio.sleep(RETRY_EVERY_S)
