"""Finished groups between rollout and training. A pure state machine over opaque payloads.

A group's life here:

    expected -> reserved -> waiting -> leased -> acknowledged (gone)
        |  |                      |         |-> released (waiting again)
        |  `-> dropped (gone)     |         `-> lost with the node it lay on (expired)
        `-> withdrawn             `-> expired

Only an expected group is taken, and each of them once: a second copy, made because a worker was
thought dead, is refused. Nothing is dropped for want of room: `has_room` tells a producer to
wait. A group whose oldest token is more than `max_staleness` versions behind is never handed
out: it expires, and stays among the `expired` until its prompt is known to be drawn again.

A batch is leased to a holder, who has one lease at most: asking for the next gives back what was
neither acknowledged nor released, so nothing stays with a holder who died.

Groups are handed out oldest first, that is by their ids, as far as the `window` allows: only
those that are less than `window` ids ahead of the oldest group still expected. So `window` None
is the order of completion, 0 is the strict order of drawing, and anything between lets short
answers go first without starving the long ones out of the batch.

Example: window 3; groups 4, 6, 7 wait, 5 and 8 are expected. The oldest expected one is 5, so 4,
6 and 7 may go; had 9 been finished too, it would wait until 5 and 8 are in (8 + 3 > 9).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from areal_ray.types import GroupSummary, WeightVersion

Payload = TypeVar("Payload")


@dataclass(frozen=True)
class Entry(Generic[Payload]):
    payload: Payload
    summary: GroupSummary


@dataclass(frozen=True)
class _Leased(Generic[Payload]):
    holder: str
    entries: list[Entry[Payload]]


class TrajectoryBuffer(Generic[Payload]):
    def __init__(
        self,
        *,
        batch: int,
        max_groups: int,
        max_bytes: int,
        max_staleness: int,
        window: int | None = None,
    ) -> None:
        self._batch = batch
        self._max_groups = max_groups
        self._max_bytes = max_bytes
        self._max_staleness = max_staleness
        self._window = window
        self._expected: dict[int, None] = {}
        """In the order of drawing, which is that of the ids: the first is the oldest."""
        self.highest_expected = -1
        self._reserved: dict[int, int] = {}
        self._waiting: dict[int, Entry[Payload]] = {}
        """In the order of completion."""
        self._leased: dict[int, _Leased[Payload]] = {}
        self._withdrawn: dict[int, None] = {}
        self._expired: dict[int, None] = {}
        self._bytes = 0
        self._next_lease = 0

    @property
    def waiting_payloads(self) -> dict[int, Payload]:
        """By group, in the order of completion."""
        return {group_id: entry.payload for group_id, entry in self._waiting.items()}

    @property
    def untrained(self) -> list[int]:
        """Groups that have come, and that nobody has acknowledged: waiting, leased or expired."""
        leased = (entry for lease in self._leased.values() for entry in lease.entries)
        return [*self._waiting, *(entry.summary.group_id for entry in leased), *self._expired]

    @property
    def groups(self) -> int:
        """Groups that have a place: reserved, waiting or leased."""
        leased = sum(len(lease.entries) for lease in self._leased.values())
        return len(self._reserved) + len(self._waiting) + leased

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        return self._bytes

    @property
    def expected(self) -> list[int]:
        return list(self._expected)

    @property
    def withdrawn(self) -> list[int]:
        return list(self._withdrawn)

    @property
    def expired(self) -> list[int]:
        return list(self._expired)

    def expect(self, group_ids: Iterable[int]) -> None:
        """These groups are on their way."""
        ids = sorted(group_ids)
        if not ids:
            return
        in_order = not self._expected or ids[0] > next(reversed(self._expected))
        self._expected.update(dict.fromkeys(ids))
        if not in_order:
            self._expected = dict.fromkeys(sorted(self._expected))
        self.highest_expected = max(self.highest_expected, ids[-1])

    def drop(self, group_ids: Iterable[int]) -> None:
        """These will not come: they failed or were filtered, and whoever asked for them knows."""
        for group_id in group_ids:
            self._expected.pop(group_id, None)
            self._withdrawn.pop(group_id, None)

    def withdraw(self, group_id: int) -> None:
        """Refuse it from now on, and remember that until it is dropped: it is not here, though
        it is expected no more."""
        if group_id in self._expected:
            del self._expected[group_id]
            self._withdrawn[group_id] = None

    def is_wanted(self, group_id: int) -> bool:
        """Whether it is expected, and nobody else is about to bring it."""
        return group_id in self._expected and group_id not in self._reserved

    def is_coming(self, group_id: int) -> bool:
        """Whether somebody is about to bring it."""
        return group_id in self._reserved

    def has_room(self, summary: GroupSummary) -> bool:
        """What the next batch is short of is let in past every bound: it would wait for ever."""
        if self._may_go(summary.group_id) and self._soon_ready() < self._batch:
            return True
        return self.groups < self._max_groups and self._bytes + summary.nbytes <= self._max_bytes

    def reserve(self, summary: GroupSummary) -> None:
        """Keep a place for a group that is being brought."""
        if not self.is_wanted(summary.group_id):
            raise ValueError(f"group {summary.group_id} is not expected")
        self._reserved[summary.group_id] = summary.nbytes
        self._bytes += summary.nbytes

    def cancel(self, group_id: int) -> None:
        """The one who was bringing the group did not. It is still expected."""
        self._bytes -= self._reserved.pop(group_id)

    def put(self, payload: Payload, summary: GroupSummary) -> None:
        """Fill the place that was kept for this group."""
        del self._reserved[summary.group_id]
        self._expected.pop(summary.group_id, None)
        self._waiting[summary.group_id] = Entry(payload, summary)

    def lease(self, version: WeightVersion, holder: str) -> tuple[int, list[Entry[Payload]]] | None:
        """The next batch of groups that are fresh enough, or None while there are too few."""
        for lease_id in [k for k, leased in self._leased.items() if leased.holder == holder]:
            self.release(lease_id)
        self._expire(version)
        ready = self._ready()
        if len(ready) < self._batch:
            return None
        lease_id, self._next_lease = self._next_lease, self._next_lease + 1
        entries = [self._waiting.pop(group_id) for group_id in ready[: self._batch]]
        self._leased[lease_id] = _Leased(holder, entries)
        return lease_id, entries

    def acknowledge(self, lease_id: int) -> None:
        """They were trained on: let them go. Telling it twice does no harm."""
        for entry in self._taken_back(lease_id):
            self._bytes -= entry.summary.nbytes

    def release(self, lease_id: int, lost: Iterable[int] = ()) -> None:
        """They were not trained on: they go first the next time, but for those that are `lost`:
        nobody can read them any more. Telling it twice does no harm."""
        back = {entry.summary.group_id: entry for entry in self._taken_back(lease_id)}
        self._waiting = back | self._waiting
        for group_id in lost:
            if group_id in back:
                self._let_expire(group_id)

    def _taken_back(self, lease_id: int) -> list[Entry[Payload]]:
        leased = self._leased.pop(lease_id, None)
        return [] if leased is None else leased.entries

    def expire_waiting(self) -> None:
        """None of those that wait is to be trained on."""
        for group_id in list(self._waiting):
            self._let_expire(group_id)

    def forget_expired(self, group_ids: Iterable[int]) -> None:
        """Their prompts are known to be drawn again."""
        for group_id in group_ids:
            self._expired.pop(group_id, None)

    def _soon_ready(self) -> int:
        """How many wait or are being brought that may go."""
        if self._window is None:
            return len(self._reserved) + len(self._waiting)
        return sum(map(self._may_go, self._reserved)) + sum(map(self._may_go, self._waiting))

    def _ready(self) -> list[int]:
        """The waiting groups that may go, in the order in which they go."""
        if self._window is None:
            return list(self._waiting)
        return sorted(group_id for group_id in self._waiting if self._may_go(group_id))

    def _may_go(self, group_id: int) -> bool:
        if self._window is None or not self._expected:
            return True
        oldest = next(iter(self._expected))
        return group_id <= oldest or group_id < oldest + self._window

    def _expire(self, version: WeightVersion) -> None:
        oldest_allowed = version - self._max_staleness
        for group_id, entry in list(self._waiting.items()):
            if entry.summary.oldest_version < oldest_allowed:
                self._let_expire(group_id)

    def _let_expire(self, group_id: int) -> None:
        self._bytes -= self._waiting.pop(group_id).summary.nbytes
        self._expired[group_id] = None
