from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
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
from areal_ray.rollout_book import Ending, RolloutBook
from areal_ray.trajectory_buffer import Entry, TrajectoryBuffer
from areal_ray.types import GroupSummary, Prompt


def summary(group_id: int, *, version: int = 0, nbytes: int = 10) -> GroupSummary:
    return GroupSummary(
        group_id=group_id,
        samples=2,
        generated_tokens=4,
        nbytes=nbytes,
        oldest_version=version,
        mean_reward=0.0,
    )


def buffer(
    *,
    batch: int = 1,
    max_groups: int = 8,
    max_bytes: int = 1000,
    max_staleness: int = 2,
    window: int | None = None,
    expect: Iterable[int] = range(10),
) -> TrajectoryBuffer[str]:
    held: TrajectoryBuffer[str] = TrajectoryBuffer(
        batch=batch,
        max_groups=max_groups,
        max_bytes=max_bytes,
        max_staleness=max_staleness,
        window=window,
    )
    held.expect(expect)
    return held


def fill(held: TrajectoryBuffer[str], *summaries: GroupSummary) -> None:
    for one in summaries:
        held.reserve(one)
        held.put(f"group {one.group_id}", one)


HOLDERS = itertools.count()


def ids(entries: Iterable[Entry[str]]) -> list[int]:
    return [entry.summary.group_id for entry in entries]


def lent(held: TrajectoryBuffer[str], *, version: int = 0) -> list[int]:
    """The ids of the next batch, for somebody else each time; none if there is no batch yet."""
    leased = held.lease(version, f"holder {next(HOLDERS)}")
    return [] if leased is None else ids(leased[1])


def test_without_a_window_groups_are_lent_in_the_order_they_came() -> None:
    held = buffer(batch=2)
    fill(held, summary(3))
    assert held.lease(0, "a") is None
    fill(held, summary(1), summary(2))
    _, entries = held.lease(0, "a")
    assert ids(entries) == [3, 1]
    assert [entry.payload for entry in entries] == ["group 3", "group 1"]
    assert held.waiting == 1


def test_in_strict_order_a_group_waits_for_all_that_were_drawn_before_it() -> None:
    held = buffer(batch=2, window=0)
    fill(held, summary(2), summary(1))
    assert lent(held) == []
    fill(held, summary(0))
    assert lent(held) == [0, 1]
    # 2 is alone, and 3 is expected.
    assert lent(held) == []
    fill(held, summary(3))
    assert lent(held) == [2, 3]


@pytest.mark.parametrize(
    ("window", "may_go"),
    # 0 and 5 are expected, 1 to 4 and 6 to 8 wait. Less than `window` ids ahead of 0 are:
    [(0, []), (1, []), (2, [1]), (4, [1, 2, 3]), (7, [1, 2, 3, 4, 6]), (9, [1, 2, 3, 4, 6, 7, 8])],
)
def test_those_may_go_that_are_less_than_a_window_ahead_of_the_oldest_expected(
    window: int, may_go: list[int]
) -> None:
    held = buffer(window=window, expect=range(9))
    fill(held, *(summary(i) for i in (8, 7, 6, 4, 3, 2, 1)))
    assert [group_id for _ in range(9) for group_id in lent(held)] == may_go


def test_a_group_ahead_of_the_window_waits_only_for_the_one_that_is_a_window_behind_it() -> None:
    held = buffer(window=3, expect=range(4, 10))
    fill(held, summary(9), summary(7), summary(6), summary(4))
    # The oldest expected one is 5, and 5 + 3 > 7.
    assert lent(held) + lent(held) + lent(held) == [4, 6, 7]
    assert lent(held) == []
    fill(held, summary(5))
    # The oldest expected one is 8, and 8 + 3 > 9.
    assert lent(held) + lent(held) == [5, 9]
    assert held.expected == [8]


def test_what_was_not_acknowledged_is_untrained_wherever_it_is() -> None:
    held = buffer(batch=1, expect=range(5), max_staleness=0)
    fill(held, summary(0), summary(1), summary(2, version=1))
    lease_id, _ = held.lease(0, "a")
    held.reserve(summary(3))
    assert sorted(held.untrained) == [0, 1, 2]  # 0 is leased; 3 has not come, nor has 4
    held.acknowledge(lease_id)
    held.lease(1, "a")
    # 1 has expired, and 2 is leased.
    assert sorted(held.untrained) == [1, 2]
    held.forget_expired([1])
    assert held.untrained == [2]


