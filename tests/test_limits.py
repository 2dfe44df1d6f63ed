"""What a run forgives, what it lets wait, and what ends it: over a real Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from rehearsing import RehearsedCrew, kill, run

from areal_ray.deadlines import within
from areal_ray.errors import (
    FilteredOut,
    GroupTimedOut,
    PoolError,
    TooManyFailures,
    root_cause,
)
from areal_ray.generation.faults import Die
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


def test_filtered_groups_are_replaced_by_others_and_when_none_is_left_the_run_ends(
    rehearse,
) -> None:
    """Every second of the first 80 prompts can be learnt from, then none any more. The first three
    steps take no more than (1 + 3 + 1) * 4 groups of the forty."""
    prompts = [Prompt(text="1+1=", answer=str(2 * n)) for n in range(80)]
    prompts += [Prompt(text="1+1=", answer="1")] * 80

    async def scenario() -> None:
        filtering = {"filter": "unequal_rewards", "samples": 8, "max_filtered_in_a_row": 20}
        async with rehearse(reward=one_for_even, rollout=filtering, prompts=prompts) as rehearsal:
            await rehearsal.steps(3)
            counts = await rehearsal.counts()
            assert counts.filtered >= 3
            assert counts.failed == counts.expired == 0
            conserved = counts.running + counts.accepted + counts.filtered
            assert counts.submitted == conserved
            await rehearsal.steps(40)

    with pytest.raises(FilteredOut, match="none of 21 groups in a row"):
        run(scenario())


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
