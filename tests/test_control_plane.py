"""The control plane over a real Ray cluster, with simulated engines and a paced trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import ray
from rehearsing import PROMPTS, RehearsedCrew, kill, run, simulated, zero

from areal_ray.deadlines import within
from areal_ray.errors import (
    FilteredOut,
    GroupTimedOut,
    PoolError,
    TooManyFailures,
    WeightUpdateError,
    root_cause,
)
from areal_ray.generation.faults import Die, FailStep
from areal_ray.types import Completion, Prompt, Trajectory
from areal_ray.workflows import RolloutContext

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def rehearse(tiny_model: Path, tmp_path: Path) -> Callable[..., RehearsedCrew]:
    return partial(RehearsedCrew, tiny_model, tmp_path)


def broken_for_one(prompt: Prompt, completion: Completion) -> float:
    if prompt.answer == "22":
        raise KeyError("no such answer")
    return 0.0


def broken(prompt: Prompt, completion: Completion) -> float:
    raise KeyError("the user's mistake")


def one_for_even(prompt: Prompt, completion: Completion) -> float:
    """Differs within a group only for every second prompt."""
    return float(int(prompt.answer) % 4 == 0 and completion.token_ids[0] % 2)


def test_rollout_stops_where_staleness_ends_and_goes_on_with_the_next_version(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse() as rehearsal:
            # (1 + 0 + 1) * 4 groups, and then (1 + 1 + 1) * 4.
            await rehearsal.until(lambda c: c.accepted == 8 and not c.running, "8 groups")
            await rehearsal.crew.controller.commit_version.remote(1, [])
            await rehearsal.until(lambda c: c.accepted == 12 and not c.running, "12 groups")
            _, queue = await rehearsal.crew.status()
            assert queue.waiting_groups == 12

    run(scenario())


def test_a_batch_is_read_from_the_object_store_after_its_worker_is_gone(rehearse) -> None:
    async def scenario() -> list[Trajectory]:
        async with rehearse() as rehearsal:
            await rehearsal.until(lambda c: c.accepted == 8, "8 groups")
            await rehearsal.crew.controller.close.remote()
            ray.kill(rehearsal.workers["worker-0"])
            lease = await rehearsal.crew.queue.get_batch.remote(0, "a test")
            chunks = await asyncio.gather(*(place.chunk for place in lease.places))
            groups = [
                chunk[place.position] for chunk, place in zip(chunks, lease.places, strict=True)
            ]
            await rehearsal.crew.queue.acknowledge.remote(lease.incarnation, lease.lease_id)
            assert (await rehearsal.crew.queue.status.remote()).held_groups == 4
            return [one for group in groups for one in group.trajectories]

    trajectories = run(scenario())
    assert len(trajectories) == 4 * 2
    assert all(one.versions.tolist() == [0] * len(one.response_ids) for one in trajectories)


def test_groups_that_grew_too_old_are_rolled_out_again(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse() as rehearsal:
            await rehearsal.until(lambda c: c.accepted == 8, "8 groups")
            await rehearsal.set_engine_version(5)
            # All eight were made by version 0: more than one version behind version 5.
            batch = rehearsal.crew.train_step(6, 5)
            report = await within(20, batch, who="the queue", doing="a fresh batch")
            assert report.oldest_version == 5
            assert min(report.group_ids) >= 8
            await rehearsal.until(lambda c: c.expired == 8 and c.accepted == 8, "expiry")

    run(scenario())


COLOCATED = {"generation": {"engines": 2, "colocated": True}, "weights": {"staging": "host"}}


def test_engines_that_share_devices_with_the_trainer_rest_while_it_trains(rehearse) -> None:
    def is_asleep(actor) -> bool:
        return actor._engine.weights.is_asleep

    async def asleep(rehearsal: RehearsedCrew) -> list[bool]:
        engines = rehearsal.crew.engines.values()
        return await asyncio.gather(*(one.__ray_call__.remote(is_asleep) for one in engines))

    async def scenario() -> None:
        async with rehearse(step_s=0.5, **COLOCATED) as rehearsal:
            assert await asleep(rehearsal) == [False, False]
            stepping = asyncio.ensure_future(rehearsal.step())
            while await asleep(rehearsal) != [True, True]:
                assert not stepping.done()
            await stepping
            assert await asleep(rehearsal) == [False, False]
            await rehearsal.steps(2)
            await rehearsal.check_that_all_is_well()

    run(scenario())


def test_engines_wake_from_a_step_that_was_given_up_and_one_that_died_comes_back(rehearse) -> None:
    """Its memory is the trainer's until the turn ends: only then is it started again."""

    async def scenario() -> None:
        async with rehearse(step_s=1.0, **COLOCATED) as rehearsal:
            engine = rehearsal.crew.engines["engine-1"]
            stepping = asyncio.ensure_future(rehearsal.crew.train_step(1, 0))
            while not await engine.__ray_call__.remote(lambda a: a._engine.weights.is_asleep):
                assert not stepping.done()
            ray.kill(engine, no_restart=False)
            stepping.cancel()
            await asyncio.gather(stepping, return_exceptions=True)
            await rehearsal.steps(2)
            await rehearsal.check_that_all_is_well()

    run(scenario())


