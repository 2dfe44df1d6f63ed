"""Ctrl-C, `kill` and `ray job stop`: once to end well, twice to end now."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import TypeVar

from areal_ray.tasks import guarded

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(Exception):
    """What was being awaited was given up, because the run is to stop."""


class StopSignals:
    """The first signal sets `requested`; the second cancels the task that entered this block.

    Outside the main thread (a notebook's helper, a Tune trial) there are no signals to catch,
    and `request` is the way to stop.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.signal: signal.Signals | None = None
        self._owner: asyncio.Task[object] | None = None
        self._caught: tuple[signal.Signals, ...] = ()

    def __enter__(self) -> StopSignals:
        self._owner = asyncio.current_task()
        if threading.current_thread() is threading.main_thread():
            self._caught = SIGNALS
        self.renew()
        return self

    def renew(self) -> None:
        """Once Ray is there: it puts a handler of its own before ours, which prints a stack."""
        for number in self._caught:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def __exit__(self, *_: object) -> None:
        for number in self._caught:
            asyncio.get_running_loop().remove_signal_handler(number)

    def request(self) -> None:
        self.requested.set()

    async def race(self, work: Coroutine[object, object, T]) -> T:
        """Await `work`, or give it up and raise `StopRequested` as soon as a stop is asked for."""
        return await guarded(work, self._raise_when_requested())

    async def _raise_when_requested(self) -> None:
        await self.requested.wait()
        raise StopRequested

    def _on_signal(self, number: signal.Signals) -> None:
        self.signal = number
        if self.requested.is_set() and self._owner is not None:
            self._owner.cancel()
        self.requested.set()
