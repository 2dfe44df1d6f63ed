"""CheckpointEngineManager: carries new weights from the trainer to every engine, or to none.

The rules of the transaction are `areal_ray.weights.transaction`'s; this gives it a mailbox, and
engines and a trainer that are Ray actors. Everything is awaited.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError

from areal_ray.actors.calls import ON_ITS_WAY_BACK, end_process
from areal_ray.actors.telemetry import MonitorAddress, Telemetry
from areal_ray.errors import TrainerAway, TrainerLost, described
from areal_ray.observability.actor_report import ManagerFacts
from areal_ray.observability.loop_health import LoopReport
from areal_ray.types import WeightVersion
from areal_ray.weights.transaction import Limits, LostEngine, Outcome, WeightUpdates
from areal_ray.weights.turns import Turns
from areal_ray.weights.update import Backend, GroupMember, SendingPlan

T = TypeVar("T")


@dataclass(frozen=True)
class EngineMember:
    name: str
    handle: ActorHandle
    address: str
    process: str
    workers: int

    async def stage(self, encoded_update: bytes) -> None:
        named = self.handle.stage_weights.options(name=f"GenerationActor: stage {self.name}")
        await named.remote(encoded_update)

    async def commit(self, version: WeightVersion) -> float:
        named = self.handle.commit_weights.options(name=f"GenerationActor: commit v{version}")
        return (await named.remote(version)).paused_s

    async def discard(self) -> str:
        return await self.handle.discard_weights.remote()

    async def rest(self) -> None:
        await self.handle.rest.remote()

    async def wake(self) -> None:
        await self.handle.wake.remote()

    async def end(self) -> None:
        await end_process(self.handle, may_restart=True)


class ManagerSpec(msgspec.Struct, frozen=True):
    backend: Backend
    bucket_bytes: int
    verify: bool
    limits: Limits
    start_timeout_s: float
    """For an engine to start and get its weights, where it shares devices with the trainer."""


class UpdateReport(msgspec.Struct, frozen=True):
    outcome: Outcome
    loop: LoopReport


@ray.remote(max_concurrency=64)
class CheckpointEngineManager:
    def __init__(
        self, trainer: ActorHandle, spec: ManagerSpec, monitor: MonitorAddress | None = None
    ) -> None:
        sender = _Trainer(trainer, spec)
        self._updates = WeightUpdates(
            sender,
            backend=spec.backend,
            verify=spec.verify,
            limits=spec.limits,
        )
        self._turns = Turns(
            self._updates,
            sender,
            timeout_s=spec.limits.timeout_s,
            busy_timeout_s=spec.limits.busy_timeout_s,
            start_timeout_s=spec.start_timeout_s,
        )
        self._telemetry = Telemetry(
            "manager",
            monitor=monitor,
            facts=lambda: ManagerFacts(members=len(self._updates.members)),
            shown=self.__repr__,
        )
        self._telemetry.start()

    def __repr__(self) -> str:
        members = len(self._updates.members)
        doing = f"[{members} engines]" if members else ""
        return f"CheckpointEngineManager{doing}"

    async def sync(self, engine: EngineMember) -> None:
        """Give one engine the trainer's weights; from then on it takes part in every update."""
        with self._telemetry.span("sync", engine.name):
            await self._updates.sync(engine)
        self._turns.has_started(engine.name)

    async def forget(self, name: str) -> None:
        """It takes part no more: it is lost, or has left."""
        self._updates.forget(name)
        self._turns.has_started(name)

    async def may_start(self, name: str) -> None:
        """Returns when an engine may take the devices that it shares with the trainer."""
        await self._turns.may_start(name)

    async def begin_trainers_turn(self) -> list[LostEngine]:
        """All engines rest, and the trainer is on the devices that they share."""
        return await self._turns.begin()

    async def end_trainers_turn(self) -> list[LostEngine]:
        """The trainer has left the devices, and all engines are awake."""
        return await self._turns.end()

    async def update_weights(self, version: WeightVersion) -> UpdateReport:
        """Carry the trainer's weights, which are of this version, to every engine that is there."""
        with self._telemetry.span("weight update", f"v{version}"):
            outcome = await self._updates.update(version)
        for lost in outcome.lost:
            self._telemetry.event("warning", lost.cause, who=lost.name)
        return UpdateReport(outcome=outcome, loop=self._telemetry.loop())

    async def close(self) -> None:
        await self._telemetry.close()


class _Trainer:
    """The trainer as a transaction sees it."""

    def __init__(self, handle: ActorHandle, spec: ManagerSpec) -> None:
        self._handle = handle
        self._spec = spec

    async def plan(self) -> SendingPlan:
        spec = self._spec
        return await self._unless_dead(
            self._handle.sending_plan.remote(spec.bucket_bytes, spec.limits.timeout_s, spec.verify)
        )

    async def send(self, member: GroupMember) -> WeightVersion:
        named = self._handle.send_weights.options(name="TrainerActor: send weights")
        return await self._unless_dead(named.remote(member))

    async def move_in(self) -> None:
        await self._unless_dead(self._handle.move_in.remote())

    async def move_out(self) -> None:
        await self._unless_dead(self._handle.move_out.remote())

    async def call_off(self, group_id: str) -> None:
        await self._unless_dead(self._handle.call_off_sending.remote(group_id))

    async def _unless_dead(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except ON_ITS_WAY_BACK as error:
            raise TrainerAway(f"the trainer is away: {described(error)}") from error
        except ActorDiedError as error:
            raise TrainerLost(f"the trainer is lost: {described(error)}") from error
