"""TrajectoryQueue: references to finished groups, on their way from rollout to training.

It holds references, never arrays. In Ray the caller of a method owns what it returns: so the
queue calls the worker for its finished groups, and a group, wherever it lies in the object
store, outlives the worker that made it. A full queue makes producers wait; a trainer waits for
a batch; nobody polls.

What the queue holds is lost with its process. Ray restarts it, and the new one, another
incarnation, takes and gives nothing until the controller opens it: by then the prompts of all
that was lost are drawn again, and what is still on its way is expected here. A lease of an
earlier incarnation means nothing any more.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import ray
from ray.actor import ActorHandle

from areal_ray.actors.telemetry import MonitorAddress, Telemetry
from areal_ray.changes import Changes
from areal_ray.checkpoints import read_groups
from areal_ray.deadlines import within
from areal_ray.errors import QueueClosed, Superseded
from areal_ray.observability.actor_report import QueueFacts
from areal_ray.observability.loop_health import LoopReport
from areal_ray.observability.spans import Span
from areal_ray.trajectory_buffer import TrajectoryBuffer
from areal_ray.types import GroupSummary, TrajectoryGroup, WeightVersion

HAND_OVER_TIMEOUT_S = 300.0

CHUNK_BYTES = 16 * 2**20
"""Groups that a worker hands over together lie together in the object store, up to this size: an
object costs Ray a millisecond or two, however small it is."""


@dataclass(frozen=True)
class Place:
    """Where a group lies: in which object, and at which position there."""

    chunk: ray.ObjectRef
    position: int


@dataclass(frozen=True)
class Lease:
    """A batch that is on loan to the trainer until it acknowledges it."""

    incarnation: str
    lease_id: int
    group_ids: list[int]
    places: list[Place]


class Receipt(msgspec.Struct, frozen=True):
    """What became of the groups that a worker offered: taken now, or not wanted (again). For
    the others there was no room."""

    incarnation: str
    taken: list[int]
    unwanted: list[int]


class QueueNews(msgspec.Struct, frozen=True):
    """What the controller must know: `is_open` is False in a queue that has just (re)started.
    Of all that it ever expected and does not any more, the `withdrawn` alone were not taken."""

    incarnation: str
    is_open: bool
    expected: list[int]
    highest_expected: int
    withdrawn: list[int]
    expired: list[int]
    held: list[int]
    """What a queue that is not open yet begins with."""


class QueueStatus(msgspec.Struct, frozen=True):
    waiting_groups: int
    held_groups: int
    held_bytes: int
    loop: LoopReport


@ray.remote(max_concurrency=4096)
class TrajectoryQueue:
    def __init__(
        self,
        *,
        batch: int,
        max_groups: int,
        max_bytes: int,
        max_staleness: int,
        window: int | None,
        monitor: MonitorAddress | None = None,
    ) -> None:
        self._buffer: TrajectoryBuffer[Place] = TrajectoryBuffer(
            batch=batch,
            max_groups=max_groups,
            max_bytes=max_bytes,
            max_staleness=max_staleness,
            window=window,
        )
        self._incarnation = uuid.uuid4().hex
        self._is_open = False
        self._turns: dict[str, int] = {}
        """How often each holder has asked for a batch."""
        self._closed = False
        self._came_at: dict[int, float] = {}
        """When each waiting group came, for the traces."""
        self._changed = Changes()
        self._telemetry = Telemetry(
            "queue",
            monitor=monitor,
            facts=lambda: QueueFacts(groups=self._buffer.groups, nbytes=self._buffer.nbytes),
            shown=self.__repr__,
        )
        self._telemetry.start()

    def __repr__(self) -> str:
        if not self._is_open:
            return "TrajectoryQueue"
        waiting, size_mb = self._buffer.waiting, self._buffer.nbytes / 1e6
        return f"TrajectoryQueue[{waiting} groups wait, {size_mb:.1f} MB held]"

    async def open(self, expected: Sequence[int]) -> None:
        """Begin to take and give; these groups are on their way."""
        self._buffer.expect(expected)
        self._is_open = True
        self._changed.notify()

    async def update(self, expect: Sequence[int], drop: Sequence[int]) -> None:
        """These groups are on their way from now on, and those are no more."""
        self._buffer.expect(expect)
        self._buffer.drop(drop)
        self._changed.notify()

    async def restore(self, path: str) -> None:
        """Before it is opened: these groups wait here, as they did when that file was written."""
        groups = await asyncio.to_thread(read_groups, Path(path))
        self._buffer.expect(sorted(group.group_id for group in groups))
        by_id = {group.group_id: group for group in groups}
        for chunk in _chunks([group.summary() for group in groups]):
            together = [by_id[summary.group_id] for summary in chunk]
            reference = await asyncio.to_thread(ray.put, together)
            for position, summary in enumerate(chunk):
                self._buffer.reserve(summary)
                self._buffer.put(Place(reference, position), summary)

    async def snapshot(self) -> dict[int, Place]:
        """The groups that wait to be trained on."""
        return self._buffer.waiting_payloads

    async def untrained(self) -> list[int]:
        """What has come and was not acknowledged, as far as the controller may not know of it."""
        await self._changed.until(lambda: self._is_open or self._closed)
        return self._buffer.untrained

    async def put(self, worker: ActorHandle, summaries: Sequence[GroupSummary]) -> Receipt:
        """Take over the groups that `worker` has finished, as far as there is room."""
        await self._until(lambda: self._is_open)
        unwanted = [s.group_id for s in summaries if not self._buffer.is_wanted(s.group_id)]
        taken = []
        for summary in summaries:
            if self._buffer.is_wanted(summary.group_id) and self._buffer.has_room(summary):
                self._buffer.reserve(summary)
                taken.append(summary)
        if taken:
            await self._take_over(worker, taken)
        return Receipt(self._incarnation, [s.group_id for s in taken], unwanted)

    async def until_room(self, summaries: Sequence[GroupSummary]) -> None:
        """Returns when it may be worth while to offer these again: one of them at least."""
        await self._until(lambda: self._is_open and any(map(self._would_answer, summaries)))

    async def get_batch(self, version: WeightVersion, holder: str) -> Lease:
        """Lend out the next groups that are fresh enough. Waits until they make a batch. What the
        holder was lent before and did not end goes back first."""
        turn = self._turns[holder] = self._turns.get(holder, 0) + 1
        leased = None
        while leased is None:
            await self._until(lambda: self._is_open)
            if self._turns[holder] != turn:
                # It is of a trainer that was restarted: what it would get, nobody would end.
                raise Superseded(f"{holder} has asked for another batch since")
            expired = len(self._buffer.expired)
            leased = self._buffer.lease(version, holder)
            if leased is not None or len(self._buffer.expired) > expired:
                # Room for producers, and maybe work for the controller.
                self._changed.notify()
            if leased is None:
                await self._changed.next()
        lease_id, entries = leased
        self._note_waits([entry.summary.group_id for entry in entries])
        return Lease(
            incarnation=self._incarnation,
            lease_id=lease_id,
            group_ids=[entry.summary.group_id for entry in entries],
            places=[entry.payload for entry in entries],
        )

    async def acknowledge(self, incarnation: str, lease_id: int) -> None:
        """They were trained on: let them go."""
        if incarnation == self._incarnation:
            self._buffer.acknowledge(lease_id)
            self._changed.notify()

    async def release(self, incarnation: str, lease_id: int, lost: Sequence[int] = ()) -> None:
        """They were not trained on: they go first the next time, but for the `lost` ones, whose
        arrays are gone with the node that they lay on."""
        if incarnation == self._incarnation:
            self._buffer.release(lease_id, lost)
            self._changed.notify()

    async def discard(self) -> None:
        """What waits here is not to be trained on: its prompts are drawn again."""
        self._buffer.expire_waiting()
        self._changed.notify()

    async def has_taken(self, group_id: int, *, withdraw: bool = False) -> str:
        """This incarnation, if an expected group is here by now, or was; else "", and `withdraw`
        refuses it from now on."""
        await self._until(lambda: self._is_open and not self._buffer.is_coming(group_id))
        if not self._buffer.is_wanted(group_id):
            return self._incarnation
        if withdraw:
            self._buffer.withdraw(group_id)
            self._changed.notify()
        return ""

    async def news(self, incarnation: str, rerolled: Sequence[int]) -> QueueNews:
        """Waits while `incarnation` is this one and nothing has expired but what the controller
        has `rerolled`. Expired groups are told again until then: none is lost with a controller.
        """
        self._buffer.forget_expired(rerolled)
        await self._until(lambda: incarnation != self._incarnation or self._buffer.expired)
        return QueueNews(
            incarnation=self._incarnation,
            is_open=self._is_open,
            expected=self._buffer.expected,
            highest_expected=self._buffer.highest_expected,
            withdrawn=self._buffer.withdrawn,
            expired=self._buffer.expired,
            held=[] if self._is_open else list(self._buffer.waiting_payloads),
        )

    async def status(self) -> QueueStatus:
        return QueueStatus(
            waiting_groups=self._buffer.waiting,
            held_groups=self._buffer.groups,
            held_bytes=self._buffer.nbytes,
            loop=self._telemetry.loop(),
        )

    async def close(self) -> None:
        """Let everybody who waits go, with `QueueClosed`."""
        self._closed = True
        self._changed.notify()

    async def end(self) -> None:
        """The run is over."""
        await self._telemetry.close()

    async def _take_over(self, worker: ActorHandle, summaries: Sequence[GroupSummary]) -> None:
        chunks = _chunks(summaries)
        try:
            # The last return value only tells that the others are stored: awaiting a chunk
            # itself would bring it here.
            *references, stored = worker.hand_over.options(num_returns=len(chunks) + 1).remote(
                [[summary.group_id for summary in chunk] for chunk in chunks]
            )
            await within(
                HAND_OVER_TIMEOUT_S, stored, who="a rollout worker", doing="handing groups over"
            )
        except BaseException:
            for summary in summaries:
                self._buffer.cancel(summary.group_id)
            self._changed.notify()
            raise
        for reference, chunk in zip(references, chunks, strict=True):
            for position, summary in enumerate(chunk):
                self._buffer.put(Place(reference, position), summary)
                self._came_at[summary.group_id] = time.time()
        self._changed.notify()

    def _note_waits(self, lent: Sequence[int]) -> None:
        now = time.time()
        for group_id in lent:
            came_at = self._came_at.pop(group_id, now)
            span = Span("queue wait", came_at, now - came_at, f"group {group_id}")
            self._telemetry.spans.add(span)
        waiting = self._buffer.waiting_payloads
        for group_id in [one for one in self._came_at if one not in waiting]:
            del self._came_at[group_id]  # it has expired, or was dropped

    def _would_answer(self, summary: GroupSummary) -> bool:
        """Whether this group, offered now, would be taken or refused for good."""
        return not self._buffer.is_wanted(summary.group_id) or self._buffer.has_room(summary)

    async def _until(self, condition: Callable[[], object]) -> None:
        await self._changed.until(lambda: self._closed or condition())
        if self._closed:
            raise QueueClosed("the trajectory queue is closed")


async def read_places(places: Sequence[Place]) -> list[TrajectoryGroup]:
    """The groups that lie there. Raises if one can't be read."""
    references = list(dict.fromkeys(place.chunk for place in places))
    chunks = dict(zip(references, await asyncio.gather(*references), strict=True))
    return [chunks[place.chunk][place.position] for place in places]


def _chunks(summaries: Sequence[GroupSummary]) -> list[list[GroupSummary]]:
    """As they come, as many together as fit."""
    chunks: list[list[GroupSummary]] = []
    room = 0
    for summary in summaries:
        if not chunks or summary.nbytes > room:
            chunks.append([])
            room = CHUNK_BYTES
        chunks[-1].append(summary)
        room -= summary.nbytes
    return chunks
