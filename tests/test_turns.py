"""Devices that trainer and engines share: never both, and back to the engines whatever fails."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import get_args

import pytest
from updating import PATIENT, Fleet, How, Trap, When

from areal_ray.errors import RestoreError, TrainerLost
from areal_ray.generation.faults import RestStep
from areal_ray.weights.turns import Lodger, Turns

POINTS = [
    *(f"trainer.{name}" for name in vars(Lodger) if name.startswith("move")),
    *(f"engine-1.{name}" for name in ("rest", *get_args(RestStep))),
]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def turns_of(fleet: Fleet, *, timeout_s: float = 10.0, clock: Clock | None = None) -> Turns:
    return Turns(
        fleet.updates,
        fleet.trainer,
        timeout_s=timeout_s,
        busy_timeout_s=timeout_s,
        start_timeout_s=5.0,
        clock=clock or Clock(),
    )


async def started(trap: Trap) -> Fleet:
    fleet = Fleet(trap, engines=2, limits=PATIENT, staging="device", release_kv=False)
    await fleet.start()
    return fleet


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = await started(Trap("nowhere", "before", "raise"))
    yield made
    await made.close()


def asleep(fleet: Fleet) -> set[str]:
    return {name for name, one in fleet.engines.items() if one.engine.weights.is_asleep}


async def test_engines_and_trainer_are_never_on_the_devices_together(fleet: Fleet) -> None:
    turns = turns_of(fleet)
    seen = []

    async def watch(where: str, work) -> None:
        seen.append((where, fleet.trainer.is_in, asleep(fleet)))
        await work

    both = {"engine-0", "engine-1"}
    move_in, move_out = fleet.trainer.move_in, fleet.trainer.move_out
    fleet.trainer.move_in = lambda: watch("moving in", move_in())
    fleet.trainer.move_out = lambda: watch("moving out", move_out())
    await turns.begin()
    assert (fleet.trainer.is_in, asleep(fleet)) == (True, both)
    await turns.end()
    assert (fleet.trainer.is_in, asleep(fleet)) == (False, set())
    assert seen == [("moving in", False, both), ("moving out", True, both)]


async def test_an_update_waits_for_the_end_of_the_trainers_turn(fleet: Fleet) -> None:
    turns = turns_of(fleet)
    await turns.begin()
    fleet.trainer.train()
    updating = asyncio.ensure_future(fleet.updates.update(fleet.trainer.version))
    await asyncio.sleep(0.05)
    assert not updating.done()
    await turns.end()
    assert (await updating).engines == 2


async def test_an_engine_starts_in_the_engines_turn_alone(fleet: Fleet) -> None:
    turns = turns_of(fleet)
    first = asyncio.ensure_future(turns.may_start("engine-2"))
    await asyncio.sleep(0.01)
    assert not first.done(), "the first turn is the trainer's"
    await turns.begin()
    await turns.end()
    await first
    beginning = asyncio.ensure_future(turns.begin())
    later = asyncio.ensure_future(turns.may_start("engine-3"))
    await asyncio.sleep(0.01)
    assert not beginning.done(), "an engine starts"
    assert not later.done(), "the trainer has waited for longer"
    turns.has_started("engine-2")
    await beginning
    await turns.end()
    await later


async def test_an_engine_that_has_leave_keeps_it_when_a_new_controller_asks(fleet: Fleet) -> None:
    turns = turns_of(fleet)
    await turns.begin()
    await turns.end()
    await turns.may_start("engine-2")
    beginning = asyncio.ensure_future(turns.begin())
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await turns.may_start("engine-2")
    turns.has_started("engine-2")
    await beginning
    await turns.end()


async def test_an_engine_that_never_starts_holds_the_trainer_up_to_its_time_limit(
    fleet: Fleet,
) -> None:
    clock = Clock()
    turns = turns_of(fleet, clock=clock)
    await turns.begin()
    await turns.end()
    await turns.may_start("engine-2")
    clock.now_s = 5.0
    await turns.begin()
    assert fleet.trainer.is_in


@pytest.mark.parametrize("point", ["engine-1.sleep", "trainer.move_in"])
async def test_a_turn_that_is_ended_before_it_has_begun_is_called_off(point: str) -> None:
    trap = Trap(point, "after", "hang")
    trap.has_struck = True
    fleet = await started(trap)
    trap.has_struck = False
    turns = turns_of(fleet, timeout_s=2.0)
    beginning = asyncio.ensure_future(turns.begin())
    while not trap.has_struck:
        await asyncio.sleep(0)
    await turns.end()
    assert beginning.done()
    assert not fleet.trainer.is_in
    fleet.served()
    await turns.begin()
    await turns.end()
    await fleet.close()


async def test_an_engine_that_can_not_rest_is_ended_before_the_trainer_moves_in(
    fleet: Fleet,
) -> None:
    engine = fleet.engines["engine-1"]

    async def refuse() -> None:
        raise OSError("no sleep")

    engine.engine.weights.sleep = refuse
    lost = await turns_of(fleet).begin()
    assert [one.name for one in lost] == ["engine-1"]
    assert "no sleep" in lost[0].cause
    assert engine.engine.is_dead
    assert fleet.trainer.is_in


async def test_a_trainer_that_dies_in_its_turn_leaves_engines_that_serve(fleet: Fleet) -> None:
    turns = turns_of(fleet)
    await turns.begin()
    fleet.trainer.die()
    with pytest.raises(RestoreError, match="the trainer is dead"):
        await turns.end()
    assert asleep(fleet) == set()


async def suffer(point: str, when: When, how: How) -> bool:
    trap = Trap(point, when, how)
    trap.has_struck = True  # not yet
    fleet = await started(trap)
    trap.has_struck = False
    turns = turns_of(fleet, timeout_s=1.0)

    async def take_turn() -> None:
        await turns.begin()
        await turns.end()

    taking = asyncio.ensure_future(take_turn())
    trap.cancel = taking.cancel
    (outcome,) = await asyncio.gather(taking, return_exceptions=True)
    if isinstance(outcome, asyncio.CancelledError):
        await turns.end()  # as who began the turn does, on every way out
    if how == "die" and point.startswith("trainer"):
        assert isinstance(outcome, (TrainerLost, RestoreError)), repr(outcome)

    assert fleet.served().keys() | {one.name for one in fleet.updates.lost} == fleet.engines.keys()
    assert not fleet.updates.one_at_a_time.locked()
    has_struck, trap.has_struck = trap.has_struck, True
    trap.release()
    fleet.trainer.restart_if_dead()
    for name, engine in fleet.engines.items():
        if name not in fleet.updates.members or engine.engine.is_dead:
            await fleet.replace(name)
    turns = turns_of(fleet)
    assert await turns.begin() == []
    assert asleep(fleet) == {"engine-0", "engine-1"}
    assert await turns.end() == []
    fleet.trainer.train()
    outcome = await fleet.updates.update(fleet.trainer.version)
    assert outcome.engines == 2, outcome
    assert set(fleet.served().values()) == {fleet.trainer.version}
    await fleet.close()
    return has_struck


@pytest.mark.parametrize("how", get_args(How))
async def test_a_failure_anywhere_gives_the_devices_back_to_the_engines(how: How) -> None:
    async def one(point: str, when: When) -> None:
        try:
            assert await suffer(point, when, how)
        except Exception as error:
            error.add_note(f"{point}, {when}")
            raise

    await asyncio.gather(*itertools.starmap(one, itertools.product(POINTS, get_args(When))))