def test_a_group_that_is_dropped_is_not_waited_for() -> None:
    held = buffer(window=0, expect=range(3))
    fill(held, summary(1))
    assert lent(held) == []
    held.drop([0])
    assert lent(held) == [1]
    assert not held.is_wanted(0)
    held.drop([0, 77])
    assert held.expected == [2]


def test_a_group_that_is_being_brought_is_still_waited_for() -> None:
    held = buffer(window=0, expect=range(2))
    fill(held, summary(1))
    held.reserve(summary(0))
    assert lent(held) == []
    held.put("group 0", summary(0))
    assert lent(held) == [0]


def test_only_an_expected_group_is_taken_and_each_of_them_once() -> None:
    held = buffer(expect=[0, 1])
    for stranger in (2, -1):
        with pytest.raises(ValueError, match=f"group {stranger} is not expected"):
            held.reserve(summary(stranger))
    held.reserve(summary(0))
    assert held.is_coming(0)
    # A second copy, while the first is on its way, waits, is lent, and is gone.
    for done in (
        lambda: held.put("group 0", summary(0)),
        lambda: held.lease(0, "a"),
        lambda: held.acknowledge(0),
    ):
        assert not held.is_wanted(0)
        with pytest.raises(ValueError, match="group 0 is not expected"):
            held.reserve(summary(0))
        done()
    assert not held.is_wanted(0)
    assert not held.is_coming(0)
    assert held.is_wanted(1)
    assert (held.groups, held.nbytes) == (0, 0)


def test_a_lease_that_is_given_back_is_lent_again_first() -> None:
    held = buffer(batch=2)
    fill(held, *(summary(i) for i in range(4)))
    lease_id, entries = held.lease(0, "a")
    assert ids(entries) == [0, 1]
    fill(held, summary(4))
    held.release(lease_id)
    assert lent(held) + lent(held) == [0, 1, 2, 3]
    assert lent(held) == []


def test_an_ended_lease_can_not_be_ended_again() -> None:
    held = buffer()
    fill(held, summary(0))
    lease_id, _ = held.lease(0, "a")
    held.release(lease_id)
    held.acknowledge(lease_id)
    assert (held.groups, held.waiting) == (1, 1)
    again, _ = held.lease(0, "a")
    assert again != lease_id
    held.release(lease_id)
    assert (held.groups, held.waiting) == (1, 0)


def test_a_holder_who_asks_again_gets_first_what_it_did_not_end() -> None:
    held = buffer(batch=2)
    fill(held, *(summary(i) for i in range(6)))
    first, _ = held.lease(0, "a")
    assert ids(held.lease(0, "b")[1]) == [2, 3]
    again, entries = held.lease(0, "a")
    assert ids(entries) == [0, 1]
    # The earlier lease is over: it can neither let them go nor give them back.
    held.acknowledge(first)
    held.release(first)
    assert (held.groups, held.waiting) == (6, 2)
    held.acknowledge(again)
    assert held.groups == 4


def test_what_nobody_can_read_any_more_is_rolled_out_again() -> None:
    held = buffer(batch=3)
    fill(held, *(summary(i) for i in range(3)))
    lease_id, _ = held.lease(0, "a")
    held.release(lease_id, lost=[1])
    assert held.expired == [1]
    assert (held.groups, held.nbytes, held.waiting) == (2, 20, 2)
    fill(held, summary(3))
    assert lent(held) == [0, 2, 3]


def test_a_group_that_was_withdrawn_is_remembered_until_that_is_known() -> None:
    held = buffer(expect=[0, 1])
    held.withdraw(0)
    held.withdraw(7)
    assert not held.is_wanted(0)
    assert (held.expected, held.withdrawn) == ([1], [0])
    held.drop([0])
    assert held.withdrawn == []


