"""CheckpointEngineManager: carries new weights from the trainer to every engine, or to none.

Stage: the trainer broadcasts, every engine receives into a staging copy while it generates.
Commit: once all of them hold everything, each pauses, swaps, stamps and resumes.
Abort: whatever fails before the commit discards the staging copies; the old version serves on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import ray
from ray.actor import ActorHandle

from areal_ray import logs
from areal_ray.deadlines import within
from areal_ray.errors import WeightUpdateError, described
from areal_ray.generation.engine import CommitReport
from areal_ray.observability.loop_health import LoopHealth, LoopReport
from areal_ray.types import WeightVersion
from areal_ray.weights.update import GroupMember, WeightUpdate

ABORT_TIMEOUT_S = 30.0
MAX_ATTEMPTS = 3


@dataclass(frozen=True)
class EngineMember:
    name: str
    handle: ActorHandle
    address: str
    process: str
    workers: int
    """Tensor-parallel workers: each is a member of the group."""


class LostEngine(msgspec.Struct, frozen=True):
    """An engine that did not get an update: its process must not serve any more."""

    name: str
    process: str
    cause: str


class UpdateReport(msgspec.Struct, frozen=True):
    version: WeightVersion
    engines: int
    """How many serve the version now."""
    staged_s: float
    longest_pause_s: float
    lost: list[LostEngine]
    loop: LoopReport


@ray.remote(max_concurrency=64)
class CheckpointEngineManager:
    def __init__(
        self,
        trainer: ActorHandle,
        *,
        backend: Literal["gloo", "nccl"],
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        self._trainer = trainer
        self._engines: dict[str, EngineMember] = {}
        """Those that hold the current weights: an update is for all of them."""
        self._backend = backend
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._groups_made = 0
        self._group_of: tuple[str, ...] = ()
        self._one_at_a_time = asyncio.Lock()
        self._loop_health = LoopHealth(who="the checkpoint engine manager")
        self._loop_health.start()

    async def sync(self, engine: EngineMember) -> None:
        """Give one engine the trainer's weights; from then on it takes part in every update."""
        async with self._one_at_a_time:
            known = self._engines.get(engine.name)
            if known is not None and known.process == engine.process:
                return
            version, _ = await self._stage([engine])
            _, lost = await self._commit([engine], version)
            if lost:
                raise WeightUpdateError(lost[0].cause)
            self._engines[engine.name] = engine

    async def forget(self, name: str) -> None:
        """It takes part no more: it is lost, or has left."""
        self._engines.pop(name, None)

    async def update_weights(self, version: WeightVersion) -> UpdateReport:
        """Carry the trainer's weights to every engine that is there. One that is lost on the way
        is left out, and the others get them; with none left, the next to start will."""
        async with self._one_at_a_time:
            lost: list[LostEngine] = []
            staged_s, staged = await self._stage_on_all(version, lost)
            pauses, not_committed = await self._commit(staged, version)
            lost += not_committed
            for one in not_committed:
                await self.forget(one.name)
            return UpdateReport(
                version=version,
                engines=len(pauses),
                staged_s=staged_s,
                longest_pause_s=max(pauses, default=0.0),
                lost=lost,
                loop=self._loop_health.report(),
            )

    async def _stage_on_all(
        self, version: WeightVersion, lost: list[LostEngine]
    ) -> tuple[float, list[EngineMember]]:
        for _ in range(MAX_ATTEMPTS):
            engines = list(self._engines.values())
            if not engines:
                return 0.0, []
            try:
                sent, staged_s = await self._stage(engines)
            except WeightUpdateError as error:
                failure, broken = error, await self._discard(engines)
                names = [one.name for one in broken]
                logs.warning("{}; out of reach: {}", error, ", ".join(names) or "nobody")
                for name in names:
                    await self.forget(name)
                lost += broken
                continue
            if sent != version:
                await self._discard(engines)
                raise WeightUpdateError(f"the trainer sent version {sent}, expected {version}")
            return staged_s, engines
        raise failure

    async def _stage(self, engines: Sequence[EngineMember]) -> tuple[WeightVersion, float]:
        """Returns the version that was sent, and how long it took."""
        began = time.perf_counter()
        plan = await within(
            self._timeout_s,
            self._trainer.sending_plan.remote(self._bucket_bytes, self._timeout_s),
            who="the trainer",
            doing="preparing to send its weights (weights.timeout_s)",
        )
        sender = GroupMember(
            host=plan.host,
            port=plan.port,
            address=plan.host,
            group_id=self._group_for(engines),
            rank=0,
            world_size=1 + sum(engine.workers for engine in engines),
            backend=self._backend,
            timeout_s=self._timeout_s,
        )
        sending = self._trainer.send_weights.remote(sender)
        calls = {"the trainer": sending}
        rank = 1
        for engine in engines:
            member = msgspec.structs.replace(sender, rank=rank, address=engine.address)
            update = msgspec.msgpack.encode(WeightUpdate(member=member, manifest=plan.manifest))
            calls[engine.name] = engine.handle.stage_weights.remote(update)
            rank += engine.workers
        doing = "staging (weights.timeout_s)"
        try:
            async with asyncio.TaskGroup() as tasks:
                for who, call in calls.items():
                    tasks.create_task(within(self._timeout_s, call, who=who, doing=doing))
        except BaseException as error:
            await self._end_group(sender.group_id, sending)
            if isinstance(error, ExceptionGroup):
                first = error.exceptions[0]
                raise WeightUpdateError(f"weights were not staged: {described(first)}") from first
            raise
        return await sending, time.perf_counter() - began

    async def _end_group(self, group_id: str, sending: Awaitable[object]) -> None:
        """A group that a transfer failed in is never used again: all meet under a new name. The
        trainer is done with it before this returns, so that it can send to the next."""
        self._group_of = ()
        ended = await asyncio.gather(
            within(
                ABORT_TIMEOUT_S,
                self._trainer.call_off_sending.remote(group_id),
                who="the trainer",
                doing=f"calling {group_id} off",
            ),
            within(self._timeout_s, sending, who="the trainer", doing=f"ending {group_id}"),
            return_exceptions=True,
        )
        for outcome in ended:
            if isinstance(outcome, BaseException):
                logs.debug("after a failed transfer: {}", described(outcome))

    def _group_for(self, engines: Sequence[EngineMember]) -> str:
        """The same group as the last time, if it is of the same engines."""
        names = tuple(engine.process for engine in engines)
        if names != self._group_of:
            self._group_of = names
            self._groups_made += 1
        return f"weights-{self._groups_made}"

    async def _commit(
        self, engines: Sequence[EngineMember], version: WeightVersion
    ) -> tuple[list[float], list[LostEngine]]:
        """The pauses of those that did, and those that did not."""
        outcomes = await asyncio.gather(
            *(
                within(
                    self._timeout_s,
                    engine.handle.commit_weights.remote(version),
                    who=engine.name,
                    doing=f"committing version {version} (weights.timeout_s)",
                )
                for engine in engines
            ),
            return_exceptions=True,
        )
        pauses, lost = [], []
        for engine, outcome in zip(engines, outcomes, strict=True):
            if isinstance(outcome, CommitReport):
                pauses.append(outcome.paused_s)
            else:
                cause = f"{engine.name} did not commit version {version}: {described(outcome)}"
                lost.append(LostEngine(engine.name, engine.process, cause))
        return pauses, lost

    async def _discard(self, engines: Sequence[EngineMember]) -> list[LostEngine]:
        """Undo a half-done staging on every engine; returns those that could not."""
        outcomes = await asyncio.gather(
            *(
                within(
                    ABORT_TIMEOUT_S,
                    engine.handle.discard_weights.remote(),
                    who=engine.name,
                    doing="discarding staged weights",
                )
                for engine in engines
            ),
            return_exceptions=True,
        )
        broken = []
        for engine, outcome in zip(engines, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                broken.append(LostEngine(engine.name, engine.process, described(outcome)))
            elif outcome:
                logs.warning("{} after an aborted update: {}", engine.name, outcome)
        return broken
