from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from areal_ray.data import PromptSource
from areal_ray.errors import JournalError
from areal_ray.rollout_book import (
    BookState,
    Committed,
    Drawn,
    Ended,
    Ending,
    Event,
    Expired,
    Paused,
    RolloutBook,
    Trained,
)
from areal_ray.staleness import LedgerCounts
from areal_ray.types import Prompt


def source(prompts: int = 10, *, seed: int = 0, shuffle: bool = False) -> PromptSource:
    texts = [Prompt(text=str(i)) for i in range(prompts)]
    return PromptSource(texts, seed=seed, shuffle=shuffle)


def book(
    over: PromptSource | None = None,
    *,
    batch: int = 4,
    max_staleness: int = 1,
    max_concurrent: int = 100,
    state: BookState | None = None,
) -> RolloutBook:
    return RolloutBook(
        over or source(),
        batch=batch,
        max_staleness=max_staleness,
        max_concurrent=max_concurrent,
        state=state,
    )


def draw(kept: RolloutBook, count: int) -> list[tuple[int, str | None]]:
    """The ids and the prompts of the next groups."""
    tickets = [kept.draw() for _ in range(count)]
    return [(ticket.group_id, ticket.prompt.text) for ticket in tickets]


def as_written(events: Iterable[Event]) -> list[Event]:
    """As they come out of the journal."""
    return msgspec.json.decode(msgspec.json.encode(list(events)), type=list[Event])


def test_every_draw_is_a_group_with_a_number_of_its_own() -> None:
    kept = book()
    assert draw(kept, 3) == [(0, "0"), (1, "1"), (2, "2")]
    assert [(t.group_id, t.prompt.text) for t in kept.running] == [(0, "0"), (1, "1"), (2, "2")]
    assert kept.counts == LedgerCounts(submitted=3, running=3)
    # (1 + 0 + 1) * 4 - 3 running = 5.
    assert kept.capacity == 5


def test_beyond_the_ledgers_capacity_nothing_is_drawn_and_no_prompt_is_used_up() -> None:
    kept = book(max_concurrent=1)
    kept.draw()
    before = kept.state
    with pytest.raises(ValueError, match="beyond the ledger's capacity"):
        kept.draw()
    assert kept.state == before
    kept.end(0, "accepted")
    assert draw(kept, 1) == [(1, "1")]


def test_a_group_that_expired_is_drawn_again_first_under_a_new_number() -> None:
    kept = book()
    draw(kept, 4)
    for group_id in (0, 1, 2):
        kept.end(group_id, "accepted")
    # All lost at once, the newest first: so they are drawn again in their old order.
    for group_id in (2, 1, 0):
        kept.expire(group_id)
    assert kept.accepted == []
    assert draw(kept, 4) == [(4, "0"), (5, "1"), (6, "2"), (7, "4")]
    assert kept.counts == LedgerCounts(submitted=8, running=5, expired=3)


def test_a_filtered_prompt_is_done_with_and_a_failed_one_is_drawn_at_the_end_of_the_epoch() -> None:
    kept = book(source(4))
    draw(kept, 3)
    assert kept.end(0, "filtered")
    assert kept.end(1, "failed")
    assert kept.end(2, "timed out")
    assert draw(kept, 4) == [(3, "3"), (4, "1"), (5, "2"), (6, "0")]
    assert kept.counts == LedgerCounts(submitted=7, running=4, filtered=1, failed=2)


def test_the_third_failure_of_a_prompt_is_its_last() -> None:
    kept = book(source(2))
    draw(kept, 2)
    kept.end(1, "accepted")
    assert kept.end(0, "failed")
    assert draw(kept, 1) == [(2, "0")]
    assert kept.end(2, "timed out")
    assert draw(kept, 1) == [(3, "0")]
    assert not kept.end(3, "failed")
    assert draw(kept, 2) == [(4, "1"), (5, "1")]


def test_news_that_come_twice_do_no_harm() -> None:
    kept = book()
    draw(kept, 3)
    for group_id in (0, 1):
        kept.end(group_id, "accepted")
    kept.trained([0])
    kept.expire(1)
    before = kept.state
    kept.trained([0])
    kept.trained([0, 1, 99])
    for group_id in (0, 1, 2, 99):
        # Trained on, expired already, still running, never heard of.
        kept.expire(group_id)
    assert kept.state == before


def test_a_group_ends_once_and_only_if_it_runs() -> None:
    kept = book()
    draw(kept, 1)
    assert kept.is_running(0)
    kept.end(0, "accepted")
    assert not kept.is_running(0)
    before = kept.state
    for group_id in (0, 1):
        with pytest.raises(ValueError, match=f"group {group_id} is not running"):
            kept.end(group_id, "failed")
    assert kept.state == before