def test_room_is_counted_in_groups_and_bytes_until_they_are_acknowledged() -> None:
    held = buffer(batch=2, max_groups=3, max_bytes=45)
    fill(held, summary(0), summary(1))
    # 20 of 45 bytes and 2 of 3 groups are taken, and the next batch is together.
    assert held.has_room(summary(2, nbytes=25))
    assert not held.has_room(summary(2, nbytes=26))
    fill(held, summary(2))
    assert not held.has_room(summary(3, nbytes=1))
    assert (held.groups, held.nbytes) == (3, 30)
    lease_id, _ = held.lease(0, "a")
    assert (held.groups, held.nbytes, held.waiting) == (3, 30, 1)
    held.acknowledge(lease_id)
    assert (held.groups, held.nbytes, held.waiting) == (1, 10, 1)


def test_a_place_is_kept_for_a_group_on_its_way_and_freed_if_it_does_not_come() -> None:
    held = buffer(max_groups=1)
    held.reserve(summary(0))
    assert (held.groups, held.nbytes, held.waiting) == (1, 10, 0)
    assert not held.has_room(summary(1))
    held.cancel(0)
    assert (held.groups, held.nbytes) == (0, 0)
    assert held.has_room(summary(1))
    # Somebody else may bring it.
    assert held.is_wanted(0)
    fill(held, summary(0))
    assert lent(held) == [0]


def test_the_next_batch_is_let_in_past_every_bound() -> None:
    held = buffer(batch=2, max_groups=1, max_bytes=5)
    fill(held, summary(0, nbytes=100))
    # Else a batch of two could never come together, and everybody would wait for ever.
    assert held.has_room(summary(1, nbytes=100))
    held.reserve(summary(1, nbytes=100))
    # The one that is on its way makes it two.
    assert not held.has_room(summary(2, nbytes=1))
    held.put("group 1", summary(1, nbytes=100))
    assert not held.has_room(summary(2, nbytes=1))
    held.lease(0, "a")
    # The next batch may come together while this one is trained on.
    assert held.has_room(summary(2, nbytes=1))


def test_only_what_the_next_batch_is_short_of_is_let_in_past_the_bounds() -> None:
    held = buffer(batch=2, max_groups=2, window=2)
    fill(held, summary(5), summary(6))
    # Two wait, and neither may go: 0 + 2 <= 5. The buffer is full, but not with a batch.
    assert not held.has_room(summary(2))
    assert held.has_room(summary(1))
    fill(held, summary(1))
    assert held.has_room(summary(0))
    held.reserve(summary(0))
    # 1 waits and 0 is on its way: with them the next batch is together.
    assert not held.has_room(summary(2))
    held.put("group 0", summary(0))
    assert lent(held) == [0, 1]


def test_what_is_being_brought_and_may_not_go_does_not_keep_out_what_may() -> None:
    held = buffer(batch=1, max_groups=1, window=0)
    held.reserve(summary(5))
    # However long that takes, the next batch is 0.
    assert held.has_room(summary(0))
    assert not held.has_room(summary(1))


def test_a_group_that_is_too_old_is_never_lent_and_is_told_until_it_is_forgotten() -> None:
    held = buffer(batch=2, max_staleness=2)
    fill(held, summary(0, version=0), summary(1, version=1), summary(2, version=3))
    # At version 3 the oldest token allowed is of version 1.
    assert lent(held, version=3) == [1, 2]
    assert held.expired == [0]
    assert held.expired == [0]
    assert not held.is_wanted(0)
    assert (held.groups, held.nbytes) == (2, 20)
    fill(held, summary(3, version=0))
    assert held.lease(3, "a") is None
    assert held.expired == [0, 3]
    held.forget_expired([0, 77])
    assert held.expired == [3]


def test_how_old_a_group_is_counts_when_it_is_handed_out() -> None:
    held = buffer(max_staleness=1)
    fill(held, summary(0, version=4), summary(1, version=4))
    lease_id, entries = held.lease(5, "a")
    assert ids(entries) == [0]
    # Given back, it waits until version 6: two versions old by then, like the other one.
    held.release(lease_id)
    assert held.lease(6, "a") is None
    assert sorted(held.expired) == [0, 1]
    assert (held.groups, held.nbytes) == (0, 0)


def test_groups_may_be_expected_in_any_order() -> None:
    held = buffer(window=0, expect=[7, 3])
    held.expect([9])
    held.expect([5, 1])
    held.expect([])
    held.expect([3, 9])
    assert held.expected == [1, 3, 5, 7, 9]
    fill(held, *(summary(i) for i in (9, 5, 3, 1, 7)))
    assert [group_id for _ in range(5) for group_id in lent(held)] == [1, 3, 5, 7, 9]


