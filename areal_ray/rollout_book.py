"""The book of all rollout groups: which prompt each one is of, and where in its life it is.

    drawn -> running -> accepted -> trained
                   |          `--> expired     too old, or lost with the queue: drawn again first
                   |-> filtered                by the user's rule: done with
                   `-> failed, timed out       drawn again at the end of the epoch

A pure state machine over the prompt source and the ledger. Whatever happens in it is an event;
`take_events` gives what has happened since the last call, for the journal, and a book that
applies the same events from the same beginning is the same book. So a controller that was killed
goes on where it stood: no prompt lost, no slot leaked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from areal_ray.data import PromptSource, SourceState
from areal_ray.errors import JournalError
from areal_ray.staleness import LedgerCounts, StalenessLedger
from areal_ray.types import Prompt, WeightVersion

Ending = Literal["accepted", "filtered", "failed", "timed out"]


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Something that happened to the book. Small: there is one for each turn of a group's life."""


class Drawn(_Event, tag="drawn"):
    group_id: int
    prompt: int


class Ended(_Event, tag="ended"):
    group_id: int
    how: Ending
    tokens: int = 0


class Expired(_Event, tag="expired"):
    group_id: int


class Trained(_Event, tag="trained"):
    group_ids: tuple[int, ...]


class Committed(_Event, tag="committed"):
    version: WeightVersion
    skipped: int = 0


class Paused(_Event, tag="paused"):
    is_paused: bool


Event = Drawn | Ended | Expired | Trained | Committed | Paused


class BookState(msgspec.Struct, frozen=True):
    """All of a book at one moment. Groups map to the index of their prompt."""

    next_group: int
    counts: LedgerCounts
    running: dict[int, int]
    accepted: dict[int, int]
    generated_tokens: int
    is_paused: bool
    source: SourceState


class Ticket(msgspec.Struct, frozen=True):
    """A group to roll out."""

    group_id: int
    prompt: Prompt


class RolloutBook:
    def __init__(
        self,
        source: PromptSource,
        *,
        batch: int,
        max_staleness: int,
        max_concurrent: int,
        state: BookState | None = None,
    ) -> None:
        self._source = source
        self._batch = batch
        self._events: list[Event] = []
        self._next_group = 0
        self._running: dict[int, int] = {}
        self._accepted: dict[int, int] = {}
        self.generated_tokens = 0
        self.is_paused = False
        counts = None
        if state is not None:
            source.restore(state.source)
            self._next_group = state.next_group
            self._running = dict(state.running)
            self._accepted = dict(state.accepted)
            self.generated_tokens = state.generated_tokens
            self.is_paused = state.is_paused
            counts = state.counts
        self._ledger = StalenessLedger(
            batch=batch, max_staleness=max_staleness, max_concurrent=max_concurrent, counts=counts
        )

    @property
    def capacity(self) -> int:
        return self._ledger.capacity

    @property
    def counts(self) -> LedgerCounts:
        return self._ledger.counts

    @property
    def running(self) -> list[Ticket]:
        return [Ticket(group_id, self._source[p]) for group_id, p in self._running.items()]

    @property
    def accepted(self) -> Sequence[int]:
        """The groups that wait to be trained on, or are being trained on."""
        return list(self._accepted)

    @property
    def state(self) -> BookState:
        return BookState(
            next_group=self._next_group,
            counts=self._ledger.counts,
            running=dict(self._running),
            accepted=dict(self._accepted),
            generated_tokens=self.generated_tokens,
            is_paused=self.is_paused,
            source=self._source.state,
        )

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def is_running(self, group_id: int) -> bool:
        return group_id in self._running

    def draw(self) -> Ticket:
        self._ledger.submit()
        group_id, self._next_group = self._next_group, self._next_group + 1
        index = self._running[group_id] = self._source.draw()
        self._events.append(Drawn(group_id, index))
        return Ticket(group_id, self._source[index])

    def end(self, group_id: int, how: Ending, *, tokens: int = 0) -> bool:
        """False if it failed, and its prompt too often to be tried again."""
        if group_id not in self._running:
            raise ValueError(f"group {group_id} is not running")
        index = self._running.pop(group_id)
        self._events.append(Ended(group_id, how, tokens))
        self.generated_tokens += tokens
        if how == "accepted":
            self._ledger.accept()
            self._accepted[group_id] = index
        elif how == "filtered":
            self._ledger.filter()
        else:
            self._ledger.fail()
            return self._source.failed(index)
        return True

    def expire(self, group_id: int) -> None:
        """It can't be trained on any more: its prompt is drawn again, first. A group that is not
        waiting to be trained on is left alone: such news may come twice."""
        if group_id in self._accepted:
            self._ledger.expire()
            self._source.put_back(self._accepted.pop(group_id))
            self._events.append(Expired(group_id))

    def trained(self, group_ids: Iterable[int]) -> None:
        """They are done with. Telling it twice does no harm. One that still runs here was taken
        by the queue and went to the trainer before its worker's word came."""
        group_ids = list(group_ids)
        for group_id in filter(self.is_running, group_ids):
            self.end(group_id, "accepted")
        known = tuple(group_id for group_id in group_ids if group_id in self._accepted)
        for group_id in known:
            del self._accepted[group_id]
        self._events.append(Trained(known))

    def commit(self, version: WeightVersion, *, skipped: int = 0) -> None:
        """`skipped`: versions that consumed nothing."""
        self._ledger.commit(version, skipped=skipped)
        self._events.append(Committed(version, skipped))

    def commit_recovered(self, version: WeightVersion) -> None:
        """The version of a trainer that went on from a checkpoint, once all that was trained on is
        told. It has consumed what was: the batch that the trainer died with, or nothing."""
        counts = self._ledger.counts
        trained = counts.accepted - len(self._accepted)
        skipped = version - trained // self._batch - counts.skipped
        self.commit(version, skipped=max(0, skipped))

    def pause(self, is_paused: bool) -> None:
        """Whether groups may start is not the book's business: it only remembers."""
        self.is_paused = is_paused
        self._events.append(Paused(is_paused))

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def replay(self, events: Iterable[Event]) -> None:
        """Go through what a book before this one went through."""
        for event in events:
            try:
                self._apply(event)
            except ValueError as error:
                raise JournalError(f"it tells of {event}, but {error}") from error
        self._events.clear()

    def _apply(self, event: Event) -> None:
        match event:
            case Drawn(group_id, prompt):
                ticket = self.draw()
                if (ticket.group_id, self._running[ticket.group_id]) != (group_id, prompt):
                    raise JournalError(f"it is of other prompts or another seed: {event}")
            case Ended(group_id, how, tokens):
                self.end(group_id, how, tokens=tokens)
            case Expired(group_id):
                self.expire(group_id)
            case Trained(group_ids):
                self.trained(group_ids)
            case Committed(version, skipped):
                self.commit(version, skipped=skipped)
            case Paused(is_paused):
                self.pause(is_paused)
