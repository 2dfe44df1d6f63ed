"""A run in a thread of its own, held after each step until somebody lets it go on.

    advance() -> the run's next step -> held -> advance() -> ... -> held -> stop()

So a synchronous caller, such as a trial of a sweep, can look at every step, have it saved, and end
the run there. All methods are of one thread, which is not the run's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal_ray.checkpoints import CHECKPOINTS, CheckpointStore
from areal_ray.errors import CheckpointError
from areal_ray.oversight import Overseer
from areal_ray.session import Session
from areal_ray.stopping import StopRequested

STOP_TIMEOUT_S = 90.0
"""For engines and files to be closed; what is left then ends with the process."""


class Trains(Protocol):
    async def train(self, *, overseer: Overseer | None = None) -> object: ...


@dataclass(frozen=True)
class _Held:
    """The run waits for `released`, on `loop`: whether it is to go on."""

    released: asyncio.Future[bool]
    loop: asyncio.AbstractEventLoop


@dataclass(frozen=True)
class _Ended:
    error: BaseException | None


class HeldRun:
    def __init__(self, run: Trains) -> None:
        self._run = run
        self._reached: queue.SimpleQueue[_Held | _Ended] = queue.SimpleQueue()
        self._last: _Held | _Ended | None = None
        self._session: Session | None = None
        self._thread = threading.Thread(target=self._train, name="the run", daemon=True)

    @property
    def session(self) -> Session:
        """From its first step on. To be read while it is held, or has ended."""
        if self._session is None:
            raise RuntimeError("the run has not begun")
        return self._session

    def advance(self) -> bool:
        """Let the run take a step. False: it was the last, and the run has ended well, with all
        closed. Raises what made it fail."""
        if self._last is None:
            self._thread.start()
        else:
            self._release(to_go_on=True)
        self._last = self._reached.get()
        if isinstance(self._last, _Ended) and self._last.error is not None:
            raise self._last.error
        return isinstance(self._last, _Held)

    def save(self) -> Path:
        """A checkpoint of the step that it has reached. Where it lies will be written to when it
        goes on."""
        if isinstance(self._last, _Held):
            saving = asyncio.run_coroutine_threadsafe(self.session.save(), self._last.loop)
            try:
                saving.result()
            except concurrent.futures.CancelledError:
                raise CheckpointError("the run ended while it was being saved") from None
        checkpoints = self.session.directory / CHECKPOINTS
        checkpoint = CheckpointStore(checkpoints, keep=1).latest()
        if checkpoint.step != self.session.steps:
            raise CheckpointError(f"{checkpoints} holds none of step {self.session.steps}")
        return checkpoint.directory

    def stop(self) -> None:
        """End it where it is held, and wait until its actors are gone."""
        self._release(to_go_on=False)
        if self._last is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def began(self, session: Session) -> None:
        self._session = session

    async def after_step(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        released = loop.create_future()
        self._reached.put(_Held(released, loop))
        if not await released:
            raise StopRequested

    def _release(self, *, to_go_on: bool) -> None:
        if isinstance(self._last, _Held):
            # A run that failed while it was held has closed its loop, and said so.
            with contextlib.suppress(RuntimeError):
                self._last.loop.call_soon_threadsafe(_answer, self._last.released, to_go_on)

    def _train(self) -> None:
        error = None
        try:
            asyncio.run(self._run.train(overseer=self))
        except BaseException as raised:  # noqa: BLE001 - raised where the run is waited for
            error = raised
        self._reached.put(_Ended(error))


def _answer(released: asyncio.Future[bool], to_go_on: bool) -> None:
    if not released.done():  # cancelled, if the run has failed meanwhile
        released.set_result(to_go_on)
