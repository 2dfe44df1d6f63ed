"""Undo: what was acquired, given back in reverse order, whatever happens meanwhile.

    async with Undo(timeout_s=30) as undo:
        undo.later("resuming engine-0", engine.resume)      # before the pause: half of one counts
        await engine.pause()
        ...
        undo.nothing_more()                                  # it is done, and stays so

The end of the block, a failure and a cancellation run what is still put down, last first.
Each restore has a time limit of its own, a failing one does not keep the others from running,
and no cancellation cuts them short: it is raised once they are through. Otherwise the error that
ended the block stays the one that is raised, with each restore's error as a note on it; where there
was none, the restores' errors are raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Self, TypeVar

from areal_ray import logs
from areal_ray.deadlines import within
from areal_ray.errors import RestoreError, described

T = TypeVar("T")


class Undo:
    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._restores: list[tuple[str, Callable[[], Awaitable[object]]]] = []

    def later(self, doing: str, restore: Callable[[], Awaitable[object]]) -> None:
        """`doing` names it in the error, if it fails."""
        self._restores.append((doing, restore))

    def nothing_more(self) -> None:
        """From here on all that was acquired is to stay."""
        self._restores.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _: type[BaseException] | None,
        error: BaseException | None,
        __: TracebackType | None,
    ) -> None:
        await self.give_back(error)

    async def give_back(self, error: BaseException | None = None) -> None:
        """Run what is put down. `error`: why, if there is a reason besides being done."""
        failures = await uncancelled(self._restore_all())
        if failures and error is None:
            raise RestoreError("; ".join(failures))
        for failure in failures:
            error.add_note(f"and then, {failure}")

    async def _restore_all(self) -> list[str]:
        failures = []
        while self._restores:
            doing, restore = self._restores.pop()
            try:
                await within(self._timeout_s, restore(), who="a restore", doing=doing)
            except (Exception, asyncio.CancelledError) as failure:  # noqa: BLE001 - told in the end
                failures.append(f"{doing} failed: {described(failure)}")
                logs.warning("while restoring: {}", failures[-1])
        return failures


async def uncancelled(work: Coroutine[object, object, T]) -> T:
    """Await it to its end, through any cancellation, which is raised afterwards.

    It must be bounded in time: nothing else ends it.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except BaseException:  # noqa: BLE001 - raised below, from the task
            break
    if cancelled is not None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            cancelled.add_note(f"and then, {described(failure)}")
        raise cancelled
    return task.result()
