from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from areal_ray.data import PromptSource
from areal_ray.rollout_book import Ending, RolloutBook
from areal_ray.staleness import LedgerCounts, StalenessLedger
from areal_ray.trajectory_buffer import TrajectoryBuffer
from areal_ray.types import GroupSummary, Prompt


def ledger(*, batch: int = 4, max_staleness: int = 1, max_concurrent: int = 100) -> StalenessLedger:
    return StalenessLedger(batch=batch, max_staleness=max_staleness, max_concurrent=max_concurrent)


def test_capacity_is_the_batches_that_staleness_allows() -> None:
    counted = ledger()
    # (1 + 0 + 1) * 4 = 8 groups may be on their way at version 0.
    for _ in range(8):
        counted.submit()
    assert counted.capacity == 0
    for _ in range(8):
        counted.accept()
    assert counted.capacity == 0
    counted.commit(1)
    # (1 + 1 + 1) * 4 - 8 accepted = 4.
    assert counted.capacity == 4


def test_without_staleness_one_batch_is_on_its_way_at_a_time() -> None:
    counted = ledger(max_staleness=0)
    for version in range(1, 4):
        assert counted.capacity == 4
        for _ in range(4):
            counted.submit()
            counted.accept()
        assert counted.capacity == 0
        counted.commit(version)


def test_a_version_that_consumed_nothing_lets_nothing_start() -> None:
    counted = ledger(max_staleness=0)
    for _ in range(4):
        counted.submit()
        counted.accept()
    counted.commit(1)
    # (0 + 1 + 1) * 4 - 4 accepted = 4.
    assert counted.capacity == 4
    for _ in range(4):
        counted.submit()
        counted.accept()
    # The trainer dies with that batch, and goes on from its checkpoint as version 2.
    counted.commit(2, skipped=1)
    # (0 + 2 - 1 + 1) * 4 - 8 accepted = 0: the batch still waits.
    assert counted.capacity == 0
    counted.commit(3)
    assert counted.capacity == 4


def test_no_more_versions_are_skipped_than_there_are() -> None:
    counted = ledger()
    counted.commit(2, skipped=2)
    for skipped in (-1, 2):
        with pytest.raises(ValueError, match="of 3 versions are skipped, and 2 already were"):
            counted.commit(3, skipped=skipped)
    assert counted.counts == LedgerCounts(version=2, skipped=2)


def test_counts_that_were_written_before_versions_could_be_skipped_are_read() -> None:
    written = msgspec.to_builtins(LedgerCounts(version=3, submitted=2, accepted=2))
    del written["skipped"]
    assert msgspec.convert(written, LedgerCounts).skipped == 0


def test_the_concurrency_limit_binds_when_it_is_the_smaller() -> None:
    counted = ledger(max_concurrent=3)
    for _ in range(3):
        counted.submit()
    assert counted.capacity == 0
    counted.accept()
    assert counted.capacity == 1


@pytest.mark.parametrize("end", ["filter", "fail"])
def test_a_group_that_is_not_accepted_gives_its_place_back(end: str) -> None:
    counted = ledger()
    counted.submit()
    assert counted.capacity == 7
    getattr(counted, end)()
    assert counted.capacity == 8


def test_an_expired_group_gives_its_place_back() -> None:
    counted = ledger()
    counted.submit()
    counted.accept()
    assert counted.capacity == 7
    counted.expire()
    assert counted.capacity == 8
    assert counted.counts == LedgerCounts(submitted=1, expired=1)


def test_what_cannot_happen_is_refused_and_changes_nothing() -> None:
    counted = ledger(batch=1, max_staleness=0)
    for end in (counted.accept, counted.filter, counted.fail):
        with pytest.raises(ValueError, match="not running"):
            end()
    with pytest.raises(ValueError, match="never accepted"):
        counted.expire()
    counted.submit()
    with pytest.raises(ValueError, match="beyond the ledger's capacity"):
        counted.submit()
    counted.commit(2)
    with pytest.raises(ValueError, match="version 1 committed after version 2"):
        counted.commit(1)
    assert counted.counts == LedgerCounts(version=2, submitted=1, running=1)