def test_the_highest_that_was_ever_expected_is_remembered() -> None:
    held = buffer(expect=[])
    assert held.highest_expected == -1
    held.expect([4, 6, 5])
    held.expect([2])
    assert held.highest_expected == 6
    fill(held, summary(6))
    held.drop([5])
    assert held.highest_expected == 6


class SmallRun:
    """Controller, producers and trainer around one buffer, a move at a time, each in its own
    time; and beside the buffer a plain record of what should be in it."""

    def __init__(
        self,
        *,
        batch: int,
        max_staleness: int,
        max_concurrent: int,
        max_groups: int,
        max_bytes: int,
        window: int | None,
    ) -> None:
        self.batch, self.max_staleness, self.window = batch, max_staleness, window
        self.max_groups = max_groups
        self.max_bytes = max_bytes
        self.book = RolloutBook(
            PromptSource([Prompt(text=str(i)) for i in range(7)], seed=0, shuffle=True),
            batch=batch,
            max_staleness=max_staleness,
            max_concurrent=max_concurrent,
        )
        self.rolling: dict[int, int] = {}
        """Groups that are rolled out, and the version of their oldest token."""
        self.finished: dict[int, GroupSummary] = {}
        """Their producers wait for room in the buffer."""
        self.to_drop: set[int] = set()
        """They ended otherwise, and the buffer does not know it yet."""
        self.brought: dict[int, GroupSummary] = {}
        self.waiting: dict[int, GroupSummary] = {}
        self.expired: set[int] = set()
        self.in_hand: list[int] = []
        self.lease_id: int | None = None
        self.trained: list[int] = []
        self.buffer = self.new_buffer()
        self.draw()

    def new_buffer(self) -> TrajectoryBuffer[str]:
        return buffer(
            batch=self.batch,
            max_groups=self.max_groups,
            max_bytes=self.max_bytes,
            max_staleness=self.max_staleness,
            window=self.window,
            expect=(ticket.group_id for ticket in self.book.running),
        )

    @property
    def version(self) -> int:
        return self.book.counts.version

    @property
    def may_still_come(self) -> list[int]:
        """As far as the buffer knows."""
        return sorted([*self.rolling, *self.finished, *self.brought, *self.to_drop])

    def draw(self) -> bool:
        tickets = [self.book.draw() for _ in range(self.book.capacity)]
        self.rolling |= dict.fromkeys((t.group_id for t in tickets), self.version)
        self.buffer.expect(ticket.group_id for ticket in tickets)
        return bool(tickets)

    def finish(self, group_id: int, nbytes: int) -> None:
        version = self.rolling.pop(group_id)
        self.finished[group_id] = summary(group_id, version=version, nbytes=nbytes)

    def give_up(self, group_id: int, how: Ending) -> None:
        self.rolling.pop(group_id, None) or self.finished.pop(group_id, None)
        self.book.end(group_id, how)
        self.to_drop.add(group_id)

    def tell_dropped(self) -> bool:
        dropped, self.to_drop = self.to_drop, set()
        self.buffer.drop(dropped)
        return bool(dropped)

    def offer(self, group_id: int) -> bool:
        one = self.finished[group_id]
        assert self.buffer.is_wanted(group_id)
        if not self.buffer.has_room(one):
            return False
        self.buffer.reserve(one)
        self.brought[group_id] = self.finished.pop(group_id)
        return True

    def put(self, group_id: int) -> None:
        one = self.waiting[group_id] = self.brought.pop(group_id)
        self.buffer.put(f"group {group_id}", one)
        self.book.end(group_id, "accepted")

    def turn_back(self, group_id: int) -> None:
        self.buffer.cancel(group_id)
        self.finished[group_id] = self.brought.pop(group_id)

    def take_batch(self) -> bool:
        too_old = {
            group_id
            for group_id, one in self.waiting.items()
            if self.version - one.oldest_version > self.max_staleness
        }
        self.expired |= too_old
        for group_id in too_old:
            del self.waiting[group_id]
        should_go = self.should_go()
        leased = self.buffer.lease(self.version, "trainer")
        assert sorted(self.buffer.expired) == sorted(self.expired)
        if leased is None:
            assert len(should_go) < self.batch
            return bool(too_old)
        self.lease_id, entries = leased
        self.in_hand = ids(entries)
        assert self.in_hand == should_go[: self.batch]
        assert [entry.payload for entry in entries] == [f"group {i}" for i in self.in_hand]
        self.lent = {group_id: self.waiting.pop(group_id) for group_id in self.in_hand}
        return True

    def should_go(self) -> list[int]:
        if self.window is None:
            return list(self.waiting)
        oldest = min(self.may_still_come, default=10**9)
        return sorted(i for i in self.waiting if i < oldest + max(self.window, 1))

    def train(self) -> None:
        self.trained += self.in_hand
        if self.lease_id is not None:
            self.buffer.acknowledge(self.lease_id)
        self.book.trained(self.in_hand)
        self.book.commit(self.version + 1)
        self.in_hand, self.lease_id = [], None

    def give_back(self) -> None:
        if self.lease_id is not None:
            self.buffer.release(self.lease_id)
            self.waiting = self.lent | self.waiting
            self.in_hand, self.lease_id = [], None

    def forget_batch(self) -> None:
        """The trainer dies with a batch in its hands. The next time it asks, it goes back."""
        if self.lease_id is not None:
            self.waiting = self.lent | self.waiting
            self.in_hand, self.lease_id = [], None
            self.take_batch()

    def lose_some_of_the_batch(self, lost: int) -> None:
        """With the node that they lay on."""
        if self.lease_id is not None:
            self.buffer.release(self.lease_id, self.in_hand[:lost])
            self.expired |= set(self.in_hand[:lost])
            kept = {i: self.lent[i] for i in self.in_hand[lost:]}
            self.waiting = kept | self.waiting
            self.in_hand, self.lease_id = [], None

    def hear_of_expired(self) -> bool:
        expired = self.buffer.expired
        for group_id in expired:
            self.book.expire(group_id)
        self.buffer.forget_expired(expired)
        self.expired.clear()
        return bool(expired)

    def lose_buffer(self) -> None:
        """The queue's process dies. A batch that the trainer has, it keeps."""
        lost = set(self.book.accepted).difference(self.in_hand)
        for group_id in sorted(lost, reverse=True):
            self.book.expire(group_id)
        self.finished |= self.brought
        self.brought, self.waiting, self.lease_id = {}, {}, None
        self.expired.clear()
        self.to_drop.clear()
        self.buffer = self.new_buffer()

    def check(self) -> None:
        held = [*self.brought.values(), *self.waiting.values()]
        if self.lease_id is not None:
            held += self.lent.values()
        assert self.buffer.groups == len(held)
        assert self.buffer.nbytes == sum(one.nbytes for one in held)
        assert self.buffer.waiting == len(self.waiting)
        assert self.buffer.expected == self.may_still_come
        assert len(set(self.trained)) == len(self.trained)
        # A second copy of any of these is refused.
        had = [*self.brought, *self.waiting, *self.in_hand, *self.trained[-3:], *self.expired]
        assert not any(map(self.buffer.is_wanted, had))
        # Past the bounds there is one batch at most, besides the one in training.
        assert self.buffer.groups <= self.max_groups + 2 * self.batch

    def train_on(self, batches: int) -> None:
        """From here on nothing goes wrong: then there is a batch again and again."""
        goal = len(self.trained) + batches * self.batch
        while len(self.trained) < goal:
            moved = self.draw() | self.tell_dropped()
            for group_id in list(self.rolling):
                self.finish(group_id, nbytes=self.max_bytes + 1)
                moved = True
            for group_id in sorted(self.finished, reverse=True):
                moved |= self.offer(group_id)
            for group_id in list(self.brought):
                self.put(group_id)
                moved = True
            if not self.in_hand:
                moved |= self.take_batch()
            if self.in_hand:
                self.train()
                moved = True
            moved |= self.hear_of_expired()
            self.check()
            assert moved, "everybody waits for somebody else, for ever"


