"""CheckpointEngineManager: carries new weights from the trainer to every engine, or to none.

Stage: the trainer broadcasts, every engine receives into a staging copy while it generates.
Commit: once all of them hold everything, each pauses, swaps, stamps and resumes.
Abort: whatever fails before the commit discards the staging copies; the old version serves on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Literal

import msgspec
import ray
from ray.actor import ActorHandle

from areal_ray import logs
from areal_ray.deadlines import within
from areal_ray.errors import WeightUpdateError, described
from areal_ray.generation.engine import CommitReport
from areal_ray.types import WeightVersion
from areal_ray.weights.transport import GroupMember
from areal_ray.weights.update import WeightUpdate

DISCARD_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class EngineMember:
    name: str
    handle: ActorHandle
    address: str
    workers: int
    """Tensor-parallel workers: each is a member of the group."""


class UpdateReport(msgspec.Struct, frozen=True):
    version: WeightVersion
    staged_s: float
    longest_pause_s: float


@ray.remote(max_concurrency=64)
class CheckpointEngineManager:
    def __init__(
        self,
        trainer: ActorHandle,
        engines: Sequence[EngineMember],
        *,
        backend: Literal["gloo", "nccl"],
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        self._trainer = trainer
        self._engines = list(engines)
        self._backend = backend
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._aborted_updates = 0
        self._one_at_a_time = asyncio.Lock()

    async def update_weights(self, version: WeightVersion) -> UpdateReport:
        async with self._one_at_a_time:
            began = time.perf_counter()
            async with AsyncExitStack() as undo:
                undo.push_async_callback(self._discard_everywhere)
                await self._stage(version)
                staged_s = time.perf_counter() - began
                undo.pop_all()
            commits = await self._commit(version)
            return UpdateReport(
                version=version,
                staged_s=staged_s,
                longest_pause_s=max(commit.paused_s for commit in commits),
            )

    async def _stage(self, version: WeightVersion) -> None:
        doing = f"staging version {version} (weights.timeout_s)"
        plan = await within(
            self._timeout_s,
            self._trainer.sending_plan.remote(self._bucket_bytes, self._timeout_s),
            who="the trainer",
            doing=doing,
        )
        world_size = 1 + sum(engine.workers for engine in self._engines)
        sender = GroupMember(
            host=plan.host,
            port=plan.port,
            address=plan.host,
            # A group that an update failed in is never used again: all meet under a new name.
            group_id=f"weights-{self._aborted_updates}",
            rank=0,
            world_size=world_size,
            backend=self._backend,
            timeout_s=self._timeout_s,
        )
        calls = {"the trainer": self._trainer.send_weights.remote(sender)}
        rank = 1
        for engine in self._engines:
            member = msgspec.structs.replace(sender, rank=rank, address=engine.address)
            update = msgspec.msgpack.encode(WeightUpdate(member=member, manifest=plan.manifest))
            calls[engine.name] = engine.handle.stage_weights.remote(update)
            rank += engine.workers
        try:
            async with asyncio.TaskGroup() as tasks:
                for who, call in calls.items():
                    tasks.create_task(within(self._timeout_s, call, who=who, doing=doing))
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            raise WeightUpdateError(
                f"version {version} was not staged: {described(first)}"
            ) from first

    async def _commit(self, version: WeightVersion) -> list[CommitReport]:
        outcomes = await asyncio.gather(
            *(
                within(
                    self._timeout_s,
                    engine.handle.commit_weights.remote(version),
                    who=engine.name,
                    doing=f"committing version {version} (weights.timeout_s)",
                )
                for engine in self._engines
            ),
            return_exceptions=True,
        )
        for engine, outcome in zip(self._engines, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise WeightUpdateError(
                    f"{engine.name} did not commit version {version}: {described(outcome)}"
                ) from outcome
        return outcomes

    async def _discard_everywhere(self) -> None:
        """Undo a half-done staging on every engine, past those that can't."""
        self._aborted_updates += 1
        outcomes = await asyncio.gather(
            *(
                within(
                    DISCARD_TIMEOUT_S,
                    engine.handle.discard_weights.remote(),
                    who=engine.name,
                    doing="discarding staged weights",
                )
                for engine in self._engines
            ),
            return_exceptions=True,
        )
        for engine, outcome in zip(self._engines, outcomes, strict=True):
            if outcome:
                logs.warning("{} after an aborted update: {}", engine.name, outcome)
