"""The simplest episode: one prompt, one answer, one reward."""

from __future__ import annotations

from areal_ray.types import Prompt, Trajectory
from areal_ray.workflows.base import RolloutContext


async def single_turn(prompt: Prompt, context: RolloutContext) -> list[Trajectory]:
    prompt_ids = await context.encode(prompt)
    completions = await context.generate(prompt_ids, n=context.samples)
    rewards = await context.score(prompt, completions)
    return [
        Trajectory.single_turn(prompt_ids, completion, reward)
        for completion, reward in zip(completions, rewards, strict=True)
    ]
