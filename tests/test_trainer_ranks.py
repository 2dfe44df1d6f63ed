"""What becomes of a call to all ranks of the trainer when some of them fail."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from areal_ray.actors import trainer_rank
from areal_ray.actors.trainer_rank import together
from areal_ray.errors import NotReady, TrainerAway, TrainerLost, TrainingError


async def gives(value: object) -> object:
    await asyncio.sleep(0)
    return value


async def fails(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


async def waits() -> None:
    """In a collective, for a rank that does not come."""
    await asyncio.Event().wait()


async def test_the_first_rank_tells_once_all_are_through() -> None:
    others_done = asyncio.Event()

    async def slow() -> None:
        await asyncio.sleep(0.01)
        others_done.set()

    assert await together(gives("metrics"), [slow(), gives(None)]) == "metrics"
    assert others_done.is_set()


async def test_what_all_ranks_fail_by_is_what_it_is() -> None:
    error = TrainingError("the gradient is not finite")
    with pytest.raises(TrainingError, match="not finite"):
        await together(fails(error), [fails(error)])


async def test_a_failure_of_one_of_the_others_is_not_lost() -> None:
    with pytest.raises(OSError, match="no space"):
        await together(gives("metrics"), [gives(None), fails(OSError("no space"))])


async def test_a_rank_that_died_for_good_is_a_lost_trainer() -> None:
    with pytest.raises(TrainerLost, match="rank 1 of the trainer is lost") as raised:
        await together(waits(), [fails(ActorDiedError())])
    assert not isinstance(raised.value, TrainerAway)


@pytest.mark.parametrize("error", [NotReady("restarted"), ActorUnavailableError("gone", None)])
async def test_a_rank_that_is_on_its_way_back_is_a_trainer_that_is_away(error) -> None:
    with pytest.raises(TrainerAway, match="rank 2 of the trainer is away"):
        await together(waits(), [waits(), fails(error)])


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_rank, "GRACE_S", 0.05)


@pytest.mark.usefixtures("no_grace")
async def test_a_rank_that_fails_while_others_wait_for_it_is_a_lost_trainer() -> None:
    with pytest.raises(TrainerLost, match="rank 1 of the trainer failed.*out of memory"):
        await together(waits(), [fails(RuntimeError("out of memory")), waits()])


async def test_one_rank_alone_is_just_awaited() -> None:
    assert await together(gives(7), []) == 7
    with pytest.raises(ValueError, match="as it is"):
        await together(fails(ValueError("as it is")), [])