def test_a_ledger_that_is_restored_with_less_room_than_it_had_waits_until_there_is_some() -> None:
    counts = LedgerCounts(version=0, submitted=8, running=2, accepted=6)
    smaller = StalenessLedger(batch=4, max_staleness=0, max_concurrent=1, counts=counts)
    # min(1 - 2, (0 + 0 + 1) * 4 - (6 + 2)) = min(-1, -4), which is no room, not less than none.
    assert smaller.capacity == 0
    smaller.commit(2)
    # min(1 - 2, (0 + 2 + 1) * 4 - 8) = min(-1, 4)
    assert smaller.capacity == 0
    smaller.accept()
    smaller.accept()
    # min(1 - 0, 3 * 4 - 8) = min(1, 4)
    assert smaller.capacity == 1


class AnyLedger(RuleBasedStateMachine):
    """A ledger beside a list that says of each group where in its life it is."""

    @initialize(
        batch=st.integers(1, 5), max_staleness=st.integers(0, 4), max_concurrent=st.integers(1, 30)
    )
    def begin(self, batch: int, max_staleness: int, max_concurrent: int) -> None:
        self.limits = {
            "batch": batch,
            "max_staleness": max_staleness,
            "max_concurrent": max_concurrent,
        }
        self.ledger = StalenessLedger(**self.limits)
        self.lives: list[str] = []
        self.version = self.skipped = 0

    def count(self, life: str) -> int:
        return self.lives.count(life)

    def by_formula(self) -> int:
        running, accepted = self.count("running"), self.count("accepted")
        batches = self.limits["max_staleness"] + self.version - self.skipped + 1
        by_staleness = batches * self.limits["batch"] - (accepted + running)
        return max(0, min(self.limits["max_concurrent"] - running, by_staleness))

    def move(self, tell: Callable[[], None], before: str, after: str) -> None:
        """One group goes from one life to the next, if there is one; else that is refused."""
        if before in self.lives:
            tell()
            self.lives[self.lives.index(before)] = after
        else:
            with pytest.raises(ValueError):
                tell()

    @rule(times=st.integers(1, 8))
    def submit(self, times: int) -> None:
        for _ in range(times):
            if self.by_formula() > 0:
                self.ledger.submit()
                self.lives.append("running")
            else:
                with pytest.raises(ValueError, match="beyond the ledger's capacity"):
                    self.ledger.submit()

    @rule()
    def accept(self) -> None:
        self.move(self.ledger.accept, "running", "accepted")

    @rule()
    def filter(self) -> None:
        self.move(self.ledger.filter, "running", "filtered")

    @rule()
    def fail(self) -> None:
        self.move(self.ledger.fail, "running", "failed")

    @rule()
    def expire(self) -> None:
        self.move(self.ledger.expire, "accepted", "expired")

    @rule(ahead=st.integers(0, 3))
    def commit(self, ahead: int) -> None:
        self.version += ahead
        self.ledger.commit(self.version)

    @rule(ahead=st.integers(0, 3), skipped=st.integers(0, 3))
    def commit_what_consumed_nothing(self, ahead: int, skipped: int) -> None:
        skipped = min(skipped, self.version + ahead - self.skipped)
        self.version += ahead
        self.skipped += skipped
        self.ledger.commit(self.version, skipped=skipped)

    @rule(back=st.integers(1, 3))
    def commit_an_earlier_version(self, back: int) -> None:
        with pytest.raises(ValueError, match="committed after version"):
            self.ledger.commit(self.version - back)

    @rule(expired=st.integers(0, 5))
    def everything_ends(self, expired: int) -> None:
        while "running" in self.lives:
            self.accept()
        for _ in range(min(expired, self.count("accepted"))):
            self.expire()
        assert self.ledger.counts.running == 0
        assert self.ledger.capacity == self.by_formula()

    @rule()
    def go_on_from_the_counts(self) -> None:
        """As a controller does that was killed: by what stands in the journal."""
        written = msgspec.json.encode(self.ledger.counts)
        counts = msgspec.json.decode(written, type=LedgerCounts)
        self.ledger = StalenessLedger(**self.limits, counts=counts)

    @invariant()
    def every_group_is_counted_once(self) -> None:
        counts = self.ledger.counts
        assert counts.submitted == len(self.lives) == sum(lives_of(counts).values())
        assert lives_of(counts) == Counter(self.lives)
        assert (counts.version, counts.skipped) == (self.version, self.skipped)

    @invariant()
    def no_bound_is_ever_exceeded(self) -> None:
        assert self.ledger.capacity == self.by_formula()


