from __future__ import annotations

from areal_ray.trajectory_buffer import TrajectoryBuffer
from areal_ray.types import GroupSummary


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
    *, batch: int = 1, max_groups: int = 8, max_bytes: int = 1000, max_staleness: int = 2
) -> TrajectoryBuffer[str]:
    return TrajectoryBuffer(
        batch=batch, max_groups=max_groups, max_bytes=max_bytes, max_staleness=max_staleness
    )


def fill(held: TrajectoryBuffer[str], *summaries: GroupSummary) -> None:
    for one in summaries:
        held.reserve(one)
        held.put(f"group {one.group_id}", one)


def ids(entries) -> list[int]:
    return [entry.summary.group_id for entry in entries]


def test_groups_are_lent_in_the_order_they_came() -> None:
    held = buffer()
    fill(held, summary(3), summary(1), summary(2))
    assert held.lease(4, version=0) is None
    _, entries = held.lease(2, version=0)
    assert ids(entries) == [3, 1]
    assert [entry.payload for entry in entries] == ["group 3", "group 1"]


def test_a_lease_that_is_given_back_is_lent_again_first() -> None:
    held = buffer()
    fill(held, *(summary(i) for i in range(4)))
    lease_id, _ = held.lease(2, version=0)
    held.release(lease_id)
    _, entries = held.lease(4, version=0)
    assert ids(entries) == [0, 1, 2, 3]


def test_room_is_counted_in_groups_and_bytes_until_they_are_acknowledged() -> None:
    held = buffer(max_groups=2, max_bytes=25)
    fill(held, summary(0))
    assert held.has_room(15)
    assert not held.has_room(16)
    fill(held, summary(1))
    assert not held.has_room(1)
    lease_id, _ = held.lease(2, version=0)
    held.acknowledge(lease_id)
    assert held.has_room(25)
    assert (held.groups, held.nbytes) == (0, 0)


def test_a_place_is_kept_for_a_group_on_its_way_and_freed_if_it_does_not_come() -> None:
    held = buffer(max_groups=1)
    held.reserve(summary(0))
    assert not held.has_room(1)
    held.cancel(summary(0))
    assert held.has_room(1)


def test_the_next_batch_is_let_in_past_every_bound() -> None:
    held = buffer(batch=2, max_groups=1, max_bytes=5)
    fill(held, summary(0, nbytes=100))
    # Else a batch of two could never come together, and everybody would wait for ever.
    assert held.has_room(100)
    fill(held, summary(1, nbytes=100))
    assert not held.has_room(1)
    held.lease(2, version=0)
    # The next batch may come together while this one is trained on.
    assert held.has_room(1)


def test_a_group_that_is_too_old_is_never_lent_and_is_told_once() -> None:
    held = buffer(max_staleness=2)
    fill(held, summary(0, version=0), summary(1, version=1), summary(2, version=3))
    # At version 3 the oldest token allowed is of version 1.
    _, entries = held.lease(2, version=3)
    assert ids(entries) == [1, 2]
    assert held.take_expired() == [0]
    assert held.take_expired() == []
    assert held.nbytes == 20