def test_a_reward_that_always_raises_ends_the_run_before_it_eats_the_data(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse(
            reward=broken, rollout={"max_failed_groups": 3, "max_concurrent_groups": 2}
        ) as rehearsal:
            try:
                await within(30, rehearsal.crew.watch(), who="watch", doing="raising")
            finally:
                # Four failed, and at most one more was on its way.
                assert (await rehearsal.counts()).submitted <= 4 + 2

    with pytest.raises(TooManyFailures) as failed:
        run(scenario())
    message = str(root_cause(failed.value))
    assert "4 of the last 4 groups failed" in message
    assert "    4 x RewardError  since group" in message
    assert 'KeyError: "the user\'s mistake"' in message
    assert "in broken" in message


def test_one_bad_prompt_does_not_end_the_run(rehearse) -> None:
    async def scenario() -> None:
        # 200 groups, five times round the 40 prompts; few at a time, or one prompt would be in
        # flight more often than it may fail.
        async with rehearse(
            reward=broken_for_one,
            rollout={"max_failed_groups": 3, "max_concurrent_groups": 8},
            trainer={"groups_per_step": 100},
        ) as rehearsal:
            await rehearsal.until(lambda c: c.accepted == 200 and not c.running, "200 groups")
            # It failed three times and was given up, within the budget of three.
            rollout, _ = await rehearsal.crew.status()
            assert rollout.ledger.failed == 3
            assert [(kind.error, kind.count) for kind in rollout.failures] == [("RewardError", 3)]

    run(scenario())


async def endless(prompt: Prompt, context: RolloutContext) -> list[Trajectory]:
    await asyncio.Event().wait()
    raise AssertionError


def test_a_group_that_takes_too_long_is_given_up_and_counted_as_timed_out(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse(
            workflow=endless, rollout={"group_timeout_s": 0.3, "max_failed_groups": 2}
        ) as rehearsal:
            try:
                await rehearsal.crew.watch()
            finally:
                running = await rehearsal.workers["worker-0"].running.remote()
                ended = (await rehearsal.counts()).failed
                assert len(running) <= 8 - ended  # those given up do not run on
                assert not any((await rehearsal.crew.status())[0].engine_loads.values()) or running

    with pytest.raises(TooManyFailures) as failed:
        run(scenario())
    assert isinstance(failed.value.__cause__, GroupTimedOut) or "GroupTimedOut" in str(failed.value)


def test_filtered_groups_are_replaced_by_others(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse(
            reward=one_for_even, rollout={"filter": "unequal_rewards", "samples": 8}
        ) as rehearsal:
            for _ in range(3):
                await rehearsal.step()
            counts = await rehearsal.counts()
            assert counts.filtered >= 3
            assert counts.failed == counts.expired == 0
            conserved = counts.running + counts.accepted + counts.filtered
            assert counts.submitted == conserved

    run(scenario())


def test_a_filter_that_lets_nothing_through_ends_the_run(rehearse) -> None:
    async def scenario() -> None:
        filtering = {"filter": "unequal_rewards", "max_filtered_in_a_row": 20}
        async with rehearse(reward=zero, rollout=filtering) as rehearsal:
            await within(30, rehearsal.crew.watch(), who="watch", doing="raising")

    with pytest.raises(FilteredOut, match="none of 21 groups in a row"):
        run(scenario())


def test_weight_updates_that_keep_failing_end_the_run_with_the_cause(rehearse) -> None:
    def lose_the_version(trainer) -> None:
        del trainer._version

    async def scenario() -> None:
        async with rehearse(weights={"max_failures": 2}) as rehearsal:
            await rehearsal.step()
            call = rehearsal.crew.trainer.__ray_call__
            await rehearsal.step(once_trained=lambda: call.remote(lose_the_version))

    with pytest.raises(WeightUpdateError, match="AttributeError: .* no attribute '_version'"):
        run(scenario())


def test_an_engine_that_can_t_stage_weights_is_replaced(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse(generation={"engines": 2}) as rehearsal:
            await rehearsal.step()
            await rehearsal.inject("engine-0", FailStep(step="receive", how="raise", when="before"))
            await rehearsal.steps(2)
            await rehearsal.check_that_all_is_well()
            rollout, _ = await rehearsal.crew.status()
            assert [engine.incarnation for engine in rollout.engines] == [2, 1]

    run(scenario())


def test_in_strict_order_groups_are_trained_on_as_they_were_drawn(rehearse) -> None:
    async def scenario() -> list[int]:
        # Lengths differ a hundredfold, so that groups end in quite another order.
        slow = simulated(tokens_per_s=500.0, mean_tokens=40.0)
        async with rehearse(
            engine=slow,
            generation={"max_new_tokens": 200},
            rollout={"order": "strict", "max_staleness": 2},
        ) as rehearsal:
            for _ in range(6):
                await rehearsal.step()
            assert (await rehearsal.counts()).expired == 0
            return rehearsal.trained

    assert run(scenario()) == list(range(24))


def test_a_full_queue_makes_groups_wait_and_loses_none(rehearse) -> None:
    async def scenario() -> None:
        # Room for one byte: only what the next batch is short of is let in. In strict order, or
        # some would be overtaken until they are too old.
        narrow = {"max_queue_gib": 2**-30, "max_staleness": 3, "order": "strict"}
        async with rehearse(rollout=narrow) as rehearsal:
            await rehearsal.until(lambda c: (c.accepted, c.running) == (4, 12), "a full queue")
            for _ in range(5):
                await rehearsal.step()
            await rehearsal.until(lambda c: (c.accepted, c.running) == (24, 12), "as full again")
            _, queue = await rehearsal.crew.status()
            assert queue.held_groups == 4
            assert len(set(rehearsal.trained)) == 20
            counts = await rehearsal.counts()
            assert (counts.failed, counts.expired) == (0, 0)

    run(scenario())


def test_a_pause_starts_nothing_new_and_still_takes_what_runs(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse() as rehearsal:
            await rehearsal.until(lambda c: c.accepted == 8 and not c.running, "8 groups")
            await rehearsal.crew.controller.pause.remote()
            await rehearsal.crew.controller.commit_version.remote(1, [])
            await rehearsal.until(lambda c: c.running == 4 and c.accepted == 8, "a pause")
            await rehearsal.crew.controller.resume.remote()
            await rehearsal.until(lambda c: c.accepted == 12 and not c.running, "going on")

    run(scenario())


def test_an_evaluation_is_complete_and_beside_the_ledger(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse(reward=lambda prompt, completion: prompt.answer == "22") as rehearsal:
            await rehearsal.until(lambda c: c.accepted == 8 and not c.running, "8 groups")
            result = await rehearsal.crew.evaluate(PROMPTS)
            assert (result.prompts, result.mean_reward) == (40, 1 / 40)
            assert (await rehearsal.counts()).submitted == 8

    run(scenario())


async def all_busy(rehearsal: RehearsedCrew, engines: int) -> None:
    while True:
        rollout, _ = await rehearsal.crew.status()
        if sum(load > 0 for load in rollout.engine_loads.values()) == engines:
            return


def test_the_pool_grows_and_shrinks_while_it_works(rehearse) -> None:
    async def scenario() -> None:
        slow = simulated(tokens_per_s=50.0, mean_tokens=20.0)
        async with rehearse(engine=slow, generation={"max_new_tokens": 60}) as rehearsal:
            working = asyncio.ensure_future(rehearsal.steps(8))
            await rehearsal.step_reached(1)
            await rehearsal.crew.resize(3)
            rollout, _ = await rehearsal.crew.status()
            assert [(e.name, e.state) for e in rollout.engines] == [
                (f"engine-{index}", "serving") for index in range(3)
            ]
            await within(30, all_busy(rehearsal, 3), who="the pool", doing="using all engines")
            await rehearsal.crew.resize(1)
            rollout, _ = await rehearsal.crew.status()
            assert [engine.name for engine in rollout.engines] == ["engine-0"]
            await working
            counts = await rehearsal.counts()
            assert counts.failed == 0
            assert len(set(rehearsal.trained)) == 8 * 4

    run(scenario())


def test_a_torn_engine_that_a_new_controller_finds_is_replaced(rehearse) -> None:
    """The old controller dies before it hears of the failed commit; the new one, for which no
    engine has served yet, can't give this one weights."""

    async def scenario() -> None:
        async with rehearse(generation={"engines": 1}) as rehearsal:
            await rehearsal.step()
            await rehearsal.inject("engine-0", FailStep(step="swap", how="raise", when="after"))
            crew = rehearsal.crew

            async def tear_and_kill() -> None:
                update = await crew.manager.update_weights.remote(2)
                assert [one.name for one in update.outcome.lost] == ["engine-0"]
                await kill(crew.controller)

            await rehearsal.step(once_trained=tear_and_kill)
            await rehearsal.steps(2)
            await rehearsal.check_that_all_is_well()
            rollout, _ = await crew.status()
            assert [engine.incarnation for engine in rollout.engines] == [2]

    run(scenario())


def test_when_no_engine_is_left_the_run_ends_and_names_the_cause(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse(
            generation={
                "engines": 2,
                "restart_engines": False,
                "suspect_after_s": 1,
                "dead_after_s": 3,
            }
        ) as rehearsal:
            await kill(rehearsal.crew.engines["engine-0"])
            await rehearsal.inject("engine-1", Die())
            await rehearsal.crew.watch()

    with pytest.raises(PoolError) as ended:
        run(scenario(), timeout_s=40)
    message = str(ended.value)
    assert "0 engines are left, fewer than the 1 that are needed" in message
    assert "engine-0: ActorUnavailableError" in message
    assert "engine-1: EngineNotServing" in message
