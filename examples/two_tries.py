"""An episode of two turns: whoever was wrong reads the problem once more, and answers again.

    python examples/two_tries.py                                    or, on a running cluster,
    ray job submit --working-dir examples -- python two_tries.py    or, without this script's end,
    areal-ray train examples/arithmetic.yaml rollout.workflow=two_tries.py:two_tries \\
        data.max_prompt_tokens=24

Model, data and reward are those of arithmetic.py. A right answer at the second try counts half.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np

import areal_ray
from areal_ray import Completion, Prompt, RolloutContext, Trajectory
from areal_ray.types import NOT_GENERATED, TokenIds

WORTH_OF_A_SECOND_TRY = 0.5


async def two_tries(prompt: Prompt, context: RolloutContext) -> list[Trajectory]:
    prompt_ids = await context.encode(prompt)
    first_tries = await context.generate(prompt_ids, n=context.samples)
    rewards = await context.score(prompt, first_tries)

    async def episode(first: Completion, reward: float) -> Trajectory:
        if reward > 0:
            return Trajectory.single_turn(prompt_ids, first, reward)
        return await second_try(prompt, prompt_ids, first, context)

    async with asyncio.TaskGroup() as tasks:
        episodes = [
            tasks.create_task(episode(first, reward))
            for first, reward in zip(first_tries, rewards, strict=True)
        ]
    return [task.result() for task in episodes]


async def second_try(
    prompt: Prompt, prompt_ids: TokenIds, first: Completion, context: RolloutContext
) -> Trajectory:
    with context.span("second try"):
        asked_again = np.concatenate([prompt_ids, first.token_ids, prompt_ids])
        (second,) = await context.generate(asked_again, n=1)
        (reward,) = await context.score(prompt, [second])
    response = Completion.joined([first, read(prompt_ids), second])
    return Trajectory(
        prompt_ids=prompt_ids,
        response_ids=response.token_ids,
        response_mask=response.versions != NOT_GENERATED,
        logprobs=response.logprobs,
        versions=response.versions,
        reward=WORTH_OF_A_SECOND_TRY * reward,
        finish_reason=response.finish_reason,
        text=f"{first.text} {prompt.text}{second.text}",
    )


def read(token_ids: TokenIds) -> Completion:
    """A turn that the model did not write but read: context, from which it does not learn."""
    return Completion(
        token_ids=token_ids,
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
        versions=np.full(len(token_ids), NOT_GENERATED, dtype=np.int32),
        finish_reason=None,
    )


if __name__ == "__main__":
    # Room for the problem, an answer and the problem again, before the second answer.
    own = ["name=two-tries", "data.max_prompt_tokens=24"]
    config = areal_ray.load_config(
        Path(__file__).with_name("arithmetic.yaml"), [*own, *sys.argv[1:]]
    )
    result = areal_ray.train(config, workflow=two_tries)
    print(result.summary())
    sys.exit(result.exit_code)
