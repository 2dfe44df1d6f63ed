"""RolloutWorker: runs episodes and their rewards, a group at a time, many groups at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
import ray
from ray.actor import ActorHandle

from areal_ray.data.tokenizer import PromptTokenizer
from areal_ray.deadlines import within
from areal_ray.errors import DeadlineExceeded
from areal_ray.plugins import unpack
from areal_ray.rewards import RewardPool
from areal_ray.types import (
    GenerationRequest,
    GenerationResult,
    GroupSummary,
    Prompt,
    Sampling,
    TrajectoryGroup,
)
from areal_ray.workflows import RolloutContext, checked


class WorkerSpec(msgspec.Struct, frozen=True):
    model_path: str
    trust_remote_code: bool
    max_prompt_tokens: int
    packed_workflow: bytes
    packed_reward: bytes
    reward_processes: int
    reward_timeout_s: float
    request_timeout_s: float


@dataclass(frozen=True)
class Assignment:
    """One group to roll out, and the engine that is leased for it."""

    group_id: int
    prompt: Prompt
    samples: int
    sampling: Sampling
    engine: ActorHandle
    engine_name: str


@ray.remote(max_concurrency=4096)
class RolloutWorker:
    def __init__(self, spec: WorkerSpec, queue: ActorHandle) -> None:
        self._spec = spec
        self._queue = queue
        self._handle = ray.get_runtime_context().current_actor
        self._finished: dict[int, TrajectoryGroup] = {}
        self._workflow = unpack(spec.packed_workflow)
        self._rewards = RewardPool(
            spec.packed_reward, processes=spec.reward_processes, timeout_s=spec.reward_timeout_s
        )
        self._tokenizer = PromptTokenizer(
            spec.model_path,
            trust_remote_code=spec.trust_remote_code,
            max_tokens=spec.max_prompt_tokens,
        )

    async def ready(self) -> None:
        """Answers once the worker can take work."""

    async def roll_out(self, assignment: Assignment) -> GroupSummary:
        """Run a group and hand it to the queue; only its summary goes back."""
        group = await self._run(assignment)
        summary = group.summary()
        self._finished[group.group_id] = group
        try:
            await self._queue.put.remote(self._handle, summary)
        finally:
            self._finished.pop(group.group_id, None)
        return summary

    async def hand_over(self, group_id: int) -> tuple[TrajectoryGroup, bool]:
        """Called by the queue, which so becomes the owner of the group."""
        return self._finished.pop(group_id), True

    async def evaluate(self, assignment: Assignment) -> GroupSummary:
        """Run a group whose reward is wanted and nothing else."""
        return (await self._run(assignment)).summary()

    async def close(self) -> None:
        await self._rewards.close()

    async def _run(self, assignment: Assignment) -> TrajectoryGroup:
        async def generate(request: GenerationRequest) -> GenerationResult:
            call = assignment.engine.generate.remote(request)
            try:
                return await within(
                    self._spec.request_timeout_s,
                    call,
                    who=assignment.engine_name,
                    doing=f"generating {request.request_id} (generation.request_timeout_s)",
                )
            except (DeadlineExceeded, asyncio.CancelledError):
                # Giving up the wait does not end the call: the engine is to stop working on it.
                ray.cancel(call)
                raise

        context = RolloutContext(
            group_id=assignment.group_id,
            samples=assignment.samples,
            sampling=assignment.sampling,
            generate=generate,
            tokenizer=self._tokenizer,
            rewards=self._rewards,
        )
        trajectories = checked(await self._workflow(assignment.prompt, context))
        return TrajectoryGroup(
            group_id=assignment.group_id, prompt=assignment.prompt, trajectories=trajectories
        )
