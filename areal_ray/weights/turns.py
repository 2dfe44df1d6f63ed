"""Devices that trainer and engines share, and take turns on.

    the engines' turn -(begin)-> the trainer's -(end)-> the engines'

Engines rest in the trainer's turn, and the trainer is in host memory in theirs: never are both on
the devices. The trainer has the first turn, so that it can be started. Whatever was acquired is
given back at the end, and on every way out of a `begin` that fails: the trainer moves out, then
all engines wake, and one that fails keeps no other from being woken. An engine that can't rest or
can't wake is lost, as one is that can't take part in a weight update; the former is ended at once,
since the trainer needs its memory. There are no updates in the trainer's turn.

An engine that starts takes all the memory that it may have, and can't rest before it has weights.
So it asks for leave: it gets it in the engines' turn, and the trainer's next turn waits until it
has its weights, is given up, or its time is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

from areal_ray.changes import Changes
from areal_ray.deadlines import within
from areal_ray.errors import WeightUpdateError, described
from areal_ray.restoring import Undo, uncancelled
from areal_ray.weights.transaction import Engine, LostEngine, WeightUpdates

Call = Coroutine[object, object, None]


class Sleeper(Engine, Protocol):
    async def rest(self) -> None: ...

    async def wake(self) -> None: ...

    async def end(self) -> None:
        """Its process is gone, when this returns."""


class Lodger(Protocol):
    """The trainer, as one who comes and goes."""

    async def move_in(self) -> None: ...

    async def move_out(self) -> None:
        """Comes when the trainer has no other work in hand."""


class Turns:
    def __init__(
        self,
        updates: WeightUpdates,
        trainer: Lodger,
        *,
        timeout_s: float,
        busy_timeout_s: float,
        start_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s`: for an engine to rest or to wake. `busy_timeout_s`: for the trainer to end
        what it is at, and move. `start_timeout_s`: for an engine to start and get its weights."""
        self._updates = updates
        self._trainer = trainer
        self._timeout_s = timeout_s
        self._busy_timeout_s = busy_timeout_s
        self._start_timeout_s = start_timeout_s
        self._clock = clock
        self._is_trainers = True
        """Or is about to be."""
        self._starting: dict[str, float] = {}
        """Until when the trainer waits for each."""
        self._changed = Changes()
        self._beginning: asyncio.Task[None] | None = None
        self._undo: Undo | None = None

    async def may_start(self, name: str) -> None:
        """Returns in the engines' turn. `has_started` must follow, or the time limit will. One that
        has leave has it still, when another controller asks for it."""
        await self._changed.until(lambda: not self._is_trainers or name in self._starting)
        self._starting[name] = self._clock() + self._start_timeout_s

    def has_started(self, name: str) -> None:
        """It can rest from now on; or it is given up."""
        self._starting.pop(name, None)
        self._changed.notify()

    async def begin(self) -> list[LostEngine]:
        """The trainer's turn. Returns the engines that are lost. An `end` meanwhile calls it
        off."""
        if self._beginning is not None or self._undo is not None:
            raise RuntimeError("the trainer's turn began before the last one ended")
        self._is_trainers = True
        self._beginning = asyncio.ensure_future(self._begin())
        try:
            await self._beginning
        finally:
            self._beginning = None
        return self._updates.lost

    async def end(self) -> list[LostEngine]:
        """The engines' turn. Returns the engines that are lost. Without a turn to end, no harm."""
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.wait({self._beginning})
        undo, self._undo = self._undo, None
        if undo is not None:
            await undo.give_back()
        return self._updates.lost

    async def _begin(self) -> None:
        undo = self._undo = Undo(timeout_s=self._timeout_s + self._busy_timeout_s)
        undo.later("the engines' turn", self._give_up_turn)
        try:
            await self._until_nobody_starts()
            await self._updates.one_at_a_time.acquire()
            undo.later("letting updates go on", self._let_updates_go_on)
            undo.later("waking the engines", self._wake_all)
            await self._rest_all()
            undo.later("moving the trainer out", self._trainer.move_out)
            await within(
                self._busy_timeout_s, self._trainer.move_in(), who="the trainer", doing="moving in"
            )
        except BaseException as error:
            self._undo = None
            await undo.give_back(error)
            raise

    @property
    def _engines(self) -> list[Sleeper]:
        return self._updates.engines

    async def _until_nobody_starts(self) -> None:
        while self._starting:
            left_s = max(self._starting.values()) - self._clock()
            if left_s <= 0:
                self._starting.clear()
                return
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.until(lambda: not self._starting)
            except TimeoutError:
                pass

    async def _rest_all(self) -> None:
        engines = self._engines
        failed = await self._ask(engines, [engine.rest() for engine in engines], "resting")
        not_ended = await self._ask(failed, [engine.end() for engine in failed], "ending")
        if not_ended:
            names = ", ".join(engine.name for engine in not_ended)
            raise WeightUpdateError(f"{names} neither rests nor ends: the trainer has no room")

    async def _wake_all(self) -> None:
        engines = self._engines
        await self._ask(engines, [engine.wake() for engine in engines], "waking")

    async def _ask(
        self, engines: Sequence[Sleeper], calls: Sequence[Call], doing: str
    ) -> list[Sleeper]:
        """All of them at once; who fails is lost, and returned. Not cut short by a cancellation:
        nobody would know who does and who does not."""
        return await uncancelled(self._ask_all(engines, calls, doing))

    async def _ask_all(
        self, engines: Sequence[Sleeper], calls: Sequence[Call], doing: str
    ) -> list[Sleeper]:
        limited = (
            within(self._timeout_s, call, who=engine.name, doing=f"{doing} (weights.timeout_s)")
            for engine, call in zip(engines, calls, strict=True)
        )
        outcomes = await asyncio.gather(*limited, return_exceptions=True)
        failed = []
        for engine, outcome in zip(engines, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                self._updates.lose(engine, f"{engine.name} failed {doing}: {described(outcome)}")
                failed.append(engine)
        return failed

    async def _let_updates_go_on(self) -> None:
        self._updates.one_at_a_time.release()

    async def _give_up_turn(self) -> None:
        self._is_trainers = False
        self._changed.notify()
