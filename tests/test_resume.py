"""A run that goes on from a checkpoint: no group is lost, none is trained on twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rehearsing import PROMPTS, RehearsedCrew, kill, run, simulated

from areal_ray.checkpoints import Checkpoint
from areal_ray.errors import TrainerLost
from areal_ray.tasks import guarded

pytestmark = pytest.mark.usefixtures("ray_cluster")


def rehearse(model: Path, directory: Path, **changes: object) -> RehearsedCrew:
    """In strict order, in which no group grows too old."""
    return RehearsedCrew(
        model,
        directory,
        engine=simulated(tokens_per_s=200.0, mean_tokens=10.0),
        generation={"engines": 2, "max_new_tokens": 30},
        rollout={"order": "strict", "max_staleness": 4},
        **changes,
    )


def test_what_was_in_flight_waiting_and_to_come_is_trained_on_once(
    tiny_model: Path, tmp_path: Path
) -> None:
    """In strict order groups are trained on as they were drawn: so the numbers of the groups tell
    the whole story, over a crew that is killed and another that goes on in its place."""

    async def before() -> tuple[list[int], Checkpoint]:
        async with rehearse(tiny_model, tmp_path) as rehearsal:
            await rehearsal.steps(3)
            cut = await rehearsal.crew.checkpointing.take_snapshot(rehearsal.version)
            assert cut.places, "some groups wait to be trained on"
            trained = list(rehearsal.trained)
            # Training goes on while it is written.
            await rehearsal.step()
            await rehearsal.crew.checkpointing.write(cut)
            await rehearsal.step()
            return trained, rehearsal.crew.checkpointing.store.latest()

    async def after(checkpoint: Checkpoint) -> list[int]:
        async with rehearse(tiny_model, tmp_path, resumed=checkpoint) as rehearsal:
            assert rehearsal.version == 3
            await rehearsal.steps(8)
            counts = await rehearsal.counts()
            assert (counts.version, counts.failed, counts.expired) == (11, 0, 0)
            return rehearsal.trained

    first, checkpoint = run(before())
    assert (checkpoint.step, checkpoint.manifest.version) == (3, 3)
    second = run(after(checkpoint))
    assert first + second == list(range(4 * 11))
    assert len(PROMPTS) < 44, "the cursor went over the end of an epoch"


def test_a_trainer_that_is_killed_goes_on_from_the_last_checkpoint(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with rehearse(tiny_model, tmp_path, step_s=0.5) as rehearsal:
            crew = rehearsal.crew
            await rehearsal.steps(2)
            cut = await crew.checkpointing.take_snapshot(rehearsal.version)
            await crew.checkpointing.write(cut)
            await rehearsal.step()
            stepping = asyncio.ensure_future(rehearsal.step())
            await asyncio.sleep(0.2)
            await kill(crew.trainer)
            with pytest.raises(TrainerLost):
                await stepping
            checkpoint = await crew.recover_trainer(rehearsal.version + 1)
            assert checkpoint.step == 2
            rehearsal.version += 1
            rollout, _ = await crew.status()
            assert rollout.ledger.version == rehearsal.version == 4
            await rehearsal.steps(4)
            # The batch that it was at went back, and was trained on then. One batch grew too old
            # by the version that the recovery took, and was rolled out again.
            assert rehearsal.trained[:16] == list(range(16))
            assert len(set(rehearsal.trained)) == 4 * 7
            counts = await rehearsal.counts()
            assert counts.failed == 0
            assert counts.expired <= 4
            rehearsal.skipped = 1
            await rehearsal.check_that_all_is_well()

    run(scenario())


def test_engines_that_come_back_while_the_trainer_is_down_wait_for_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with rehearse(tiny_model, tmp_path) as rehearsal:
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
