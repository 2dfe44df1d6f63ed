"""Who gets the next piece of work: of those that take any, the one with the least of it.

    async with balancer.lease(weight=tokens) as lease:
        await lease.member.generate(...)
        await lease.move()          # when that one is lost: to another, with the same weight

The weight counts from the choice until the block ends, however it ends: a cancelled or failed
piece of work frees its place. While nobody takes work, a lease waits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from areal_ray.changes import Changes

T = TypeVar("T")


class Lease(Generic[T]):
    def __init__(self, balancer: Balancer[T], weight: int) -> None:
        self._balancer = balancer
        self._weight = weight
        self.name = ""
        self.member: T

    async def move(self, *, prefer: str = "") -> None:
        """Go to `prefer` if it takes work, else to the least loaded. Waits until one does."""
        self.release()
        self.name, self.member = await self._balancer._choose(self._weight, prefer)

    def release(self) -> None:
        name, self.name = self.name, ""
        if name:
            self._balancer._unload(name, self._weight)


class Balancer(Generic[T]):
    def __init__(self) -> None:
        self._open: dict[str, T] = {}
        self._loads: dict[str, int] = {}
        self._changed = Changes()

    @property
    def loads(self) -> dict[str, int]:
        """The outstanding weight of everybody who has any, or takes any."""
        return dict(self._loads)

    def admit(self, name: str, member: T) -> None:
        """From now on it takes work."""
        self._open[name] = member
        self._loads.setdefault(name, 0)
        self._changed.notify()

    def exclude(self, name: str) -> None:
        """No new work; what it has, it keeps until its leases end."""
        self._open.pop(name, None)
        if not self._loads.get(name):
            self._loads.pop(name, None)

    async def until_idle(self, name: str) -> None:
        """Wait until no lease is left on it."""
        await self._changed.until(lambda: not self._loads.get(name))

    @asynccontextmanager
    async def lease(self, *, weight: int, prefer: str = "") -> AsyncIterator[Lease[T]]:
        lease = Lease(self, weight)
        try:
            await lease.move(prefer=prefer)
            yield lease
        finally:
            lease.release()

    async def _choose(self, weight: int, prefer: str) -> tuple[str, T]:
        await self._changed.until(lambda: self._open)
        name = prefer if prefer in self._open else min(self._open, key=self._loads.__getitem__)
        self._loads[name] += weight
        return name, self._open[name]

    def _unload(self, name: str, weight: int) -> None:
        self._loads[name] -= weight
        if not self._loads[name]:
            if name not in self._open:
                del self._loads[name]
            self._changed.notify()