def test_all_that_happens_is_told_once() -> None:
    kept = book()
    assert not kept.has_events
    draw(kept, 2)
    kept.end(0, "accepted")
    assert kept.has_events
    assert kept.take_events() == [Drawn(0, 0), Drawn(1, 1), Ended(0, "accepted")]
    assert not kept.has_events
    kept.expire(0)
    kept.end(1, "accepted")
    kept.trained([1, 0])
    kept.commit(1)
    assert kept.take_events() == [Expired(0), Ended(1, "accepted"), Trained((1,)), Committed(1)]
    assert kept.take_events() == []


def test_a_book_that_replays_does_not_tell_of_it_again() -> None:
    kept = book()
    draw(kept, 2)
    other = book()
    other.replay(as_written(kept.take_events()))
    assert other.state == kept.state
    assert not other.has_events


@pytest.mark.parametrize(
    "others",
    [source(10, seed=1, shuffle=True), source(9, seed=0, shuffle=True), source(10)],
    ids=["another seed", "other prompts", "another order"],
)
def test_a_journal_of_other_prompts_is_refused(others: PromptSource) -> None:
    kept = book(source(10, seed=0, shuffle=True))
    draw(kept, 8)
    with pytest.raises(JournalError, match="of other prompts or another seed: Drawn"):
        book(others).replay(kept.take_events())


def test_a_snapshot_of_other_prompts_is_refused() -> None:
    kept = book(source(10))
    draw(kept, 6)
    with pytest.raises(JournalError, match="of 10 prompts, not of these 3"):
        book(source(3), state=kept.state)


def test_a_journal_that_this_book_can_not_have_written_is_refused() -> None:
    kept = book(max_concurrent=4)
    draw(kept, 4)
    with pytest.raises(JournalError, match="Drawn.*beyond the ledger's capacity"):
        book(max_concurrent=2).replay(kept.take_events())
    with pytest.raises(JournalError, match="Ended.*group 7 is not running"):
        book().replay([Ended(7, "accepted")])


def test_tokens_and_a_pause_are_remembered() -> None:
    kept = book()
    draw(kept, 2)
    kept.end(0, "accepted", tokens=30)
    kept.end(1, "filtered", tokens=12)
    kept.pause(True)
    again = book()
    again.replay(as_written(kept.take_events()))
    assert (again.generated_tokens, again.is_paused) == (42, True)
    again.pause(False)
    assert again.take_events() == [Paused(False)]
    assert not book(state=again.state).is_paused


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("dies_with_its_batch_trained_on", [False, True])
def test_a_recovered_trainers_version_counts_as_a_batch_if_there_was_one(
    dies_with_its_batch_trained_on: bool, max_staleness: int
) -> None:
    kept = book(max_staleness=max_staleness)
    for version in range(2):
        for group_id, _ in draw(kept, kept.capacity):
            kept.end(group_id, "accepted")
        kept.trained(range(4 * version, 4 * (version + 1)))
        kept.commit(version + 1)
    for group_id, _ in draw(kept, kept.capacity):
        kept.end(group_id, "accepted")
    if dies_with_its_batch_trained_on:
        kept.trained([8, 9, 10, 11])
    kept.commit_recovered(3)
    # Two batches were trained on for versions 1 and 2; the third, if it was, is version 3's.
    assert kept.counts.skipped == (0 if dies_with_its_batch_trained_on else 1)
    assert kept.capacity == (4 if dies_with_its_batch_trained_on else 0)
    again = book(max_staleness=max_staleness)
    again.replay(as_written(kept.take_events()))
    assert again.state == kept.state
    assert book(state=again.state, max_staleness=max_staleness).capacity == kept.capacity


def test_a_journal_written_before_versions_could_be_skipped_is_read() -> None:
    kept = book()
    kept.replay(msgspec.json.decode(b'[["committed",3]]', type=list[Event]))
    assert kept.counts == LedgerCounts(version=3)


ENDINGS: list[Ending] = ["accepted", "filtered", "failed", "timed out"]
PICK = st.integers(0, 1000)


