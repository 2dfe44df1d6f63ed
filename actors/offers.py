"""A worker's finished groups, until the queue has taken them over.

Groups that are finished while one offer is on its way go together in the next: under load a call
carries many. Where the queue has no room, the group waits here and is offered again. A queue that
was restarted is offered everything again that it has not confirmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError

from areal_ray.actors.calls import RETRY_EVERY_S
from areal_ray.actors.trajectory_queue import Receipt
from areal_ray.types import GroupSummary, TrajectoryGroup

T = TypeVar("T")

NOT_WANTED = ""
"""Instead of the incarnation of the queue that took a group."""


@dataclass(frozen=True)
class _Offer:
    summary: GroupSummary
    taken_by: asyncio.Future[str]


class Offers:
    def __init__(self, queue: ActorHandle, worker: ActorHandle) -> None:
        self._queue = queue
        self._worker = worker
        self._groups: dict[int, TrajectoryGroup] = {}
        self._next: list[_Offer] = []
        self._sending: asyncio.Task[None] | None = None
        self._waiting: set[asyncio.Task[None]] = set()

    async def offer(self, group: TrajectoryGroup, summary: GroupSummary) -> str:
        """Returns the incarnation of the queue that has it, or `NOT_WANTED`."""
        taken_by: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._groups[summary.group_id] = group
        self._send([_Offer(summary, taken_by)])
        # Only the queue can say what became of it: that goes on even if nobody waits for it
        # here any more.
        return await asyncio.shield(taken_by)

    def hand_over(self, chunks: list[list[int]]) -> tuple[list[TrajectoryGroup] | bool, ...]:
        """The groups, chunk by chunk, and a last word that they are there."""
        return (*([self._groups[group_id] for group_id in chunk] for chunk in chunks), True)

    def _send(self, offers: list[_Offer]) -> None:
        self._next += offers
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        while self._next:
            offers, self._next = self._next, []
            summaries = [offer.summary for offer in offers]
            try:
                receipt: Receipt = await _until_back(
                    lambda sent=summaries: self._queue.put.remote(self._worker, sent)
                )
            except Exception as error:  # noqa: BLE001 - raised where each group is awaited
                self._settle(offers, error)
                continue
            self._sort(offers, receipt)
        self._sending = None

    def _sort(self, offers: list[_Offer], receipt: Receipt) -> None:
        fates = dict.fromkeys(receipt.taken, receipt.incarnation)
        fates |= dict.fromkeys(receipt.unwanted, NOT_WANTED)
        without_room = []
        for offer in offers:
            fate = fates.get(offer.summary.group_id)
            if fate is None:
                without_room.append(offer)
            else:
                self._settle([offer], fate)
        if without_room:
            # One call for all of them, but none for those before: room for one may come first.
            waiting = asyncio.create_task(self._wait_for_room(without_room))
            self._waiting.add(waiting)
            waiting.add_done_callback(self._waiting.discard)

    async def _wait_for_room(self, offers: list[_Offer]) -> None:
        summaries = [offer.summary for offer in offers]
        try:
            await _until_back(lambda: self._queue.until_room.remote(summaries))
        except Exception as error:  # noqa: BLE001 - raised where each group is awaited
            self._settle(offers, error)
        else:
            self._send(offers)

    def _settle(self, offers: list[_Offer], fate: str | Exception) -> None:
        for offer in offers:
            self._groups.pop(offer.summary.group_id, None)
            if offer.taken_by.done():
                continue
            if isinstance(fate, str):
                offer.taken_by.set_result(fate)
            else:
                offer.taken_by.set_exception(fate)


async def _until_back(call: Callable[[], Awaitable[T]]) -> T:
    """Without a limit of its own: how long a group may take in all is its controller's to say."""
    while True:
        try:
            return await call()
        except ActorUnavailableError:
            await asyncio.sleep(RETRY_EVERY_S)