def lives_of(counts: LedgerCounts) -> Counter[str]:
    fields = ("running", "accepted", "filtered", "failed", "expired")
    return Counter({field: getattr(counts, field) for field in fields})


def test_whatever_happens_the_ledger_counts_each_group_once_and_keeps_its_bounds() -> None:
    run_state_machine_as_test(
        AnyLedger,
        settings=settings(
            max_examples=150, stateful_step_count=50, deadline=None, derandomize=True
        ),
    )


@pytest.mark.parametrize(
    ("batch", "max_staleness", "max_concurrent"),
    [(1, 0, 1), (1, 8, 3), (7, 1, 1000), (32, 2, 96), (64, 0, 20), (256, 16, 700)],
)
def test_millions_of_operations_lose_no_slot(
    batch: int, max_staleness: int, max_concurrent: int
) -> None:
    """350 000 for each of these six: 2.1 million, with the bounds looked at after every one."""
    counted = ledger(batch=batch, max_staleness=max_staleness, max_concurrent=max_concurrent)
    chance = random.Random(f"{batch} {max_staleness} {max_concurrent}")
    running = accepted = version = done = 0
    bound = (max_staleness + 1) * batch
    # More tries to submit than ends and commits, so that the bounds are reached again and again.
    weights = {"submit": 60, "accept": 35, "filter": 6, "fail": 6, "expire": 6}
    weights["commit"] = 30 // batch + 1
    while done < 350_000:
        for act in chance.choices(list(weights), list(weights.values()), k=10_000):
            if act == "submit" and counted.capacity:
                counted.submit()
                running += 1
            elif act == "commit" and accepted >= (version + 1) * batch:
                # The trainer commits a version when it has trained on a batch.
                version += 1
                bound += batch
                counted.commit(version)
            elif act == "expire" and accepted > version * batch:
                counted.expire()
                accepted -= 1
            elif act in ("accept", "filter", "fail") and running:
                getattr(counted, act)()
                running -= 1
                accepted += act == "accept"
            else:
                continue
            assert counted.capacity == min(max_concurrent - running, bound - accepted - running)
            assert running <= max_concurrent
            assert accepted + running <= bound
            done += 1
        counts = counted.counts
        assert (counts.running, counts.accepted, counts.version) == (running, accepted, version)
        assert counts.submitted == sum(lives_of(counts).values())
    assert version > 100
    for _ in range(running):
        counted.fail()
    for _ in range(accepted - version * batch):
        counted.expire()
    # Nothing is on its way: all of (max_staleness + 1) batches may start again.
    assert counted.capacity == min(max_concurrent, (max_staleness + 1) * batch)