class AnyBook(RuleBasedStateMachine):
    """A book beside a dict that says of each group what became of it."""

    @initialize(
        prompts=st.integers(1, 6),
        seed=st.integers(0, 5),
        shuffle=st.booleans(),
        batch=st.integers(1, 4),
        max_staleness=st.integers(0, 3),
        max_concurrent=st.integers(1, 12),
    )
    def begin(self, prompts: int, seed: int, shuffle: bool, **limits: int) -> None:
        self.prompts = {"prompts": prompts, "seed": seed, "shuffle": shuffle}
        self.limits = limits
        self.book = self.new_book()
        self.lives: dict[int, str] = {}
        self.prompt_of: dict[int, int] = {}
        self.retried = 0
        self.given_up = False
        self.drawn_next: list[int] = []
        """What must be drawn before anything else, the first one last."""
        self.events: list[Event] = []
        self.snapshot, self.events_before = self.book.state, 0

    def new_book(self, state: BookState | None = None) -> RolloutBook:
        return book(source(**self.prompts), state=state, **self.limits)

    def those(self, life: str) -> list[int]:
        return [group_id for group_id, its in self.lives.items() if its == life]

    @precondition(lambda self: self.book.capacity)
    @rule(count=st.integers(1, 4))
    def draw(self, count: int) -> None:
        for _ in range(min(count, self.book.capacity)):
            ticket = self.book.draw()
            assert ticket.group_id == len(self.lives), "numbers are given once, without gaps"
            self.lives[ticket.group_id] = "running"
            self.prompt_of[ticket.group_id] = int(ticket.prompt.text)
            if self.drawn_next and not self.given_up:
                assert self.prompt_of[ticket.group_id] == self.drawn_next.pop()

    @precondition(lambda self: self.those("running"))
    @rule(which=PICK, how=st.sampled_from(["accepted", *ENDINGS]), tokens=st.integers(0, 9))
    def end(self, which: int, how: Ending, tokens: int) -> None:
        group_id = self.those("running")[which % len(self.those("running"))]
        is_tried_again = self.book.end(group_id, how, tokens=tokens)
        self.lives[group_id] = "failed" if how == "timed out" else how
        if how in ("failed", "timed out"):
            self.retried += is_tried_again
            self.given_up |= not is_tried_again
        else:
            assert is_tried_again

    @rule(group_id=st.integers(-1, 30), again=st.booleans())
    def expire(self, group_id: int, again: bool) -> None:
        self.book.expire(group_id)
        if again:
            self.book.expire(group_id)
        if self.lives.get(group_id) == "accepted":
            self.lives[group_id] = "expired"
            self.drawn_next.append(self.prompt_of[group_id])

    @rule(group_ids=st.sets(st.integers(-1, 30), max_size=6), again=st.booleans())
    def train(self, group_ids: set[int], again: bool) -> None:
        self.book.trained(group_ids)
        if again:
            self.book.trained(group_ids)
        # One that runs was taken and trained on before its worker's word came.
        for group_id in group_ids.intersection(self.those("accepted") + self.those("running")):
            self.lives[group_id] = "trained"

    @rule(is_paused=st.booleans())
    def pause(self, is_paused: bool) -> None:
        self.book.pause(is_paused)

    @rule(ahead=st.integers(0, 2))
    def commit(self, ahead: int) -> None:
        self.book.commit(self.book.counts.version + ahead)

    @rule()
    def recover(self) -> None:
        before, trained = self.book.counts, len(self.those("trained"))
        self.book.commit_recovered(before.version + 1)
        consumed = self.book.counts.version - self.book.counts.skipped
        # More than the batches that were trained on only if it was said before that they were.
        assert consumed == min(before.version + 1 - before.skipped, trained // self.limits["batch"])

    @rule()
    def write_snapshot(self) -> None:
        self.events += self.book.take_events()
        self.snapshot, self.events_before = self.book.state, len(self.events)

    @rule()
    def be_killed_and_restored(self) -> None:
        self.events += self.book.take_events()
        self.book = self.restored()

    def restored(self) -> RolloutBook:
        """By the snapshot and the events since, as they stand in the journal."""
        written = msgspec.json.encode(self.snapshot)
        again = self.new_book(msgspec.json.decode(written, type=BookState))
        again.replay(as_written(self.events[self.events_before :]))
        return again

    @invariant()
    def what_happened_tells_what_is(self) -> None:
        self.events += self.book.take_events()
        from_the_beginning = self.new_book()
        from_the_beginning.replay(as_written(self.events))
        assert from_the_beginning.state == self.book.state
        assert self.restored().state == self.book.state

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        lives, counts = Counter(self.lives.values()), self.book.counts
        assert [ticket.group_id for ticket in self.book.running] == self.those("running")
        assert all(map(self.book.is_running, self.those("running")))
        assert sorted(self.book.accepted) == self.those("accepted")
        assert counts.submitted == len(self.lives) == sum(lives.values())
        assert counts.running == lives["running"]
        # To the ledger a group stays accepted when it is trained on: a version is counted then.
        assert counts.accepted == lives["accepted"] + lives["trained"]
        assert counts.filtered == lives["filtered"]
        assert counts.failed == lives["failed"]
        assert counts.expired == lives["expired"]

    @invariant()
    def every_draw_is_a_new_prompt_or_one_that_came_back(self) -> None:
        at = self.book.state.source
        if not self.given_up:
            new = at.epoch * self.prompts["prompts"] + at.position
            came_back = self.book.counts.expired + self.retried
            assert len(self.lives) == new + came_back - len(at.first) - len(at.last)

    @invariant()
    def a_running_group_keeps_its_prompt(self) -> None:
        for ticket in self.book.running:
            assert int(ticket.prompt.text) == self.prompt_of[ticket.group_id]


def test_whatever_happens_a_book_that_replays_it_is_the_same_book() -> None:
    run_state_machine_as_test(
        AnyBook,
        settings=settings(
            max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
        ),
    )
