"""Supervised asyncio tasks, whatever they do. A `TaskRunner` owns every task given to it until
that task has ended and somebody has been told how; `guarded` awaits one piece of work for as long
as its guards have nothing to say against it. What is always true: each submission is accounted
for exactly once, as an `Ended` that was taken or in the `Closing`; at most `limit` of them run;
the slot comes back however a task ends; nothing runs after `close`. It is so because a task that
nobody awaits swallows its exception: a fleet once idled for days behind one that had died. So
even a cancellation nobody here asked for is an outcome with an error, not a silence.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Final, Generic, Literal, NamedTuple, TypeVar, cast

from areal_ray.changes import Changes
from areal_ray.errors import ArealRayError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# The number in the `Ended` of a spawned task, which has no place among the submitted ones.
SPAWNED: Final = -1


class TaskCancelled(ArealRayError):
    """A task was ended by a cancellation (or an exit) that its runner did not ask for."""


class RunnerClosed(ArealRayError):
    """The task runner is closed: it takes no work and gives no results."""


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


@dataclass(frozen=True, slots=True)
class Ended(Generic[T_co]):
    """How one task ended. `number` counts submissions from 0."""

    name: str
    number: int
    value: T_co | None
    error: Exception | None

    def result(self) -> T_co:
        """Its value; or its error is raised, with the traceback of where it happened."""
        if self.error is not None:
            raise self.error
        return cast(T_co, self.value)


@dataclass(frozen=True, slots=True)
class Closing(Generic[T_co]):
    """What became of what was not taken. A submission is in exactly one of the four."""

    cancelled: tuple[str, ...]
    """Submissions that ran, and ended when they were told to."""
    never_started: tuple[str, ...]
    untaken: tuple[Ended[T_co], ...]
    """In completion order. One that gave a value in spite of its cancellation is here too."""
    errors: tuple[Ended[object], ...]
    """What raised while it was being cancelled, and the spawned tasks that failed after the one
    that `failed` tells of."""


class _Submission(NamedTuple, Generic[T]):
    number: int
    name: str
    work: Callable[[], Coroutine[object, object, T]]
    # A sibling's end may be what starts it; it must still see its own submitter's context.
    context: Context


class TaskRunner(Generic[T]):
    """Runs submissions, at most `limit` at once, and hands out how each one ended.

    The life of a submission: WAITING -> RUNNING -> ENDED -> taken. With `limit=2` and five
    submitted, `running` is 2 and `waiting` 3. One fails: it is ENDED, `running` is 2 and
    `waiting` 2. After `pause()` the next end leaves `running` 1 and `waiting` 2. `close()` then
    tells of one cancelled, two that never started and the two untaken.
    """

    def __init__(self, *, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit is {limit}: nothing would ever run; give at least 1 or None")
        self._limit = math.inf if limit is None else limit
        self._paused = False
        self._submitted = 0
        self._waiting: deque[_Submission[T]] = deque()
        self._running: dict[asyncio.Task[T], int] = {}
        # Ordered dicts, as only those give their first key in O(1) after many deletions.
        self._ended: OrderedDict[int, Ended[T]] = OrderedDict()  # in completion order
        self._not_taken: OrderedDict[int, None] = OrderedDict()  # in submission order
        self._news = Changes()

        self._vital: set[asyncio.Task[None]] = set()
        self._vital_failure: Ended[None] | None = None
        self._vital_news = Changes()

        self._closed = False
        self._closers = 0
        self._told_to_end: set[asyncio.Task[T | None]] = set()
        self._cancelled: list[str] = []
        self._never_started: list[str] = []
        self._errors: list[Ended[object]] = []
        self._closing: Closing[T] | None = None

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def running(self) -> int:
        """Submissions that hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Submissions that have not started."""
        return len(self._waiting)

    def submit(self, work: Callable[[], Coroutine[object, object, T]], *, name: str) -> int:
        """Run it when there is room. How it ends is told, by the number that this returns, to
        whoever takes results."""
        self._refuse_if_closed(name)
        submission = _Submission(self._submitted, name, work, copy_context())
        self._submitted += 1
        self._not_taken[submission.number] = None
        self._waiting.append(submission)
        self._start_what_fits()
        return submission.number

    def spawn(self, work: Callable[[], Coroutine[object, object, None]], *, name: str) -> None:
        """Run it now, outside the limit and the pause. It is vital: `failed` tells if it fails."""
        self._refuse_if_closed(name)
        task = asyncio.get_running_loop().create_task(_called(work), name=name)
        self._vital.add(task)
        task.add_done_callback(self._vital_ended)

    async def failed(self) -> None:
        """Wait until a vital task fails, and raise its error. Never returns otherwise."""
        while self._vital_failure is None:
            await self._vital_news.next()
        self._vital_failure.result()

    def pause(self) -> None:
        """Start no more submissions. What runs goes on, and its results can be taken."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._start_what_fits()

    async def next_ended(self, *, timeout_s: float | None = None) -> Ended[T]:
        """The next submission to end. `TimeoutError` past `timeout_s`; no result is lost by it."""
        async with asyncio.timeout(timeout_s):
            while not self._closed:
                # Taken without an await in between, so that a cancellation can't come there.
                if (ended := self._take("completion")) is not None:
                    return ended
                await self._news.next()
        raise RunnerClosed("the task runner was closed: what was not taken is in its Closing")

    async def results(
        self, *, order: Literal["completion", "submission"] = "completion"
    ) -> AsyncIterator[Ended[T]]:
        """Every result, until all that was submitted has been taken or the runner is closed."""
        while self._not_taken and not self._closed:
            if (ended := self._take(order)) is not None:
                yield ended
            else:
                await self._news.next()

    async def close(self) -> Closing[T]:
        """End everything, and tell what became of it. Call it again if it was cancelled."""
        closer = asyncio.current_task()
        if closer in self._running or closer in self._vital:
            raise RuntimeError("a task can't close its own runner: it would await itself for ever")
        self._closed = True
        self._never_started += [submission.name for submission in self._waiting]
        self._waiting.clear()
        self._news.notify()
        await self._end_what_runs()
        if self._closing is None:
            self._closing = Closing(
                cancelled=tuple(self._cancelled),
                never_started=tuple(self._never_started),
                untaken=tuple(self._ended.values()),
                errors=tuple(self._errors),
            )
        return self._closing

    async def _end_what_runs(self) -> None:
        # Who joins a closing must not cancel again: that would cut short the clean-up under way.
        # Who repeats one that was given up must: a task may have swallowed the first request.
        joins = self._closers > 0
        self._closers += 1
        try:
            if not joins:
                tasks = (*self._running, *self._vital)
                self._told_to_end.update(task for task in tasks if task.cancel())
            while self._running or self._vital:
                await asyncio.wait((*self._running, *self._vital))
        finally:
            self._closers -= 1

    def _refuse_if_closed(self, name: str) -> None:
        if self._closed:
            raise RunnerClosed(f"the task runner is closed and does not take {name!r}")

    def _start_what_fits(self) -> None:
        while self._waiting and not self._paused and len(self._running) < self._limit:
            number, name, work, context = self._waiting.popleft()
            loop = asyncio.get_running_loop()
            task = loop.create_task(_called(work), name=name, context=context)
            self._running[task] = number
            # Not a `finally` in the coroutine: one cancelled before its first step runs no line.
            task.add_done_callback(self._submission_ended, context=context)

    def _submission_ended(self, task: asyncio.Task[T]) -> None:
        ended = _outcome(task, self._running.pop(task))
        if task not in self._told_to_end or ended.error is None:
            self._ended[ended.number] = ended
            self._news.notify()
            self._start_what_fits()
        elif task.cancelled():
            self._cancelled.append(ended.name)
        else:
            self._errors.append(ended)

    def _vital_ended(self, task: asyncio.Task[None]) -> None:
        self._vital.discard(task)
        told_to_end = task in self._told_to_end
        ended = _outcome(task, SPAWNED)
        if ended.error is None or (told_to_end and task.cancelled()):
            return
        if told_to_end or self._vital_failure is not None:
            self._errors.append(ended)
        else:
            self._vital_failure = ended
            self._vital_news.notify()

    def _take(self, order: Literal["completion", "submission"]) -> Ended[T] | None:
        """The next result in this order, if it is there yet."""
        number = next(iter(self._ended if order == "completion" else self._not_taken), None)
        if number is None or number not in self._ended:
            return None
        del self._not_taken[number]
        return self._ended.pop(number)


async def _called(work: Callable[[], Coroutine[object, object, T]]) -> T:
    """Call it inside its task: a factory that raises is then an outcome like any other, and one
    that is cancelled first leaves no coroutine behind."""
    return await work()


def _outcome(task: asyncio.Task[T], number: int) -> Ended[T]:
    name = task.get_name()
    try:
        error = task.exception()
    except asyncio.CancelledError as cancellation:
        error = cancellation
    if error is None:
        return Ended(name, number, task.result(), None)
    if isinstance(error, Exception):
        return Ended(name, number, None, error)
    cancelled = TaskCancelled(
        f"task {name!r} was ended by {type(error).__name__}, which its runner did not ask for"
    )
    cancelled.__cause__ = error
    return Ended(name, number, None, cancelled)