class SmallRun:
    """Book, queue and a trainer that trains on every batch as soon as it has one.

    A group's oldest token is of the version at which it was drawn: the oldest it can be.
    """

    def __init__(
        self, *, batch: int, max_staleness: int, window: int | None, max_concurrent: int = 1000
    ) -> None:
        self.book = RolloutBook(
            PromptSource([Prompt(text=str(i)) for i in range(50)], seed=0, shuffle=True),
            batch=batch,
            max_staleness=max_staleness,
            max_concurrent=max_concurrent,
        )
        self.buffer: TrajectoryBuffer[None] = TrajectoryBuffer(
            batch=batch,
            max_groups=10_000,
            max_bytes=10_000,
            max_staleness=max_staleness,
            window=window,
        )
        self.drawn_at: dict[int, int] = {}
        self.prompts: dict[int, Prompt] = {}
        self.batches: list[list[int]] = []
        self.overtaken: list[tuple[int, int]] = []
        """Who was trained on while an older one was still to come: (that one, the older)."""
        self.draw()

    @property
    def running(self) -> list[int]:
        return [ticket.group_id for ticket in self.book.running]

    @property
    def version(self) -> int:
        return self.book.counts.version

    def draw(self) -> None:
        tickets = [self.book.draw() for _ in range(self.book.capacity)]
        self.prompts |= {ticket.group_id: ticket.prompt for ticket in tickets}
        self.drawn_at |= dict.fromkeys((t.group_id for t in tickets), self.version)
        self.buffer.expect(ticket.group_id for ticket in tickets)

    def end(self, group_id: int, how: Ending = "accepted") -> None:
        """A group ends, and all that follows from it happens at once."""
        self.book.end(group_id, how)
        if how == "accepted":
            summary = GroupSummary(group_id, 2, 4, 1, self.drawn_at[group_id], 0.0)
            self.buffer.reserve(summary)
            self.buffer.put(None, summary)
        else:
            self.buffer.drop([group_id])
        self.train()
        self.draw()

    def train(self) -> None:
        while (leased := self.buffer.lease(self.version, "trainer")) is not None:
            lease_id, entries = leased
            batch = [entry.summary.group_id for entry in entries]
            still_to_come = set(self.running)
            self.overtaken += [(i, older) for i in batch for older in still_to_come if older < i]
            self.batches.append(batch)
            self.buffer.acknowledge(lease_id)
            self.book.trained(batch)
            self.book.commit(self.version + 1)
        for group_id in self.buffer.expired:
            self.book.expire(group_id)
        self.buffer.forget_expired(self.buffer.expired)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    max_concurrent=st.integers(1, 30),
    not_accepted=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**32),
)
def test_in_strict_order_nothing_ever_expires(
    batch: int, max_staleness: int, max_concurrent: int, not_accepted: float, seed: int
) -> None:
    """Group g is drawn at version v only if fewer than (max_staleness + v + 1) * batch others are
    before it, and so it is in batch max_staleness + v at the latest: at most max_staleness old.
    Those that fail or are filtered only bring it forward."""
    run = SmallRun(
        batch=batch, max_staleness=max_staleness, window=0, max_concurrent=max_concurrent
    )
    chance = random.Random(seed)
    for _ in range(200):
        how: Ending = "accepted"
        if chance.random() < not_accepted:
            how = chance.choice(["filtered", "failed", "timed out"])
        run.end(chance.choice(run.running), how)
    assert run.book.counts.expired == 0
    order = [group_id for trained_on in run.batches for group_id in trained_on]
    assert order == sorted(order)
    assert len(order) > 50
    for at_version, trained_on in enumerate(run.batches):
        assert all(at_version - run.drawn_at[i] <= max_staleness for i in trained_on)


@pytest.mark.parametrize("window", [0, 1, None])
def test_a_long_group_expires_in_the_order_of_completion_and_not_in_the_strict_one(
    window: int | None,
) -> None:
    run = SmallRun(batch=1, max_staleness=1, window=window)
    # (1 + 0 + 1) * 1 = 2 groups may be on their way.
    assert run.running == [0, 1]
    run.end(1)
    if window is not None:
        # 1 waits for 0, however long it takes; nothing else may start meanwhile.
        assert (run.batches, run.running) == ([], [0])
        run.end(0)
        assert run.batches == [[0], [1]]
        assert run.book.counts.expired == 0
        return
    # 1 was trained on: at version 1, 3 - (1 accepted + 1 running) = 1 may start. And so on.
    assert (run.batches, run.running) == ([[1]], [0, 2])
    run.end(2)
    assert (run.batches, run.running) == ([[1], [2]], [0, 3])
    run.end(0)
    # 0 was drawn at version 0 and it is version 2: too old by one. Its prompt is drawn again.
    assert run.batches == [[1], [2]]
    assert run.book.counts.expired == 1
    assert run.running == [3, 4]
    assert run.prompts[4] == run.prompts[0]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    window=st.integers(0, 12),
    not_accepted=st.sampled_from([0.0, 0.2]),
    favoured=st.sampled_from(["any", "newest"]),
    seed=st.integers(0, 2**32),
)
def test_no_group_is_overtaken_by_one_that_is_a_window_or_more_ahead(
    batch: int, max_staleness: int, window: int, not_accepted: float, favoured: str, seed: int
) -> None:
    run = SmallRun(batch=batch, max_staleness=max_staleness, window=window)
    chance = random.Random(seed)
    for _ in range(200):
        how: Ending = "filtered" if chance.random() < not_accepted else "accepted"
        newest = favoured == "newest" and chance.random() < 0.9
        run.end(max(run.running) if newest else chance.choice(run.running), how)
    assert len(run.batches) > 5
    assert all(group_id - older < window for group_id, older in run.overtaken)


def test_within_the_window_short_groups_do_go_first() -> None:
    run = SmallRun(batch=1, max_staleness=3, window=3)
    assert run.running == [0, 1, 2, 3]
    for group_id in (3, 2, 1):
        run.end(group_id)
    # 0 + 3 > 1 and 2, so they went as they came; 3 waits until 0 is there, and goes after it.
    assert run.batches == [[2], [1]]
    run.end(0)
    assert run.batches == [[2], [1], [0], [3]]
