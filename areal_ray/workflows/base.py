"""What a workflow is: an async function from a prompt to the trajectories of its group."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from areal_ray.data.tokenizer import PromptTokenizer
from areal_ray.errors import PluginError, WorkflowError
from areal_ray.plugins import load_function
from areal_ray.rewards import RewardPool
from areal_ray.types import (
    Completion,
    GenerationRequest,
    Prompt,
    Sampling,
    TokenIds,
    Trajectory,
)

Generate = Callable[[GenerationRequest], Awaitable[list[Completion]]]
Span = Callable[[str, str], AbstractContextManager[None]]
T = TypeVar("T")


class OffLoop(Protocol):
    """Runs a function in a thread, beside the event loop."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


class Workflow(Protocol):
    async def __call__(self, prompt: Prompt, context: RolloutContext) -> list[Trajectory]: ...


class RolloutContext:
    """What a workflow works with: an engine, a tokenizer and the reward, for one group."""

    def __init__(
        self,
        *,
        group_id: int,
        samples: int,
        sampling: Sampling,
        generate: Generate,
        tokenizer: PromptTokenizer,
        off_loop: OffLoop,
        rewards: RewardPool,
        span: Span = lambda name, detail: nullcontext(),
    ) -> None:
        self.samples = samples
        self.sampling = sampling
        self._group_id = group_id
        self._generate = generate
        self._tokenizer = tokenizer
        self._off_loop = off_loop
        self._rewards = rewards
        self._span = span
        self._turns = 0

    def span(self, name: str) -> AbstractContextManager[None]:
        """`with context.span("search"):` shows what a workflow does in the run's traces."""
        return self._span(name, f"group {self._group_id}")

    async def encode(self, prompt: Prompt) -> TokenIds:
        return await self._off_loop(lambda: self._tokenizer.encode(prompt))

    async def generate(self, prompt_ids: TokenIds, *, n: int) -> list[Completion]:
        """`n` samples that continue `prompt_ids`, with their text: one call to the engine."""
        request_id = f"group-{self._group_id}-turn-{self._turns}"
        self._turns += 1
        request = GenerationRequest(
            request_id=request_id, prompt_ids=prompt_ids, n=n, sampling=self.sampling
        )
        with self.span("generation"):
            completions = await self._generate(request)
        return await self._off_loop(lambda: self._with_text(completions))

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        with self.span("reward"):
            return await self._rewards.score(prompt, completions)

    def _with_text(self, completions: list[Completion]) -> list[Completion]:
        texts = self._tokenizer.decode([completion.token_ids for completion in completions])
        return [
            msgspec.structs.replace(completion, text=text)
            for completion, text in zip(completions, texts, strict=True)
        ]


def checked(trajectories: object) -> list[Trajectory]:
    """What a workflow gave, if it can be trained on."""
    if not isinstance(trajectories, list) or not trajectories:
        raise WorkflowError(f"a workflow must give a list of trajectories, got {trajectories!r}")
    for one in trajectories:
        if not isinstance(one, Trajectory):
            raise WorkflowError(f"a workflow must give trajectories, got a {type(one).__name__}")
        if problem := _problem_with(one):
            raise WorkflowError(f"a trajectory can't be trained on: {problem}")
    return trajectories


def _problem_with(trajectory: Trajectory) -> str:
    per_token = (trajectory.response_mask, trajectory.logprobs, trajectory.versions)
    if {len(array) for array in per_token} != {len(trajectory.response_ids)}:
        return "response_mask, logprobs and versions must be as long as response_ids"
    if trajectory.finish_reason not in ("stop", "length"):
        return f"it is not finished (finish_reason {trajectory.finish_reason})"
    if not trajectory.response_mask.any():
        return "it holds no token that the policy made"
    if not len(trajectory.prompt_ids):
        return "its prompt is empty"
    if not math.isfinite(trajectory.reward):
        return f"its reward is {trajectory.reward}"
    if not np.isfinite(trajectory.logprobs[trajectory.response_mask]).all():
        return "a logprob is not finite"
    return ""


def load_workflow(spec: str) -> Workflow:
    """A workflow by its name, or the user's own as `file.py:function`."""
    from areal_ray.workflows.single_turn import single_turn

    built_in: dict[str, Workflow] = {"single_turn": single_turn}
    if spec in built_in:
        return built_in[spec]
    if ":" not in spec:
        names = ", ".join(built_in)
        raise PluginError(
            f"rollout.workflow: expected one of {names}, or file.py:function, got {spec}"
        )
    function = load_function(spec)
    if not inspect.iscoroutinefunction(function):
        raise PluginError(f"rollout.workflow: {spec} must be an async function")
    return function
