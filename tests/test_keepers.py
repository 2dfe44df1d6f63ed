"""An engine that waits for weights, over a manager that is played."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from areal_ray.actors.generation import Started
from areal_ray.actors.keepers import EngineKeeper
from areal_ray.errors import DeadlineExceeded, TrainerAway, TrainerLost, WeightUpdateError


class PlayedManager:
    """Fails so often as it is told to, each time as it is told to."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.sync = SimpleNamespace(remote=self._sync)

    async def _sync(self, _: object) -> None:
        if self.failures:
            raise self.failures.pop()


class PlayedEngine:
    def __init__(self) -> None:
        self.start = SimpleNamespace(remote=self._start)
        self.is_there = SimpleNamespace(remote=self._is_there)

    async def _start(self) -> Started:
        return Started(address="127.0.0.1", process="one")

    async def _is_there(self) -> None:
        pass


async def keeper(
    manager: PlayedManager, *, sync_timeout_s: float = 10.0, is_colocated: bool = False
) -> EngineKeeper:
    async def at_once(_: str) -> None:
        pass

    manager.may_start = SimpleNamespace(remote=at_once)
    kept = EngineKeeper(
        tensor_parallel=1,
        startup_timeout_s=10.0,
        sync_timeout_s=sync_timeout_s,
        is_colocated=is_colocated,
    )
    kept.manager = manager
    kept.weights_are_there.set()
    for name in ("first", "second"):
        await kept.bring_up(name, PlayedEngine())
    return kept


async def test_an_engine_waits_for_a_trainer_that_is_being_recovered() -> None:
    manager = PlayedManager()
    kept = await keeper(manager)
    await kept.sync("first", PlayedEngine())
    manager.failures = [TrainerAway("it died"), TrainerAway("it is not started")]
    await kept.sync("second", PlayedEngine())
    assert not manager.failures


async def test_it_does_not_wait_for_ever() -> None:
    manager = PlayedManager()
    kept = await keeper(manager, sync_timeout_s=0.5)
    await kept.sync("first", PlayedEngine())
    manager.failures = [TrainerAway("it died") for _ in range(1000)]
    with pytest.raises(DeadlineExceeded, match="second did not finish getting the current weights"):
        await kept.sync("second", PlayedEngine())


@pytest.mark.parametrize("error", [TrainerLost("for good"), WeightUpdateError("torn")])
async def test_what_no_waiting_mends_is_told_at_once(error: Exception) -> None:
    manager = PlayedManager()
    kept = await keeper(manager)
    await kept.sync("first", PlayedEngine())
    manager.failures = [error]
    with pytest.raises(type(error)):
        await kept.sync("second", PlayedEngine())


async def test_a_trainer_that_dies_as_the_run_starts_is_not_waited_for() -> None:
    kept = await keeper(PlayedManager(TrainerAway("it died")))
    with pytest.raises(TrainerAway):
        await kept.sync("first", PlayedEngine())


async def test_an_engine_that_shares_devices_with_the_trainer_makes_room_for_its_return() -> None:
    manager = PlayedManager()
    kept = await keeper(manager, is_colocated=True)
    await kept.sync("first", PlayedEngine())
    manager.failures = [TrainerAway("it died")]
    with pytest.raises(TrainerAway):
        await kept.sync("second", PlayedEngine())
