"""Whatever dies, by real signals to real processes: nothing is lost, nothing is used twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from ray.actor import ActorHandle
from rehearsing import PROMPTS, RehearsedCrew, pid_of, run, simulated

from areal_ray.errors import PoolError
from areal_ray.generation.faults import Die, FailStep, Wedge

pytestmark = pytest.mark.usefixtures("ray_cluster")

STEPS = 6
STRICT = {"order": "strict"}
"""In this order no group grows too old: what expires was lost with the queue."""


@pytest.fixture
def rehearse(tiny_model: Path, tmp_path: Path) -> Callable[..., RehearsedCrew]:
    """Two engines, slow enough that groups are always in flight."""
    return partial(
        RehearsedCrew,
        tiny_model,
        tmp_path,
        engine=simulated(tokens_per_s=100.0, mean_tokens=15.0),
        generation={"engines": 2, "max_new_tokens": 40, "suspect_after_s": 1, "dead_after_s": 3},
    )


async def kill(actor: ActorHandle, how: signal.Signals = signal.SIGKILL) -> int:
    pid = await pid_of(actor)
    os.kill(pid, how)
    return pid


def test_an_engine_process_killed_in_flight_loses_no_group(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse() as rehearsal:
            working = asyncio.ensure_future(rehearsal.steps(STEPS))
            await rehearsal.step_reached(2)
            await kill(rehearsal.crew.engines["engine-0"])
            await working
            await rehearsal.check_that_all_is_well()
            rollout, _ = await rehearsal.crew.status()
            assert [engine.incarnation for engine in rollout.engines] == [2, 1]

    run(scenario())


def test_an_engine_that_dies_inside_its_actor_is_replaced(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse() as rehearsal:
            working = asyncio.ensure_future(rehearsal.steps(STEPS))
            await rehearsal.step_reached(2)
            await rehearsal.inject("engine-1", Die())
            await working
            await rehearsal.check_that_all_is_well()
            rollout, _ = await rehearsal.crew.status()
            assert [engine.incarnation for engine in rollout.engines] == [1, 2]

    run(scenario())


def test_an_engine_that_answers_nothing_any_more_is_found_and_replaced(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse() as rehearsal:
            working = asyncio.ensure_future(rehearsal.steps(STEPS))
            await rehearsal.step_reached(2)
            await rehearsal.inject("engine-0", Wedge())
            await working
            await rehearsal.check_that_all_is_well()
            rollout, _ = await rehearsal.crew.status()
            assert rollout.engines[0].incarnation == 2
            assert rollout.engines[0].cause.startswith("no answer for 3.")

    run(scenario())


def test_a_stopped_engine_process_is_killed_and_replaced(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse() as rehearsal:
            working = asyncio.ensure_future(rehearsal.steps(STEPS))
            await rehearsal.step_reached(2)
            pid = await kill(rehearsal.crew.engines["engine-0"], signal.SIGSTOP)
            await working
            await rehearsal.check_that_all_is_well()
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    run(scenario())


def test_a_worker_killed_in_flight_loses_no_group(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse(rollout={"workers": 2}) as rehearsal:
            working = asyncio.ensure_future(rehearsal.steps(STEPS))
            await rehearsal.step_reached(2)
            await kill(rehearsal.workers["worker-0"])
            await rehearsal.step_reached(4)
            await kill(rehearsal.workers["worker-1"])
            await working
            await rehearsal.check_that_all_is_well()

    run(scenario())


def test_a_killed_queue_comes_back_and_what_it_held_is_rolled_out_again(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse(step_s=0.2, rollout=STRICT) as rehearsal:
            await rehearsal.until(lambda c: c.accepted == 8 and not c.running, "8 groups")
            await kill(rehearsal.crew.queue)
            await rehearsal.steps(STEPS)
            await rehearsal.check_that_all_is_well()
            # Nothing was in training: all eight were lost with the queue, and drawn again.
            assert (await rehearsal.counts()).expired == 8
            assert min(rehearsal.trained) == 8

    run(scenario())


def test_a_queue_killed_while_a_batch_is_trained_on_gives_no_group_twice(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse(step_s=1.0, rollout=STRICT) as rehearsal:
            await rehearsal.until(lambda c: c.accepted == 8 and not c.running, "8 groups")
            working = asyncio.ensure_future(rehearsal.steps(4))
            while (await rehearsal.crew.queue.status.remote()).waiting_groups > 4:
                await asyncio.sleep(0.01)
            await kill(rehearsal.crew.queue)
            await working
            await rehearsal.check_that_all_is_well()
            # Four were in the trainer's hands, and are trained on; four were lost.
            assert (await rehearsal.counts()).expired == 4

    run(scenario())


def test_a_queue_killed_when_a_batch_was_just_trained_on_does_not_lose_it(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse(rollout=STRICT) as rehearsal:
            await rehearsal.until(lambda c: c.accepted == 8 and not c.running, "8 groups")

            async def queue_dies() -> None:
                await kill(rehearsal.crew.queue)
                await rehearsal.until(lambda c: c.expired == 4, "the loss of the other four")

            await rehearsal.step(once_trained=queue_dies)
            await rehearsal.steps(3)
            await rehearsal.check_that_all_is_well()
            assert (await rehearsal.counts()).expired == 4

    run(scenario())


def test_a_killed_controller_goes_on_from_its_journal(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse() as rehearsal:
            working = asyncio.ensure_future(rehearsal.steps(STEPS))
            for version in (2, 4):
                await rehearsal.step_reached(version)
                before, _ = await rehearsal.crew.status()
                await kill(rehearsal.crew.controller)
                after, _ = await rehearsal.crew.status()
                assert after.ledger.submitted >= before.ledger.submitted
                assert after.ledger.version >= before.ledger.version
                assert after.generated_tokens >= before.generated_tokens > 0
            await working
            await rehearsal.check_that_all_is_well()
            # The engines were left alone: they hold the weights, and had work all the while.
            rollout, _ = await rehearsal.crew.status()
            assert [engine.incarnation for engine in rollout.engines] == [1, 1]

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


def test_a_group_that_the_queue_expects_in_vain_is_dropped_by_the_next_controller(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse(rollout=STRICT) as rehearsal:
            await rehearsal.step()
            # As if the controller had died between a failure and the word of it: in this order
            # the queue would wait for group 0 before all others, for ever.
            await rehearsal.crew.queue.update.remote([0], [])
            await kill(rehearsal.crew.controller)
            await rehearsal.steps(3)
            await rehearsal.check_that_all_is_well()

    run(scenario())


def test_a_group_withdrawn_by_a_controller_that_died_then_counts_as_timed_out(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse(step_s=0.5, rollout=STRICT) as rehearsal:
            running: list[int] = []
            while not running:
                await rehearsal.step()
                places = [await one.running.remote() for one in rehearsal.workers.values()]
                running = [group_id for place in places for group_id in place]
            taken_by = await rehearsal.crew.queue.has_taken.remote(running[-1], withdraw=True)
            await kill(rehearsal.crew.controller)
            await rehearsal.steps(3)
            await rehearsal.check_that_all_is_well(may_fail=True)
            assert (await rehearsal.counts()).failed == (not taken_by)

    run(scenario())


def test_a_paused_controller_that_is_killed_stays_paused(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse() as rehearsal:
            watching = asyncio.ensure_future(rehearsal.crew.watch())
            await rehearsal.until(lambda c: c.accepted == 8 and not c.running, "8 groups")
            await rehearsal.crew.controller.pause.remote()
            await kill(rehearsal.crew.controller)
            rollout, _ = await rehearsal.crew.status()
            assert rollout.paused
            working = asyncio.ensure_future(rehearsal.step())
            # Drawn, but not started: version 1 lets four more in.
            await rehearsal.until(lambda c: c.running == 4 and c.accepted == 8, "a pause")
            await rehearsal.crew.controller.resume.remote()
            await working
            await rehearsal.check_that_all_is_well()
            watching.cancel()

    run(scenario())


def test_an_evaluation_outlives_the_engine_the_worker_and_the_controller(rehearse) -> None:
    async def scenario() -> None:
        async with rehearse(reward=lambda prompt, completion: 1.0) as rehearsal:
            watching = asyncio.ensure_future(rehearsal.crew.watch())
            evaluating = asyncio.ensure_future(rehearsal.crew.evaluate(PROMPTS))
            await kill(rehearsal.crew.engines["engine-0"])
            await kill(rehearsal.workers["worker-0"])
            await kill(rehearsal.crew.controller)
            evaluation = await evaluating
            assert (evaluation.prompts, evaluation.mean_reward) == (40, 1.0)
            watching.cancel()

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
