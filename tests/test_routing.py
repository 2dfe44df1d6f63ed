from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_ray.changes import Changes
from areal_ray.routing import Balancer, Lease


async def everyone_waits() -> None:
    """Let each task go on until it waits: a wake-up or two away at most."""
    for _ in range(5):
        await asyncio.sleep(0)


@asynccontextmanager
async def running(coroutine: Coroutine[object, object, object]) -> AsyncIterator[asyncio.Task]:
    """A task that has come as far as it can, and ends with the block at the latest."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(coroutine)
        await everyone_waits()
        yield task
        task.cancel()


def balancer(*names: str) -> Balancer[str]:
    members: Balancer[str] = Balancer()
    for name in names:
        members.admit(name, f"handle of {name}")
    return members


async def test_work_goes_to_the_least_loaded_and_is_given_back_on_error() -> None:
    members = balancer("a", "b")
    async with members.lease(weight=5) as first:
        async with members.lease(weight=1) as second, members.lease(weight=1) as third:
            assert (first.name, second.name, third.name) == ("a", "b", "b")
            assert third.member == "handle of b"
            assert members.loads == {"a": 5, "b": 2}
        with pytest.raises(RuntimeError):
            async with members.lease(weight=9):
                raise RuntimeError
        assert members.loads == {"a": 5, "b": 0}
    assert members.loads == {"a": 0, "b": 0}


async def test_who_is_preferred_is_taken_however_loaded_if_it_takes_work() -> None:
    members = balancer("a", "b")
    async with members.lease(weight=5, prefer="b") as first:
        async with members.lease(weight=5, prefer="b") as second:
            assert (first.name, second.name) == ("b", "b")
        members.exclude("b")
        for prefer in ("b", "never heard of", ""):
            async with members.lease(weight=1, prefer=prefer) as third:
                assert third.name == "a"


async def test_while_nobody_takes_work_a_lease_waits() -> None:
    members = balancer()
    async with running(hold(members, weight=3)) as task:
        assert not task.done()
        members.admit("a", "handle of a")
        await everyone_waits()
        assert members.loads == {"a": 3}
    assert members.loads == {"a": 0}


async def hold(members: Balancer[str], *, weight: int) -> None:
    async with members.lease(weight=weight):
        await asyncio.Event().wait()


async def test_those_that_waited_are_spread_over_all_that_come() -> None:
    members = balancer()
    async with asyncio.TaskGroup() as tasks:
        holding = [tasks.create_task(hold(members, weight=1)) for _ in range(6)]
        await everyone_waits()
        members.admit("a", "handle of a")
        members.admit("b", "handle of b")
        await everyone_waits()
        assert members.loads == {"a": 3, "b": 3}
        for task in holding:
            task.cancel()


async def test_a_lease_moves_with_its_weight() -> None:
    members = balancer("a", "b", "c")
    async with members.lease(weight=4) as lease, members.lease(weight=1, prefer="b"):
        assert lease.name == "a"
        members.exclude("a")
        await lease.move()
        assert (lease.name, lease.member) == ("c", "handle of c")
        # Nobody is at a any more, and it takes none: it is forgotten.
        assert members.loads == {"b": 1, "c": 4}
        await lease.move(prefer="b")
        assert members.loads == {"b": 5, "c": 0}
    assert members.loads == {"b": 0, "c": 0}


async def test_a_lease_may_move_to_where_it_was() -> None:
    members = balancer("a")
    async with members.lease(weight=4) as lease:
        members.exclude("a")
        members.admit("a", "another handle")
        await lease.move()
        assert (lease.name, lease.member) == ("a", "another handle")
        assert members.loads == {"a": 4}
    assert members.loads == {"a": 0}


async def test_a_lease_that_waits_while_it_moves_weighs_nothing_and_can_be_cancelled() -> None:
    members = balancer("a")
    async with members.lease(weight=4) as lease:
        members.exclude("a")
        async with running(lease.move()) as moving:
            assert not moving.done()
            assert members.loads == {}
        assert lease.name == ""
    members.admit("a", "handle of a")
    await everyone_waits()
    assert members.loads == {"a": 0}


async def test_a_lease_that_is_cancelled_before_it_got_anybody_leaves_nothing() -> None:
    members = balancer()
    async with running(hold(members, weight=3)) as task:
        task.cancel()
    members.admit("a", "handle of a")
    await everyone_waits()
    assert members.loads == {"a": 0}


async def test_a_lease_that_is_chosen_for_and_cancelled_in_the_same_moment_leaves_nothing() -> None:
    members = balancer()
    async with running(hold(members, weight=3)) as task:
        members.admit("a", "handle of a")
        task.cancel()
    assert members.loads == {"a": 0}


async def test_who_is_excluded_keeps_what_it_has_and_gets_nothing_new() -> None:
    members = balancer("a", "b")
    async with members.lease(weight=2, prefer="a"):
        members.exclude("a")
        members.exclude("a")
        members.exclude("never heard of")
        assert members.loads == {"a": 2, "b": 0}
        async with members.lease(weight=7), members.lease(weight=1) as lease:
            assert lease.name == "b"
        # Admitted again, it is as loaded as it was.
        members.admit("a", "handle of a")
        async with members.lease(weight=1) as lease:
            assert lease.name == "b"
        assert members.loads == {"a": 2, "b": 0}


async def test_one_can_wait_until_somebody_is_idle() -> None:
    members = balancer("a", "b")
    await members.until_idle("b")
    await members.until_idle("never heard of")
    async with members.lease(weight=2) as first, members.lease(weight=1):
        async with members.lease(weight=1, prefer="a") as second:
            async with running(members.until_idle("a")) as idle:
                members.exclude("a")
                first.release()
                await everyone_waits()
                assert not idle.done()
                second.release()
                await everyone_waits()
                assert idle.done()
        # Releasing is over with, and is not done again at the end of the block.
        assert members.loads == {"b": 1}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_however_leases_end_their_weights_are_taken_back(seed: int) -> None:
    asyncio.run(play(random.Random(seed)))


async def play(chance: random.Random) -> None:
    """Leases that begin, move, fail and are cancelled while members come and go."""
    members: Balancer[str] = Balancer()
    leases: dict[asyncio.Task[None], tuple[Lease[str], int]] = {}
    tells: dict[asyncio.Task[None], asyncio.Queue[str]] = {}

    async def work(weight: int) -> None:
        me = asyncio.current_task()
        async with members.lease(weight=weight, prefer=chance.choice("abc")) as lease:
            leases[me] = lease, weight
            while (told := await tells[me].get()) != "end":
                if told == "fail":
                    raise RuntimeError
                await lease.move(prefer=chance.choice("abc"))

    for _ in range(150):
        what = chance.choice(["begin", "begin", "admit", "exclude", "tell", "tell", "cancel"])
        if what == "begin":
            task = asyncio.create_task(work(chance.randint(1, 5)))
            tells[task] = asyncio.Queue()
        elif what == "admit":
            members.admit(name := chance.choice("abc"), f"handle of {name}")
        elif what == "exclude":
            members.exclude(chance.choice("abc"))
        elif tells and what == "tell":
            tells[chance.choice(list(tells))].put_nowait(chance.choice(["end", "fail", "move"]))
        elif tells:
            chance.choice(list(tells)).cancel()
        for _ in range(chance.randint(0, 3)):
            await asyncio.sleep(0)
        if chance.random() < 0.3:
            await everyone_waits()
            for task in [task for task in tells if task.done()]:
                task.cancelled() or task.exception()
                del tells[task]
                leases.pop(task, None)
            by_name = dict.fromkeys("abc", 0)
            for lease, weight in leases.values():
                if lease.name:
                    by_name[lease.name] += weight
            assert {name: load for name, load in by_name.items() if load} == {
                name: load for name, load in members.loads.items() if load
            }
    for task in tells:
        task.cancel()
    await asyncio.gather(*tells, return_exceptions=True)
    assert set(members.loads.values()) <= {0}
    for name in "abc":
        members.exclude(name)
        await members.until_idle(name)
    assert members.loads == {}


async def test_until_returns_when_its_condition_is_true_and_not_before() -> None:
    changes, seen = Changes(), []
    await changes.until(lambda: True)
    async with running(changes.until(lambda: len(seen) >= 2)) as task:
        for _ in range(2):
            assert not task.done()
            seen.append(1)
            await everyone_waits()
            # True or not, nobody looks until it is told to.
            assert not task.done()
            changes.notify()
            await everyone_waits()
        assert task.done()


async def test_until_goes_on_waiting_if_another_was_faster() -> None:
    changes, places = Changes(), [1]

    async def take_place() -> None:
        await changes.until(lambda: places)
        places.pop()

    places.clear()
    async with running(take_place()) as first, running(take_place()) as second:
        places.append(1)
        changes.notify()
        await everyone_waits()
        assert (first.done(), second.done()) in [(True, False), (False, True)]
        places.append(1)
        changes.notify()
        await everyone_waits()
        assert first.done()
        assert second.done()


async def test_next_waits_for_one_notice_that_comes_after_it() -> None:
    changes = Changes()
    changes.notify()
    async with running(changes.next()) as first, running(changes.next()) as second:
        assert not first.done()
        changes.notify()
        await everyone_waits()
        assert first.done()
        assert second.done()
    async with running(changes.next()) as third:
        assert not third.done()


async def test_who_is_cancelled_leaves_no_waiter_behind() -> None:
    changes = Changes()
    for _ in range(3):
        async with running(changes.until(lambda: False)), running(changes.next()) as task:
            assert len(changes._waiting) == 2
            task.cancel()
            await everyone_waits()
            assert len(changes._waiting) == 1
            # Told and cancelled in the same moment is no error either.
            changes.notify()
        assert not changes._waiting


async def test_a_condition_that_raises_raises_where_it_is_awaited() -> None:
    changes = Changes()
    with pytest.raises(ZeroDivisionError):
        await changes.until(lambda: 1 / 0)
    assert not changes._waiting
