"""The trainer dies, and others depend on it: engines that want its weights, a batch that it had."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rehearsing import RehearsedCrew, kill, run

from areal_ray.errors import TrainerLost
from areal_ray.tasks import guarded

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_engines_that_come_back_while_the_trainer_is_down_wait_for_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        crew_of_two = RehearsedCrew(tiny_model, tmp_path, generation={"engines": 2})
        async with crew_of_two as rehearsal:
            crew = rehearsal.crew
            await rehearsal.step()
            await crew.checkpointing.write(await crew.checkpointing.take_snapshot(1))
            await kill(crew.trainer)
            for engine in crew.engines.values():
                await kill(engine)
            await guarded(both_are("syncing", rehearsal), crew.watch())
            with pytest.raises(TrainerLost):
                await rehearsal.step()
            rehearsal.version += 1
            rehearsal.skipped = 1
            await crew.recover_trainer(rehearsal.version)
            await rehearsal.steps(2)
            await rehearsal.check_that_all_is_well()
            # Once each: none was restarted for want of a trainer.
            rollout, _ = await crew.status()
            assert [engine.incarnation for engine in rollout.engines] == [2, 2]

    async def both_are(state: str, rehearsal: RehearsedCrew) -> None:
        while True:
            rollout, _ = await rehearsal.crew.status()
            if all(engine.state == state for engine in rollout.engines):
                return
            await asyncio.sleep(0.05)

    run(scenario())


@pytest.mark.parametrize("is_told", [False, True])
def test_a_trainer_that_dies_with_a_batch_trained_on_costs_a_batch_and_no_place(
    is_told: bool, tiny_model: Path, tmp_path: Path
) -> None:
    """Before the controller has heard of it, or after. With no staleness there is just the one
    batch: did it hold its places still, no other would start."""

    async def scenario() -> None:
        async with RehearsedCrew(tiny_model, tmp_path, rollout={"max_staleness": 0}) as rehearsal:
            crew = rehearsal.crew
            await rehearsal.step()
            await crew.checkpointing.write(await crew.checkpointing.take_snapshot(1))
            report = await crew.train_step(2, rehearsal.version)
            rehearsal.trained += report.group_ids
            if is_told:
                await crew.trained(report.group_ids)
            await kill(crew.trainer)
            rehearsal.version += 1
            await crew.recover_trainer(rehearsal.version)
            await rehearsal.steps(2)
            assert (await rehearsal.counts()).skipped == 0
            await rehearsal.check_that_all_is_well()

    run(scenario())
