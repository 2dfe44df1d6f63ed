"""Finished groups between rollout and training. A pure state machine over opaque payloads.

An entry's life:

    reserved -> waiting -> leased -> acknowledged (gone)
                      |         `-> released (waiting again, in its old place)
                      `-> expired

Groups are handed out in the order in which they were put. One whose oldest token is more than
`max_staleness` versions behind is never handed out: it expires, and `take_expired` tells whose
prompts to roll out again. Nothing is dropped for want of room: `has_room` tells a producer to
wait.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from areal_ray.types import GroupSummary, WeightVersion

Payload = TypeVar("Payload")


@dataclass(frozen=True)
class Entry(Generic[Payload]):
    payload: Payload
    summary: GroupSummary


class TrajectoryBuffer(Generic[Payload]):
    def __init__(self, *, batch: int, max_groups: int, max_bytes: int, max_staleness: int) -> None:
        self._batch = batch
        self._max_groups = max_groups
        self._max_bytes = max_bytes
        self._max_staleness = max_staleness
        self._waiting: deque[Entry[Payload]] = deque()
        self._leased: dict[int, list[Entry[Payload]]] = {}
        self._expired: list[int] = []
        self._reserved = 0
        self._bytes = 0
        self._next_lease = 0

    @property
    def groups(self) -> int:
        """Groups that have a place: reserved, waiting or leased."""
        leased = sum(len(entries) for entries in self._leased.values())
        return self._reserved + len(self._waiting) + leased

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def has_room(self, nbytes: int) -> bool:
        """What the next batch is short of is let in past every bound: it would wait for ever."""
        if self._reserved + len(self._waiting) < self._batch:
            return True
        return self.groups < self._max_groups and self._bytes + nbytes <= self._max_bytes

    def reserve(self, summary: GroupSummary) -> None:
        """Keep a place for a group that is on its way."""
        self._reserved += 1
        self._bytes += summary.nbytes

    def cancel(self, summary: GroupSummary) -> None:
        """The group that a place was kept for will not come."""
        self._reserved -= 1
        self._bytes -= summary.nbytes

    def put(self, payload: Payload, summary: GroupSummary) -> None:
        """Fill the place that was kept for this group."""
        self._reserved -= 1
        self._waiting.append(Entry(payload, summary))

    def lease(self, count: int, version: WeightVersion) -> tuple[int, list[Entry[Payload]]] | None:
        """The oldest `count` groups that are fresh enough, or None while there are too few."""
        self._expire(version)
        if len(self._waiting) < count:
            return None
        lease_id, self._next_lease = self._next_lease, self._next_lease + 1
        self._leased[lease_id] = [self._waiting.popleft() for _ in range(count)]
        return lease_id, self._leased[lease_id]

    def acknowledge(self, lease_id: int) -> None:
        """They were trained on: let them go."""
        for entry in self._leased.pop(lease_id):
            self._bytes -= entry.summary.nbytes

    def release(self, lease_id: int) -> None:
        """They were not trained on: back to the front."""
        self._waiting.extendleft(reversed(self._leased.pop(lease_id)))

    def take_expired(self) -> list[int]:
        """The ids of the groups that expired since the last call."""
        expired, self._expired = self._expired, []
        return expired

    def _expire(self, version: WeightVersion) -> None:
        oldest_allowed = version - self._max_staleness
        fresh: deque[Entry[Payload]] = deque()
        for entry in self._waiting:
            if entry.summary.oldest_version < oldest_allowed:
                self._expired.append(entry.summary.group_id)
                self._bytes -= entry.summary.nbytes
            else:
                fresh.append(entry)
        self._waiting = fresh
