"""How an engine changes its weights: the order of the steps, and what is undone when one fails.

    idle -(stage)-> staged -(commit)-> idle            the new version serves
                         `-(discard)-> idle            the old one does
                         `-(a failed swap)-> torn      none does, ever again
    idle -(rest)-> resting -(wake)-> idle              the device's memory was another's meanwhile

Staged beside the weights that serve, an engine goes on generating until the commit pauses it;
in place, it is paused before the first byte comes. Whatever was acquired (the pause, the
released KV cache, what was received) is given back on every way out, each within a time limit,
and one that fails keeps no other from being tried. A torn engine alone stays as it is: paused,
and without its KV cache if that was released.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from areal_ray.errors import EngineError, TornWeights, described
from areal_ray.restoring import Undo
from areal_ray.types import WeightVersion


class SwitchSteps(Protocol):
    """What an engine does at each step. Each undoing step may come after half of its doing."""

    async def pause(self) -> None:
        """No token is made from now on; requests are kept."""

    async def resume(self) -> None: ...

    async def release_kv(self) -> None:
        """Give the KV cache's memory back for the time of the update."""

    async def restore_kv(self) -> None: ...

    async def sleep(self) -> None:
        """No token is made from now on; weights leave the device, the KV cache's memory is given
        back, and requests are kept."""

    async def wake(self) -> None: ...

    async def receive(self, encoded_update: bytes) -> None:
        """Begin to receive; returns at once."""

    async def drop(self) -> str:
        """Let go of what was received; returns what had gone wrong with it, if anything had.
        Raises `TornWeights` if a part of it is in the model."""

    async def swap(self) -> None:
        """What was received becomes what serves."""

    async def stamp(self, version: WeightVersion) -> None:
        """Tokens carry this version from now on."""


class WeightSwitch:
    def __init__(
        self,
        steps: SwitchSteps,
        *,
        name: str,
        in_place: bool,
        release_kv: bool,
        restore_timeout_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._steps = steps
        self._clock = clock
        self._name = name
        self._in_place = in_place
        self._release_kv = release_kv
        self._restore_timeout_s = restore_timeout_s
        self._held: _Update | None = None
        self._is_torn = False
        self._paused_at = 0.0
        self._rest: Undo | None = None
        self._falling_asleep_or_waking = asyncio.Lock()

    @property
    def is_resting(self) -> bool:
        return self._rest is not None

    @property
    def stands_still(self) -> bool:
        """Resting, or paused for an update: both have their own time limits, and no token can be
        expected."""
        if self._rest is not None:
            return True
        return self._held is not None and self._held.is_paused and not self._is_torn

    async def stage(self, encoded_update: bytes) -> None:
        if self._held is not None or self._is_torn:
            raise EngineError(f"{self._name}: an update began before the last one ended")
        if self._rest is not None:
            raise EngineError(f"{self._name}: an update began while the engine rests")
        update = self._held = _Update(Undo(timeout_s=self._restore_timeout_s))
        try:
            if self._in_place:
                await self._pause(update)
            update.has_received = True
            update.undo.later("letting go of received weights", lambda: self._drop(update))
            await self._steps.receive(encoded_update)
            self._refuse_if_discarded(update)
        except BaseException as error:
            await self._give_back(update, error)
            raise

    async def commit(self, version: WeightVersion) -> float:
        """Returns how long generation stood still."""
        update = self._held
        if update is None:
            raise EngineError(f"{self._name} has no update to commit")
        try:
            if not self._in_place:
                await self._pause(update)
            # From here on some weights may be new and some old.
            self._is_torn = True
            await self._steps.swap()
            update.has_received = False
            await self._steps.stamp(version)
            self._is_torn = False
        except BaseException as error:
            await self._give_back(update, error)
            if not self._is_torn or isinstance(error, (TornWeights, asyncio.CancelledError)):
                raise
            raise TornWeights(
                f"{self._name} may hold torn weights after a failed swap to version {version}, "
                f"and stays paused: {described(error)}"
            ) from error
        await self._give_back(update, None)
        return self._clock() - self._paused_at

    async def discard(self) -> str:
        """Undo a stage, also one that is still being done; returns what had gone wrong in it.
        Without one, there is nothing to do."""
        if self._is_torn:
            raise TornWeights(f"{self._name} holds torn weights")
        update = self._held
        if update is None:
            return ""
        await self._give_back(update, None)
        return update.trouble

    async def rest(self) -> None:
        async with self._falling_asleep_or_waking:
            if self._held is not None or self._is_torn:
                raise EngineError(f"{self._name} can't rest: an update of its weights is not done")
            if self._rest is not None:
                return
            self._rest = Undo(timeout_s=self._restore_timeout_s)
            self._rest.later("waking", self._steps.wake)
            try:
                await self._steps.sleep()
            except BaseException as error:
                await self._end_rest(error)
                raise

    async def wake(self) -> None:
        """Also from a rest that is only beginning: once it has begun."""
        async with self._falling_asleep_or_waking:
            await self._end_rest(None)

    async def _end_rest(self, error: BaseException | None) -> None:
        if self._rest is not None:
            await self._rest.give_back(error)
            self._rest = None

    async def _pause(self, update: _Update) -> None:
        update.undo.later("resuming", self._resume)
        update.is_paused = True
        await self._steps.pause()
        self._paused_at = self._clock()
        if self._held is not update:
            update.undo.later("resuming", self._resume)  # the first came before the pause was done
        self._refuse_if_discarded(update)
        if self._release_kv:
            update.undo.later("restoring the KV cache", self._restore_kv)
            await self._steps.release_kv()
            if self._held is not update:
                update.undo.later("restoring the KV cache", self._restore_kv)
            self._refuse_if_discarded(update)

    async def _drop(self, update: _Update) -> None:
        if not update.has_received:
            return
        try:
            update.trouble = await self._steps.drop()
        except BaseException as error:
            # In place, only a whole drop says that nothing of it is in the model.
            self._is_torn = self._is_torn or self._in_place or isinstance(error, TornWeights)
            raise
        update.has_received = False

    async def _restore_kv(self) -> None:
        """Which resumes as well, as vLLM does it: not for a torn engine."""
        if not self._is_torn:
            await self._steps.restore_kv()

    async def _resume(self) -> None:
        if not self._is_torn:
            await self._steps.resume()

    def _refuse_if_discarded(self, update: _Update) -> None:
        if self._held is not update:
            raise EngineError(f"{self._name}: the update was discarded before it was staged")

    async def _give_back(self, update: _Update, error: BaseException | None) -> None:
        if self._held is update:
            self._held = None
        await update.undo.give_back(error)


@dataclass(eq=False)
class _Update:
    """One change of weights, from its stage to its end."""

    undo: Undo
    is_paused: bool = False
    has_received: bool = False
    trouble: str = ""
