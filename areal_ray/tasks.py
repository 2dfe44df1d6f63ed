"""Supervised asyncio tasks. Knows nothing of reinforcement learning.

A task that nobody awaits swallows its exception: the run then idles for days. Here every task
has an owner. `spawn` starts one; the first one to fail is handed to whoever awaits `failed()`;
`close` cancels the rest, awaits them and raises nothing that was not asked for. `guarded` awaits
one piece of work for as long as its guards have nothing to say against it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


async def guarded(
    work: Coroutine[object, object, T], *guards: Coroutine[object, object, None]
) -> T:
    """Await `work`. A guard that raises ends it at once, and its error is the one that counts;
    a guard that returns has nothing more to say. Nothing is left running afterwards.
    """
    working = asyncio.ensure_future(work)
    guarding = [asyncio.ensure_future(guard) for guard in guards]
    try:
        waiting = {working, *guarding}
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for guard in done - {working}:
                guard.result()
            if working.done():
                return working.result()
    finally:
        for task in (working, *guarding):
            task.cancel()
        await asyncio.gather(working, *guarding, return_exceptions=True)


class Supervisor:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._first_error: asyncio.Future[None] | None = None

    def spawn(self, coroutine: Coroutine[object, object, None], *, name: str) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def failed(self) -> None:
        """Wait until a task fails, and raise its error. Never returns otherwise."""
        await asyncio.shield(self._error_future())

    async def close(self) -> None:
        """Cancel every task and wait until each one has ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        future = self._error_future()
        if not future.done():
            future.set_exception(task.exception())

    def _error_future(self) -> asyncio.Future[None]:
        if self._first_error is None:
            self._first_error = asyncio.get_running_loop().create_future()
            # Mark it as looked at: `failed` may not be awaited yet when the first task fails.
            self._first_error.add_done_callback(
                lambda future: future.cancelled() or future.exception()
            )
        return self._first_error
