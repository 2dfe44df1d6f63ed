"""What a weight update does when all goes well, and what is decided when something does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from updating import PATIENT, Fleet, Trap

from areal_ray.errors import TrainerLost, WeightUpdateError, WrongVersion
from areal_ray.generation.faults import FailStep


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet(
        Trap("nowhere", "before", "raise"),
        engines=3,
        limits=msgspec.structs.replace(PATIENT, timeout_s=8.0, max_failures=3),
        staging="device",
        release_kv=False,
    )
    await made.start()
    yield made
    await made.close()


async def update(fleet: Fleet):
    fleet.trainer.train()
    return await fleet.updates.update(fleet.trainer.version)


def fail(fleet: Fleet, name: str, step: str, times: int = 1) -> None:
    for _ in range(times):
        fleet.engines[name].engine.inject(FailStep(step=step, how="raise", when="before"))


def fail_to_send(fleet: Fleet, times: int = 1) -> None:
    """The trainer's fault, and nobody else's."""
    sender = fleet.trainer._sender
    send, left = sender.send, [OSError("no way to send")] * times

    def failing(member: object) -> None:
        if left:
            sender._hang_up()
            raise left.pop()
        send(member)

    sender.send = failing


async def test_all_engines_serve_the_new_version(fleet: Fleet) -> None:
    outcome = await update(fleet)
    assert (outcome.engines, outcome.attempts, outcome.lost) == (3, 1, [])
    assert fleet.served() == {"engine-0": 2, "engine-1": 2, "engine-2": 2}


async def test_the_group_is_made_anew_only_when_its_members_change(fleet: Fleet) -> None:
    made = fleet.updates._groups_made
    for _ in range(3):
        await update(fleet)
    assert fleet.updates._groups_made == made
    await fleet.replace("engine-1")
    await update(fleet)
    await update(fleet)
    # One to bring the new engine up to date, alone with the trainer, and one of all.
    assert fleet.updates._groups_made == made + 2


async def test_an_engine_that_joins_gets_the_current_version_and_the_others_are_not_asked(
    fleet: Fleet,
) -> None:
    await update(fleet)
    asked = []
    for name in ("engine-0", "engine-2"):
        engine = fleet.engines[name]
        for call in ("stage", "commit", "discard"):
            setattr(engine, call, lambda *_, asked=asked: asked.append(_))
    await fleet.replace("engine-1")
    assert asked == []
    assert set(fleet.served().values()) == {2}


async def test_an_update_that_no_engine_broke_is_tried_again_with_all(fleet: Fleet) -> None:
    fail_to_send(fleet, times=2)
    outcome = await update(fleet)
    assert (outcome.engines, outcome.attempts, outcome.lost) == (3, 3, [])
    assert set(fleet.served().values()) == {2}


async def test_an_engine_that_can_t_stage_is_left_out_and_the_others_get_the_update(
    fleet: Fleet,
) -> None:
    fail(fleet, "engine-1", "receive")
    outcome = await update(fleet)
    assert (outcome.engines, outcome.attempts) == (2, 2)
    (lost,) = outcome.lost
    assert (lost.name, lost.process) == ("engine-1", fleet.engines["engine-1"].process)
    assert lost.cause == (
        "engine-1 did not stage: EngineError: engine-1 failed to receive, as it was told to"
    )
    assert fleet.served() == {"engine-0": 2, "engine-2": 2}
    await fleet.replace("engine-1")
    assert (await update(fleet)).engines == 3


async def test_an_engine_that_can_t_undo_its_part_is_left_out(fleet: Fleet) -> None:
    fail_to_send(fleet)
    fail(fleet, "engine-1", "drop")
    outcome = await update(fleet)
    assert (outcome.engines, outcome.attempts) == (2, 2)
    (lost,) = outcome.lost
    assert lost.name == "engine-1"
    assert "engine-1 could not abort an update" in lost.cause
    assert "failed to drop, as it was told to" in lost.cause
    assert fleet.served() == {"engine-0": 2, "engine-2": 2}


async def test_an_engine_that_fails_the_commit_is_lost_and_the_others_go_on(fleet: Fleet) -> None:
    fail(fleet, "engine-2", "swap")
    outcome = await update(fleet)
    assert (outcome.engines, outcome.attempts) == (2, 1)
    assert [one.name for one in outcome.lost] == ["engine-2"]
    assert "torn weights" in outcome.lost[0].cause
    # Told again until somebody has dealt with it.
    assert [one.name for one in (await update(fleet)).lost] == ["engine-2"]
    await fleet.replace("engine-2")
    assert (await update(fleet)).lost == []
    assert set(fleet.served().values()) == {4}


async def test_so_many_failures_in_a_row_are_the_end_and_the_cause_is_told(fleet: Fleet) -> None:
    fail_to_send(fleet, times=100)
    with pytest.raises(WeightUpdateError, match="OSError: no way to send"):
        await update(fleet)
    assert fleet.updates.lost == [], "it was none of theirs"
    assert set(fleet.served().values()) == {1}


async def test_the_first_error_is_raised_with_what_failed_while_it_was_undone(fleet: Fleet) -> None:
    fail_to_send(fleet)
    fail(fleet, "engine-1", "drop")
    fail(fleet, "engine-2", "drop")
    fleet.updates._limits = msgspec.structs.replace(fleet.updates._limits, max_failures=1)
    with pytest.raises(WeightUpdateError, match="no way to send") as failed:
        await update(fleet)
    (note,) = failed.value.__notes__
    assert "engine-1 could not abort an update" in note
    assert "engine-2 could not abort an update" in note


async def test_weights_of_another_version_are_given_to_nobody(fleet: Fleet) -> None:
    with pytest.raises(WrongVersion, match="the trainer sent version 1, expected 7"):
        await fleet.updates.update(7)
    assert set(fleet.served().values()) == {1}


async def test_without_a_trainer_there_is_no_second_attempt(fleet: Fleet) -> None:
    fleet.trainer.die()
    with pytest.raises(TrainerLost):
        await update(fleet)
    assert set(fleet.served().values()) == {1}


async def test_with_no_engine_there_an_update_is_for_the_next_that_comes(fleet: Fleet) -> None:
    for name in list(fleet.engines):
        fleet.updates.forget(name)
    assert (await update(fleet)).engines == 0
    await fleet.replace("engine-0")
    assert fleet.served() == {"engine-0": 2}


async def test_updates_and_syncs_take_turns(fleet: Fleet) -> None:
    fleet.trainer.train()
    await asyncio.gather(
        fleet.updates.update(2), fleet.replace("engine-0"), fleet.replace("engine-1")
    )
    assert (await fleet.updates.update(2)).engines == 3
    assert set(fleet.served().values()) == {2}


async def test_an_engine_that_can_not_receive_is_found_though_it_answers(fleet: Fleet) -> None:
    """Its thread fails and hangs up, which breaks the transfer for all; yet it stages and aborts
    as if nothing were wrong with it."""
    receiver = fleet.engines["engine-1"].engine.weights.receiver

    class NoMemory:
        writes_in_place = False

        def __init__(self, layout: object) -> None:
            pass

        def buffer(self, bucket: range) -> None:
            raise MemoryError("no room for a bucket")

    receiver._staging, receiver._make_staging = None, NoMemory
    outcome = await update(fleet)
    assert (outcome.engines, outcome.attempts) == (2, 3)
    assert [one.name for one in outcome.lost] == ["engine-1"]
    assert "engine-1 can't receive" in outcome.lost[0].cause
    assert fleet.served() == {"engine-0": 2, "engine-2": 2}
    await fleet.replace("engine-1")
    assert (await update(fleet)).engines == 3


async def test_an_engine_whose_abort_was_cut_short_is_lost(fleet: Fleet) -> None:
    fleet.engines["engine-1"].discard = asyncio.Event().wait
    aborting = asyncio.ensure_future(fleet.updates._abort(fleet.updates.engines))
    await asyncio.sleep(0.05)
    aborting.cancel()
    await asyncio.gather(aborting, return_exceptions=True)
    assert [one.name for one in fleet.updates.lost] == ["engine-1"]
