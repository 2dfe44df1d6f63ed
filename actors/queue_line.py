"""The controller's side of the queue: who knows what of each group, kept true on both ends.

Controller and queue each may die and come back, the one with its journal, the other with nothing.
What holds all the same: a group is written down as drawn before the queue expects it, and as ended
before the queue is told to drop it. So when they meet again, each difference between the two has
one meaning, and is mended here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError

from areal_ray import logs
from areal_ray.actors.bookkeeper import Bookkeeper
from areal_ray.actors.calls import ASK_TIMEOUT_S, RETRY_EVERY_S, until_back
from areal_ray.actors.trajectory_queue import QueueNews
from areal_ray.changes import Changes

T = TypeVar("T")


class QueueLine:
    def __init__(
        self,
        bookkeeper: Bookkeeper,
        queue: ActorHandle,
        trainer: ActorHandle,
        changed: Changes,
        *,
        startup_timeout_s: float,
    ) -> None:
        """`changed` is told whenever the book or the line is another. `startup_timeout_s`: for a
        trainer that may be coming back from its death."""
        self._bookkeeper = bookkeeper
        self._book = bookkeeper.book
        self._queue = queue
        self._trainer = trainer
        self._changed = changed
        self._startup_timeout_s = startup_timeout_s
        self._to_drop: list[int] = []
        self._in_hand: set[int] = set()
        """What the trainer had, and no queue, when the last one was opened."""
        self.incarnation = ""
        """Of the queue that is there now; empty until it is known."""

    @property
    def has_drops(self) -> bool:
        return bool(self._to_drop)

    def drop(self, group_id: int) -> None:
        """The group has ended and will not come; the next `update` tells it."""
        self._to_drop.append(group_id)

    async def update(self, expect: Sequence[int]) -> None:
        """Tell the queue what is on its way from now on, and what is no more."""
        drop, self._to_drop = self._to_drop, []
        await self._bookkeeper.write()
        if expect or drop:
            await self._ask(partial(self._queue.update.remote, expect, drop))

    async def taken_by(self, group_id: int, *, withdraw: bool = False) -> str:
        """The incarnation of the queue that has taken it, or nothing: then `withdraw` has the
        queue refuse it from now on."""
        return await self._ask(partial(self._queue.has_taken.remote, group_id, withdraw=withdraw))

    async def settle_a_dead_trainers(self) -> None:
        """What no queue has any more was acknowledged by a trainer that died before it could tell
        of it; or it had come from a queue that died before, and is lost with the trainer."""
        accepted = self._book.accepted  # by now: what comes meanwhile may be here or there
        untrained = set(await self._ask(self._queue.untrained.remote))
        gone = [group_id for group_id in accepted if group_id not in untrained]
        self._book.trained(group_id for group_id in gone if group_id not in self._in_hand)
        for group_id in sorted(self._in_hand.intersection(gone), reverse=True):
            self._book.expire(group_id)

    async def follow(self) -> None:
        """Learn what expired in the queue, and mend what a restart has torn. Never returns."""
        incarnation, rerolled = "", []
        while True:
            try:
                news: QueueNews = await self._queue.news.remote(incarnation, rerolled)
            except ActorUnavailableError:
                await asyncio.sleep(RETRY_EVERY_S)
                continue
            if news.incarnation != incarnation:
                await (self._rejoin(news) if news.is_open else self._open(news))
                incarnation = news.incarnation
            for group_id in news.expired:
                self._take_as_accepted(group_id)
                self._book.expire(group_id)
            rerolled = news.expired
            await self._bookkeeper.write()
            self._changed.notify()

    async def _rejoin(self, news: QueueNews) -> None:
        """We are the ones who were restarted. What the queue expects no more, it has taken,
        unless it was withdrawn; and what it expects in vain, it has yet to be told to drop."""
        running = {ticket.group_id for ticket in self._book.running}
        heard_of = {group_id for group_id in running if group_id <= news.highest_expected}
        for group_id in sorted(heard_of.difference(news.expected)):
            self._book.end(group_id, "timed out" if group_id in news.withdrawn else "accepted")
        self._to_drop += [*set(news.expected).difference(running), *news.withdrawn]
        await self.update(sorted(running - heard_of))
        self.incarnation = news.incarnation

    async def _open(self, news: QueueNews) -> None:
        """The queue is new. What one before it held is lost but for what the trainer has, and what
        this one begins with."""
        in_hand = await until_back(
            self._startup_timeout_s,
            partial(self._trainer.queue_restarted.remote, news.incarnation),
            who="the trainer",
            doing="telling which groups it holds (generation.startup_timeout_s)",
        )
        self._in_hand = set(in_hand)
        for group_id in (*in_hand, *news.held):
            self._take_as_accepted(group_id)
        lost = set(self._book.accepted).difference(in_hand, news.held)
        for group_id in sorted(lost, reverse=True):
            self._book.expire(group_id)
        if lost:
            logs.warning("{} groups were lost with the queue and are drawn again", len(lost))
        await self._bookkeeper.write()
        # Before it takes anything: what it takes then is not taken for a dead one's.
        self.incarnation = news.incarnation
        running = [ticket.group_id for ticket in self._book.running]
        await self._ask(partial(self._queue.open.remote, running))
        # What ended meanwhile may have been dropped before it was expected.
        self._to_drop += [g for g in running if not self._book.is_running(g)]

    def _take_as_accepted(self, group_id: int) -> None:
        """It was in the queue. The worker's own word of that may still be on its way."""
        if self._book.is_running(group_id):
            self._book.end(group_id, "accepted")

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        return await until_back(
            ASK_TIMEOUT_S, call, who="the trajectory queue", doing="answering the controller"
        )
