"""The workbench over a crew in rehearsal: what is asked by hand, beside rollout and training."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import cloudpickle
import pytest
from rehearsing import PROMPTS, RehearsedCrew, kill, zero

from areal_ray.deadlines import within
from areal_ray.errors import DataError, PluginError, RewardError, TooManyFailures, WorkflowError
from areal_ray.observability.run_files import RunFiles
from areal_ray.types import Completion, Prompt, Trajectory
from areal_ray.workbench import Workbench
from areal_ray.workflows import RolloutContext, single_turn

Scenario = Callable[[Workbench], Awaitable[None]]


@pytest.fixture(scope="module")
def at_bench(
    tiny_model: Path, ray_cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Scenario], None]]:
    """One bench for all tests: each finds it paused, with the plainest workflow and reward."""
    directory = tmp_path_factory.mktemp("bench")
    rehearsed = RehearsedCrew(tiny_model, directory, runs_dir=str(directory / "runs"))
    with asyncio.Runner() as runner:
        runner.run(rehearsed.__aenter__())
        bench = runner.run(_bench_of(rehearsed))

        async def live_through(scenario: Scenario) -> None:
            await bench.use(reward=zero, workflow=single_turn)
            await within(120, scenario(bench), who="the test", doing="its work")

        yield lambda scenario: runner.run(live_through(scenario))
        runner.run(bench.close())


async def _bench_of(rehearsed: RehearsedCrew) -> Workbench:
    await rehearsed.crew.try_outs.pause()
    files = await asyncio.to_thread(RunFiles, rehearsed.config)
    ending = contextlib.AsyncExitStack()
    ending.push_async_callback(asyncio.to_thread, files.close)
    ending.push_async_exit(rehearsed)
    bench = Workbench(
        rehearsed.config, rehearsed.crew, rehearsed.task, files, held_out=(), ending=ending
    )
    await bench.status()
    return bench


async def roll_out_until_full(bench: Workbench) -> int:
    """Returns how many groups wait then: batch 4, max_staleness 1, so (1 + 0 + 1) * 4."""
    await bench.crew.try_outs.resume()
    async with asyncio.timeout(60):
        while (await bench.status()).queue.waiting_groups < 8:
            await asyncio.sleep(0.02)
    await bench.crew.try_outs.pause()
    return 8


def one(prompt: Prompt, completion: Completion) -> float:
    return 1.0


def misspelt(prompt: Prompt, completion: Completion) -> float:
    return prompt.anwser


async def lost(prompt: Prompt, context: RolloutContext) -> list[Trajectory]:
    return {}["the user's mistake"]


def by_value(function: Callable) -> Callable:
    """As a function of a cell is sent: other processes can't import this module."""
    cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
    return function


def test_answers_carry_their_tokens_text_logprobs_and_versions(at_bench) -> None:
    async def scenario(bench: Workbench) -> None:
        answers = await bench.ask("17+25=", samples=3)
        assert len(answers) == 3
        for completion, pieces in zip(answers, answers.pieces, strict=True):
            assert len(pieces) == len(completion.token_ids) == len(completion.logprobs)
            assert set(completion.versions) == {0}
        assert answers.engine == "engine-0"

    at_bench(scenario)


def test_a_group_that_is_tried_out_is_scored_and_not_trained_on(at_bench) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.use(reward=by_value(one))
        waiting = await roll_out_until_full(bench)
        before = await bench.status()
        group = await bench.roll_out(PROMPTS[0], samples=3)
        assert group.rewards == [1.0, 1.0, 1.0]
        after = await bench.status()
        assert after.rollout.ledger == before.rollout.ledger
        assert after.queue.waiting_groups == waiting

    at_bench(scenario)


def test_another_reward_has_what_waits_rolled_out_again_by_it(at_bench) -> None:
    async def scenario(bench: Workbench) -> None:
        waiting = await roll_out_until_full(bench)
        before = await bench.status()
        await bench.use(reward=by_value(one))
        await roll_out_until_full(bench)
        after = await bench.status()
        expired = after.rollout.ledger.expired - before.rollout.ledger.expired
        assert expired == waiting
        places = await bench.crew.queue.snapshot.remote()
        chunks = await asyncio.gather(*{place.chunk for place in places.values()})
        rewards = {t.reward for chunk in chunks for group in chunk for t in group.trajectories}
        assert rewards == {1.0}

    at_bench(scenario)


def test_a_failing_reward_or_workflow_tells_where_and_the_bench_goes_on(at_bench) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.use(reward=by_value(misspelt))
        with pytest.raises(RewardError, match="return prompt.anwser") as told:
            await bench.roll_out(PROMPTS[0])
        assert "scorer.py" not in str(told.value)  # the user's own lines, and no others
        await bench.use(reward=zero, workflow=by_value(lost))
        with pytest.raises(WorkflowError, match="the user's mistake") as told:
            await bench.roll_out(PROMPTS[0])
        assert "rollout_worker.py" not in str(told.value)
        assert len(await bench.ask("17+25=")) == 1

    at_bench(scenario)


def test_a_worker_that_dies_comes_back_with_the_reward_in_use(at_bench) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.use(reward=by_value(one))
        await kill(bench.crew.workers["worker-0"])
        assert (await bench.roll_out(PROMPTS[0], samples=1)).rewards == [1.0]

    at_bench(scenario)


def test_what_can_t_be_used_is_refused_at_once(at_bench) -> None:
    async def scenario(bench: Workbench) -> None:
        with pytest.raises(PluginError, match="must take a prompt and a completion"):
            await bench.use(reward=lambda prompt: 0.0)
        with pytest.raises(PluginError, match="must be an async function"):
            await bench.use(workflow=zero)
        with pytest.raises(DataError, match="no held-out prompts"):
            await bench.evaluate()

    at_bench(scenario)


def test_training_that_fails_for_its_reward_can_be_gone_on_with_by_another(at_bench) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.use(reward=by_value(misspelt))
        with pytest.raises(TooManyFailures, match="return prompt.anwser"):
            await bench.train(steps=1)
        assert (await bench.status()).rollout.paused
        await bench.use(reward=by_value(one))
        assert (await bench.roll_out(PROMPTS[0], samples=1)).rewards == [1.0]
        # The interrupted step takes one batch of four, and another waits: all that may start.
        await bench.crew.try_outs.resume()
        async with asyncio.timeout(60):
            while (await bench.status()).rollout.ledger.accepted < 8:
                await asyncio.sleep(0.02)

    at_bench(scenario)