WINDOWS = st.one_of(st.none(), st.integers(0, 8))
RUNS = st.builds(
    SmallRun,
    batch=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    max_concurrent=st.integers(1, 20),
    max_groups=st.integers(1, 6),
    max_bytes=st.integers(1, 30),
    window=WINDOWS,
)
PICK = st.integers(0, 1000)


class AnyRun(RuleBasedStateMachine):
    """Each move by itself, chosen by hypothesis; and from wherever that leads, training goes on."""

    @initialize(run=RUNS)
    def begin(self, run: SmallRun) -> None:
        self.run = run

    @rule()
    def draw(self) -> None:
        self.run.draw()

    @precondition(lambda self: self.run.rolling)
    @rule(which=PICK, nbytes=st.integers(0, 40))
    def finish(self, which: int, nbytes: int) -> None:
        self.run.finish(one_of(self.run.rolling, which), nbytes)

    @precondition(lambda self: self.run.rolling or self.run.finished)
    @rule(which=PICK, how=st.sampled_from(["filtered", "failed", "timed out"]))
    def give_up(self, which: int, how: Ending) -> None:
        self.run.give_up(one_of([*self.run.rolling, *self.run.finished], which), how)

    @precondition(lambda self: self.run.finished)
    @rule(which=PICK)
    def offer(self, which: int) -> None:
        self.run.offer(one_of(self.run.finished, which))

    @precondition(lambda self: self.run.brought)
    @rule(which=PICK)
    def put(self, which: int) -> None:
        self.run.put(one_of(self.run.brought, which))

    @precondition(lambda self: self.run.brought)
    @rule(which=PICK)
    def turn_back(self, which: int) -> None:
        self.run.turn_back(one_of(self.run.brought, which))

    @precondition(lambda self: not self.run.in_hand)
    @rule()
    def take_batch(self) -> None:
        self.run.take_batch()

    @precondition(lambda self: self.run.in_hand)
    @rule()
    def train(self) -> None:
        self.run.train()

    @precondition(lambda self: self.run.in_hand)
    @rule()
    def give_back(self) -> None:
        self.run.give_back()

    @precondition(lambda self: self.run.in_hand)
    @rule()
    def forget_batch(self) -> None:
        self.run.forget_batch()

    @precondition(lambda self: self.run.in_hand)
    @rule(lost=st.integers(1, 4))
    def lose_some_of_the_batch(self, lost: int) -> None:
        self.run.lose_some_of_the_batch(lost)

    @rule()
    def tell_dropped(self) -> None:
        self.run.tell_dropped()

    @rule()
    def hear_of_expired(self) -> None:
        self.run.hear_of_expired()

    @rule()
    def lose_buffer(self) -> None:
        self.run.lose_buffer()

    @invariant()
    def what_is_held_is_what_should_be(self) -> None:
        self.run.check()

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.train_on(batches=3)


