"""A clock that can be slowed and stopped, with timers that follow it.

A timer is armed on the clock underneath for the moment at which this one will get there, and
armed anew whenever the rate changes: a change costs as much as there are timers, time nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Tells the time and calls back. Every event loop is one."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[..., object], /, *args: object) -> Timer: ...


class PacedClock:
    """A clock that goes at a chosen rate of another one. At rate 0 it stands still."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rate = 1.0
        self._now_s = 0.0
        self._as_of_s = clock.time()
        self._timers: set[_PacedTimer] = set()

    def time(self) -> float:
        return self._now_s + (self._clock.time() - self._as_of_s) * self._rate

    def set_rate(self, rate: float) -> None:
        self._set(self.time())
        self._rate = rate
        for timer in self._timers:
            self._arm(timer)

    def call_at(self, when: float, callback: Callable[..., object], *args: object) -> Timer:
        timer = _PacedTimer(self._timers, when, callback, args)
        self._timers.add(timer)
        self._arm(timer)
        return timer

    def _arm(self, timer: _PacedTimer) -> None:
        timer.disarm()
        if self._rate > 0.0 and timer.when < math.inf:
            left_s = (timer.when - self.time()) / self._rate
            timer.handle = self._clock.call_at(self._clock.time() + left_s, self._fire, timer)

    def _fire(self, timer: _PacedTimer) -> None:
        # An event loop calls up to its resolution too early: what is due has come even so.
        self._set(max(self.time(), timer.when))
        timer.cancel()
        timer.callback(*timer.args)

    def _set(self, now_s: float) -> None:
        self._now_s, self._as_of_s = now_s, self._clock.time()


@dataclass(eq=False)
class _PacedTimer:
    among: set[_PacedTimer]
    when: float
    callback: Callable[..., object]
    args: tuple[object, ...]
    handle: Timer | None = None

    def cancel(self) -> None:
        self.among.discard(self)
        self.disarm()

    def disarm(self) -> None:
        if self.handle is not None:
            self.handle.cancel()
            self.handle = None
