"""How late an actor's event loop runs, and what held it.

A timer asks to be called ten times a second and notes how late it is; a daemon thread watches
that timer and, past a limit, logs the stack of the loop's thread. One blocking call in an async
actor holds up every other call to it and nothing fails: loops that stood still for seconds at
step boundaries went unmeasured. The timer is a chain of `call_later`, no task, so nothing is left
pending when the loop or the process ends, and the thread ends with the loop. Only that thread
runs off the loop: every method is called on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from math import inf

import msgspec
import numpy as np

from areal_ray import logs

UNSEEN = "  (not seen: it ended just then, or the process was stopped, or a call kept the GIL)\n"


class LoopReport(msgspec.Struct, frozen=True):
    """Lags of one event loop: percentiles and `max_ms` of the last 6,000 ticks (ten minutes at
    10 Hz), `samples` and `worst_ms` since the start or the last reset. `worst_stack` is what held
    the loop for `worst_ms`; it is empty when that is within the limit or was not seen."""

    who: str
    samples: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    worst_ms: float
    worst_stack: str


class LagWindow:
    """The lags of the last `size` ticks, counting those that a stall kept from happening.

    Ticks are due every 0.1 s and in one minute the loop is held once, so that the tick due at
    10.0 s comes at 15.0 s. As one sample of 5 s among 550 it would vanish: p99 is 0. But the
    ticks due at 10.1, 10.2 ... 15.0 s would have come at 15.0 s too, 4.9, 4.8 ... 0.0 s late, so
    51 lags are added. Of the minute's 600, the seven worst are 5.0 ... 4.4 s: p99 is 4.4 s.
    """

    def __init__(self, *, every_s: float, size: int = 6000) -> None:
        self._every_s = every_s
        self._lags_s = np.zeros(size)
        self._samples = 0
        self._worst_s = 0.0
        self._worst_stack = ""

    def add(self, lag_s: float, stack: str = "") -> None:
        """A tick that came. Of more lags than the window holds, it takes the longest."""
        if lag_s < self._every_s:  # Nearly always, ten times a second.
            self._lags_s[self._samples % len(self._lags_s)] = lag_s
            self._samples += 1
        else:
            self._add_stall(lag_s)
        if lag_s > self._worst_s:
            self._worst_s, self._worst_stack = lag_s, stack

    def _add_stall(self, lag_s: float) -> None:
        size = len(self._lags_s)
        nth = np.arange(min(int(lag_s / self._every_s) + 1, size))
        self._lags_s[(self._samples + nth) % size] = lag_s - self._every_s * nth
        self._samples += len(nth)

    def report(self, who: str) -> LoopReport:
        lags_ms = 1e3 * (self._lags_s[: self._samples] if self._samples else np.zeros(1))
        p50, p90, p99, most = np.percentile(lags_ms, (50, 90, 99, 100)).tolist()
        worst_ms = 1e3 * self._worst_s
        return LoopReport(who, self._samples, p50, p90, p99, most, worst_ms, self._worst_stack)


class StallLog:
    """Logs one stall in `quiet_s`: its stack, then how long it was. The next counts the untold."""

    def __init__(self, who: str, quiet_s: float) -> None:
        self._who, self._quiet_s = who, quiet_s
        self._told_at, self._told_stall, self._untold = -inf, inf, 0

    def held(self, now: float, stall: float, so_far_s: float, stack: str) -> None:
        if now - self._told_at < self._quiet_s:
            self._untold += 1
            return
        untold = f" ({self._untold} more since the last one told)" if self._untold else ""
        self._told_at, self._told_stall, self._untold = now, stall, 0
        message = "{}: the event loop is held for {:.2f} s so far{}, here:\n{}"
        logs.warning(message, self._who, so_far_s, untold, stack)

    def went_on(self, stall: float, lasted_s: float) -> None:
        if stall == self._told_stall:
            logs.warning("{}: the event loop went on after {:.2f} s", self._who, lasted_s)


class LoopHealth:
    """One loop's timer and watchdog. A stall is known by when the tick it delays was due."""

    def __init__(
        self,
        *,
        who: str,
        limit_s: float = 0.5,
        every_s: float = 0.1,
        quiet_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A tick later than `limit_s` is logged, but only one such stall in `quiet_s`."""
        # Not loop.time(): uvloop's is the time at which the current round of the loop began.
        self._who, self._limit_s, self._every_s, self._clock = who, limit_s, every_s, clock
        self._window = LagWindow(every_s=every_s)
        self._log = StallLog(who, quiet_s)
        self._due = inf  # While there is no timer.
        self._caught: dict[float, str] = {}  # The latest stall the watchdog saw: its stack.
        self._ended: deque[tuple[float, float]] = deque()  # Stalls and lags, for the watchdog.
        self._closed = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name=f"loop of {who}", daemon=True)

    def start(self) -> None:
        """Once, on the running loop."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._watchdog.start()
        self._ask()

    def report(self) -> LoopReport:
        """A tick that is late by now counts, so that a stall shows in the callback that made it."""
        window, overdue_s = self._window, self._clock() - self._due
        if overdue_s > 0:
            window = copy.deepcopy(window)
            window.add(overdue_s, self._caught.get(self._due, ""))
        return window.report(self._who)

    def reset(self) -> None:
        """Forget all lags until now."""
        if self._due < inf:
            self._timer.cancel()
            self._tick()
        self._window = LagWindow(every_s=self._every_s)

    def close(self) -> None:
        """Takes a last sample. The thread ends at once, unawaited; the report stays."""
        if self._due < inf:
            self._timer.cancel()
            self._take()
        self._closed.set()

    def _ask(self) -> None:
        self._due = self._clock() + self._every_s
        self._timer = self._loop.call_later(self._every_s, self._tick)

    def _tick(self) -> None:
        self._take()
        self._ask()

    def _take(self) -> None:
        due, self._due = self._due, inf
        lag_s = max(0.0, self._clock() - due)  # uvloop's timers round, and can be early.
        self._window.add(lag_s, self._caught.get(due, ""))
        if lag_s >= self._limit_s:
            self._ended.append((due, lag_s))

    def _watch(self) -> None:
        closed, soon_s = False, self._limit_s / 4
        while not closed and not self._loop.is_closed():
            left_s = self._due + self._limit_s - self._clock()
            # The tick after it is due later: until then nothing can be held for too long.
            closed = self._closed.wait(min(left_s, self._limit_s) if left_s > 0 else soon_s)
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - what watches outlives what it meets
                with contextlib.suppress(Exception):
                    logs.warning("{}: could not look at the event loop: {!r}", self._who, error)
        self._due = inf

    def _look(self) -> None:
        while self._ended:
            stall, lag_s = self._ended.popleft()
            if not self._caught.get(stall):
                self._log.held(self._clock(), stall, lag_s, UNSEEN)
            self._log.went_on(stall, lag_s)
        now, due = self._clock(), self._due
        if now - due < self._limit_s or due in self._caught or self._loop.is_closed():
            return
        self._caught = {due: ""}
        frame = sys._current_frames()[self._loop_thread]
        stack = "".join(traceback.format_list(traceback.extract_stack(frame, limit=12)))
        if self._due == due:  # Else the loop went on meanwhile, and this is where it is now.
            self._caught = {due: stack}
            self._log.held(now, due, now - due, stack)
