"""A run that goes on from a checkpoint: no group is lost, none is trained on twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from rehearsing import PROMPTS, LiveThrough, RehearsedCrew, kill, lasting, run, simulated

from areal_ray.checkpoints import Checkpoint
from areal_ray.errors import TrainerLost

pytestmark = pytest.mark.usefixtures("ray_cluster")


def rehearse(model: Path, directory: Path, **changes: object) -> RehearsedCrew:
    """In strict order, in which no group grows too old. Lengths differ a hundredfold, so that
    groups end in quite another order."""
    return RehearsedCrew(
        model,
        directory,
        engine=simulated(tokens_per_s=500.0, mean_tokens=40.0),
        generation={"engines": 2, "max_new_tokens": 200},
        rollout={"order": "strict", "max_staleness": 4},
        **changes,
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def checkpoint(ray_cluster: None, tiny_model: Path, run_dir: Path) -> Checkpoint:
    """Of a crew that has trained three steps, and then two more that nobody knows of later."""

    async def scenario() -> Checkpoint:
        async with rehearse(tiny_model, run_dir) as rehearsal:
            await rehearsal.steps(3)
            cut = await rehearsal.crew.checkpointing.take_snapshot(rehearsal.version)
            assert cut.places, "some groups wait to be trained on"
            assert rehearsal.trained == list(range(4 * 3)), "as they were drawn"
            # Training goes on while it is written.
            await rehearsal.step()
            await rehearsal.crew.checkpointing.write(cut)
            await rehearsal.step()
            return rehearsal.crew.checkpointing.store.latest()

    return run(scenario())


@pytest.fixture(scope="module")
def resumed(checkpoint: Checkpoint, tiny_model: Path, run_dir: Path) -> Iterator[LiveThrough]:
    yield from lasting(rehearse(tiny_model, run_dir, resumed=checkpoint))


def test_what_was_in_flight_waiting_and_to_come_is_trained_on_once(
    checkpoint: Checkpoint, resumed
) -> None:
    """In strict order groups are trained on as they were drawn: so the numbers of the groups tell
    the whole story, over a crew that is killed and another that goes on in its place."""

    async def scenario(rehearsal: RehearsedCrew) -> None:
        assert rehearsal.version == 3
        await rehearsal.steps(8)
        counts = await rehearsal.counts()
        assert (counts.version, counts.failed, counts.expired) == (11, 0, 0)
        # The first three batches were trained on before the checkpoint.
        assert rehearsal.trained == list(range(4 * 3, 4 * 11))
        assert len(PROMPTS) < 4 * 11, "the cursor went over the end of an epoch"

    assert (checkpoint.step, checkpoint.manifest.version) == (3, 3)
    resumed(scenario)


def test_a_trainer_that_is_killed_goes_on_from_the_last_checkpoint(resumed) -> None:
    def never_end_a_step(trainer) -> None:
        trainer._step_s = 3600.0

    async def scenario(rehearsal: RehearsedCrew) -> None:
        crew = rehearsal.crew
        # Let all that waits be made by one version: five batches, which may be trained on at this
        # version and the next four.
        await rehearsal.until_full()
        await crew.controller.pause.remote()
        await rehearsal.steps(5)
        await crew.controller.resume.remote()
        held = await rehearsal.until_full() - 4 * rehearsal.version

        begin = rehearsal.version
        cut = await crew.checkpointing.take_snapshot(begin)
        await crew.checkpointing.write(cut)
        await rehearsal.step()
        await rehearsal.until_full()
        await crew.trainer.__ray_call__.remote(never_end_a_step)
        stepping = asyncio.ensure_future(rehearsal.step())
        while (await crew.queue.status.remote()).waiting_groups == held:
            await asyncio.sleep(0.01)
        await kill(crew.trainer)
        with pytest.raises(TrainerLost):
            await stepping
        checkpoint = await crew.recover_trainer(rehearsal.version + 1)
        assert checkpoint.step == begin
        rehearsal.version += 1
        rollout, _ = await crew.status()
        assert rollout.ledger.version == rehearsal.version == begin + 2
        before = rehearsal.trained.copy()
        await rehearsal.steps(3)
        # The batch that it was at went back, and was trained on then.
        first = before[0]
        assert rehearsal.trained == list(range(first, first + len(before) + 4 * 3))
        assert (await rehearsal.counts()).expired == 0
        # The last that was made by that version grew too old by the version that the recovery
        # took, and is rolled out again.
        await rehearsal.step()
        counts = await rehearsal.counts()
        assert (counts.failed, counts.expired) == (0, 4)
        assert len(set(rehearsal.trained)) == len(before) + 4 * 4

    resumed(scenario)
