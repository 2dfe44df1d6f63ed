"""Waiting for a condition over the state of one event loop.

    await changes.until(lambda: queue.has_room)     # here
    queue.take(); changes.notify()                  # there, in the same loop

Nothing is locked, since between two awaits nobody else runs; so state can be changed, and the
waiting told, from plain functions and from `finally` blocks that must not await.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Let everybody who waits look again."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until `condition()` is true; it is, when this returns."""
        while not condition():
            await self.next()

    async def next(self) -> None:
        """Wait for the next `notify`."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)
