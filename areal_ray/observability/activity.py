"""How one actor spends its time: exactly one activity at every moment, and none of them lost.

Activities are begun and ended, several at once if need be; the first of `PRIORITY` that is under
way is the one that counts, and without any it is the one the meter is made with. Totals only ever
grow: whoever wants to know what happened since he last asked takes the difference, so no reader can
lose what another one has read.

Example: an engine with nothing to do is `waiting for data`. At 10 s a request begins `busy`; at
12 s a commit begins `paused`, and ends at 12.1 s; at 15 s the request ends. By then the totals have
grown by busy 4.9, paused 0.1.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from areal_ray.observability.timeline import Activity

PRIORITY: tuple[Activity, ...] = (
    "restarting",
    "resting",
    "paused",
    "busy",
    "saving",
    "waiting for weights",
    "waiting for data",
)


class ActivityMeter:
    def __init__(self, otherwise: Activity, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`otherwise`: what it does when nothing is under way."""
        self._otherwise: Activity = otherwise
        self._clock = clock
        self._under_way: Counter[Activity] = Counter()
        self._totals: Counter[Activity] = Counter()
        self._since = clock()

    @property
    def now(self) -> Activity:
        return next((one for one in PRIORITY if self._under_way[one]), self._otherwise)

    @property
    def totals(self) -> dict[Activity, float]:
        """Seconds since the beginning, until now."""
        self._count()
        return dict(self._totals)

    def begin(self, activity: Activity) -> None:
        self._count()
        self._under_way[activity] += 1

    def end(self, activity: Activity) -> None:
        self._count()
        if not self._under_way[activity]:
            raise ValueError(f"{activity} was ended before it began")
        self._under_way[activity] -= 1

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        self.begin(activity)
        try:
            yield
        finally:
            self.end(activity)

    def _count(self) -> None:
        now = self._clock()
        self._totals[self.now] += now - self._since
        self._since = now