def one_of(groups: Iterable[int], which: int) -> int:
    choice: Sequence[int] = sorted(groups)
    return choice[which % len(choice)]


def test_wherever_a_run_has_come_to_a_batch_can_still_come_together() -> None:
    run_state_machine_as_test(
        AnyRun,
        settings=settings(
            max_examples=400, stateful_step_count=40, deadline=None, derandomize=True
        ),
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(run=RUNS, trouble=st.sampled_from([0.0, 0.02, 0.2]), seed=st.integers(0, 2**32))
def test_a_long_run_never_stands_still(run: SmallRun, trouble: float, seed: int) -> None:
    """500 moves in any order, of those that somebody can make; there must always be one."""
    chance = random.Random(seed)
    for _ in range(500):
        moves = [lambda i=i: run.finish(i, chance.randrange(40)) for i in run.rolling]
        moves += [lambda i=i: run.put(i) for i in run.brought]
        moves += [
            lambda i=i: run.offer(i) for i, s in run.finished.items() if run.buffer.has_room(s)
        ]
        if run.in_hand:
            moves.append(run.train)
        elif len(run.should_go()) >= run.batch:
            moves.append(run.take_batch)
        if run.buffer.expired:
            moves.append(run.hear_of_expired)
        if run.to_drop:
            moves.append(run.tell_dropped)
        if run.book.capacity:
            moves.append(run.draw)
        assert moves, "everybody waits for somebody else, for ever"
        if chance.random() < trouble:
            moves = [
                run.lose_buffer,
                run.give_back,
                run.take_batch if not run.in_hand else run.train,
            ]
            moves += [lambda i=i: run.turn_back(i) for i in run.brought]
            moves += [lambda i=i: run.give_up(i, "failed") for i in [*run.rolling, *run.finished]]
        chance.choice(moves)()
        run.check()
    run.train_on(batches=3)
