"""Who gets the next piece of work: the one with the least of it.

    with balancer.lease(weight=tokens) as engine:
        await engine.generate(...)

The weight counts from the choice until the block ends, however it ends: a cancelled or failed
piece of work frees its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class LeastLoaded(Generic[T]):
    def __init__(self, members: Sequence[T]) -> None:
        if not members:
            raise ValueError("nobody to choose from")
        self._members = list(members)
        self._loads = [0] * len(members)

    @property
    def loads(self) -> tuple[int, ...]:
        return tuple(self._loads)

    @contextmanager
    def lease(self, *, weight: int) -> Iterator[T]:
        index = self._loads.index(min(self._loads))
        self._loads[index] += weight
        try:
            yield self._members[index]
        finally:
            self._loads[index] -= weight
