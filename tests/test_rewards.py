from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from areal_ray.errors import RewardError
from areal_ray.plugins import pack
from areal_ray.rewards import RewardPool
from areal_ray.types import Completion, Prompt

QUESTION = Prompt(text="2+2=", answer="4")


def completion(text: str) -> Completion:
    return Completion(
        token_ids=np.arange(3, dtype=np.int32),
        logprobs=np.zeros(3, dtype=np.float32),
        versions=np.zeros(3, dtype=np.int32),
        finish_reason="stop",
        text=text,
    )


@asynccontextmanager
async def pool_of(reward: Callable, *, timeout_s: float = 20.0) -> AsyncIterator[RewardPool]:
    pool = RewardPool(pack(reward), processes=1, timeout_s=timeout_s)
    try:
        yield pool
    finally:
        await pool.close()


def misbehave(prompt: Prompt, completion: Completion) -> float:
    if completion.text == "raise":
        raise KeyError("no such key")
    if completion.text == "die":
        os._exit(3)
    if completion.text == "hang":
        time.sleep(600)
    if completion.text == "nan":
        return float("nan")
    print("a reward may print")
    return completion.text == prompt.answer


async def test_samples_are_scored_in_order() -> None:
    async with pool_of(misbehave) as pool:
        samples = [completion("4"), completion("5"), completion("4")]
        assert await pool.score(QUESTION, samples) == [1.0, 0.0, 1.0]


async def test_an_async_reward_scores_the_samples_side_by_side() -> None:
    async def slow(prompt: Prompt, completion: Completion) -> float:
        await asyncio.sleep(0.2)
        return len(completion.token_ids)

    async with pool_of(slow, timeout_s=3.0) as pool:
        # One after the other, 50 samples would take 10 s, past the limit.
        assert await pool.score(QUESTION, [completion("4")] * 50) == [3.0] * 50


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise", "KeyError: 'no such key'"),
        ("die", "the process that runs the reward function died \\(exit code 3\\)"),
        ("nan", "a reward must be a finite number, got nan"),
    ],
)
async def test_a_failure_is_typed_and_the_next_group_is_scored(text: str, message: str) -> None:
    async with pool_of(misbehave) as pool:
        with pytest.raises(RewardError, match=message):
            await pool.score(QUESTION, [completion(text)])
        assert await pool.score(QUESTION, [completion("4")]) == [1.0]


async def test_a_reward_that_hangs_is_killed_and_replaced() -> None:
    async with pool_of(misbehave, timeout_s=1.0) as pool:
        with pytest.raises(RewardError, match=r"\(reward.timeout_s\) within 1 s"):
            await pool.score(QUESTION, [completion("hang")])
        assert await pool.score(QUESTION, [completion("4")]) == [1.0]


async def test_a_cancelled_group_gives_its_process_back() -> None:
    async with pool_of(misbehave) as pool:
        hanging = asyncio.create_task(pool.score(QUESTION, [completion("hang")]))
        while not pool._started:
            await asyncio.sleep(0.01)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert await pool.score(QUESTION, [completion("4")]) == [1.0]
