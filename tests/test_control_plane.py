"""The control plane over a real Ray cluster, with simulated engines and a paced trainer.

A crew takes seconds to start, so that one lives through all of it, as a long run does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rehearsing import PROMPTS, LiveThrough, RehearsedCrew, kill, lasting, until_gone

from areal_ray.actors.trajectory_queue import read_places
from areal_ray.deadlines import within
from areal_ray.errors import WeightUpdateError
from areal_ray.generation.faults import FailStep
from areal_ray.types import Completion, Prompt

pytestmark = pytest.mark.usefixtures("ray_cluster")


def right_for_22(prompt: Prompt, completion: Completion) -> float:
    return float(prompt.answer == "22")


@pytest.fixture(scope="module")
def crew(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveThrough]:
    """One engine, which answers at once."""
    run_dir = tmp_path_factory.mktemp("run")
    changes = {"reward": right_for_22, "weights": {"max_failures": 2}}
    yield from lasting(RehearsedCrew(tiny_model, run_dir, **changes))


def test_rollout_stops_where_staleness_ends_and_goes_on_with_the_next_version(crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        # (1 + 0 + 1) * 4 groups, and then (1 + 1 + 1) * 4, of which four are trained on.
        for version, groups in ((0, 8), (1, 12)):
            await rehearsal.until(
                lambda c, end=groups: c.accepted == end and not c.running, f"{groups} groups"
            )
            _, queue = await rehearsal.crew.status()
            assert queue.waiting_groups == groups - 4 * version
            await rehearsal.step()

    crew(scenario)


def test_a_pause_starts_nothing_new_and_still_takes_what_runs(crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        held = await rehearsal.until_full()
        await rehearsal.crew.controller.pause.remote()
        await rehearsal.step()
        # Drawn, but not started: the next version lets four more in.
        await rehearsal.until(lambda c: (c.accepted, c.running) == (held, 4), "a pause")
        await rehearsal.crew.controller.resume.remote()
        assert await rehearsal.until_full() == held + 4

    crew(scenario)


def test_an_evaluation_is_complete_and_beside_the_ledger(crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        await rehearsal.until_full()
        before = await rehearsal.counts()
        result = await rehearsal.crew.evaluate(PROMPTS)
        assert (result.prompts, result.mean_reward) == (40, 1 / 40)
        assert await rehearsal.counts() == before

    crew(scenario)


def test_groups_that_grew_too_old_are_rolled_out_again(crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        held = await rehearsal.until_full()
        before = await rehearsal.counts()
        later = rehearsal.version + 5
        await rehearsal.set_engine_version(later)
        # All eight that wait were made by earlier versions: more than one behind.
        step = rehearsal.step(fresh_at=later)
        report = await within(20, step, who="the queue", doing="a fresh batch")
        assert report.oldest_version == later
        assert min(report.group_ids) >= before.submitted
        assert await rehearsal.until_full() == held + 4
        assert (await rehearsal.counts()).expired == before.expired + 8

    crew(scenario)


def test_a_torn_engine_that_a_new_controller_finds_is_replaced(crew) -> None:
    """The old controller dies before it hears of the failed commit; the new one, for which no
    engine has served yet, can't give this one weights."""

    async def scenario(rehearsal: RehearsedCrew) -> None:
        await rehearsal.inject("engine-0", FailStep(step="swap", how="raise", when="after"))
        manager = rehearsal.crew.manager

        async def tear_and_kill() -> None:
            update = await manager.update_weights.remote(rehearsal.version)
            assert [one.name for one in update.outcome.lost] == ["engine-0"]
            await kill(rehearsal.crew.controller)

        await rehearsal.step(once_trained=tear_and_kill)
        await rehearsal.steps(2)
        await rehearsal.check_that_all_is_well()
        rollout, _ = await rehearsal.crew.status()
        assert [engine.incarnation for engine in rollout.engines] == [2]

    crew(scenario)


def test_a_batch_is_read_from_the_object_store_after_its_worker_is_gone(crew) -> None:
    async def scenario(rehearsal: RehearsedCrew) -> None:
        await rehearsal.until_full()
        await until_gone(await kill(rehearsal.workers["worker-0"]))
        queue = rehearsal.crew.queue
        lease = await queue.get_batch.remote(rehearsal.version, "a test")
        groups = await read_places(lease.places)
        await queue.release.remote(lease.incarnation, lease.lease_id)
        assert [group.group_id for group in groups] == lease.group_ids
        trajectories = [one for group in groups for one in group.trajectories]
        assert len(trajectories) == 4 * 2
        for one in trajectories:
            assert len(one.versions) == len(one.response_ids) > 0
            assert set(one.versions.tolist()) <= {rehearsal.version - 1, rehearsal.version}
        report = await rehearsal.step()
        assert report.group_ids == lease.group_ids

    crew(scenario)


def test_weight_updates_that_keep_failing_end_the_run_with_the_cause(crew) -> None:
    """The last of this crew: there is no way back."""

    def lose_the_version(trainer) -> None:
        del trainer._version

    async def scenario(rehearsal: RehearsedCrew) -> None:
        call = rehearsal.crew.trainer.__ray_call__
        await rehearsal.step(once_trained=lambda: call.remote(lose_the_version))

    with pytest.raises(WeightUpdateError, match="AttributeError: .* no attribute '_version'"):
        crew(scenario)
