"""A rehearsal: the whole control plane with engines that are simulated and a trainer that is paced.

Controller, workers, queue, weight updates and every process are the real ones; only what would
take a GPU is played. So the control plane can be tested and measured at the scale of a cluster,
and through faults that a real engine can't be asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import ray
from ray.actor import ActorHandle

from areal_ray.actors.batches import Batches
from areal_ray.actors.telemetry import MonitorAddress, Telemetry
from areal_ray.actors.trajectory_queue import Place, read_places
from areal_ray.checkpoints import write_groups
from areal_ray.errors import NotReady
from areal_ray.generation.simulated import SimulatedSpec
from areal_ray.observability.activity import ActivityMeter
from areal_ray.observability.actor_report import TrainerFacts
from areal_ray.training.spec import TrainerStart
from areal_ray.types import WeightVersion
from areal_ray.weights.layout import WeightManifest
from areal_ray.weights.update import GroupMember, SendingPlan


class Rehearsal(msgspec.Struct, frozen=True):
    engine: SimulatedSpec
    """What each engine is like; its name is replaced."""
    step_s: float
    """How long a training step takes."""


class PacedReport(msgspec.Struct, frozen=True):
    step: int
    group_ids: list[int]
    oldest_version: WeightVersion


@ray.remote(max_concurrency=64)
class PacedTrainer:
    """Takes batches at a steady pace and learns nothing from them."""

    def __init__(self, monitor: MonitorAddress | None = None) -> None:
        self._batches: Batches | None = None
        self._version: WeightVersion = 0
        self._meter = ActivityMeter("idle")
        self._telemetry = Telemetry(
            "trainer",
            monitor=monitor,
            facts=lambda: TrainerFacts(version=self._version),
            shown=lambda: f"PacedTrainer[v{self._version} {self._meter.now}]",
            meter=self._meter,
            devices=1,
        )
        self._telemetry.start()

    async def is_there(self) -> None:
        pass

    async def start(
        self,
        spec: Rehearsal,
        queue: ActorHandle,
        run_dir: str,
        start: TrainerStart,
        others: Sequence[ActorHandle],
    ) -> None:
        self._step_s = spec.step_s
        self._batches = Batches(queue, holder="trainer")
        self._version = start.version

    async def take_snapshot(self) -> None:
        pass

    async def write_snapshot(self, directory: str) -> None:
        await asyncio.to_thread(Path(directory).mkdir)

    async def write_groups(self, places: Sequence[Place], path: str) -> None:
        await asyncio.to_thread(write_groups, Path(path), await read_places(places))

    async def move_in(self) -> None:
        pass

    async def move_out(self) -> None:
        pass

    async def take_batch(self, version: WeightVersion) -> None:
        with self._meter.during("waiting for data"):
            await self._queued.take(version)

    async def train_step(self, step: int) -> PacedReport:
        batch = self._queued.taken
        with self._meter.during("busy"):
            await asyncio.sleep(self._step_s)
        self._version += 1
        await self._queued.done(batch)
        oldest = min(group.summary().oldest_version for group in batch.groups)
        return PacedReport(step=step, group_ids=batch.group_ids, oldest_version=oldest)

    async def queue_restarted(self, incarnation: str) -> list[int]:
        return [] if self._batches is None else self._batches.queue_restarted(incarnation)

    async def sending_plan(self, bucket_bytes: int, timeout_s: float, verify: bool) -> SendingPlan:
        if self._batches is None:
            raise NotReady("the trainer is not started")
        nothing = WeightManifest(tensors=(), bucket_bytes=bucket_bytes)
        return SendingPlan(host="", port=0, manifest=nothing)

    async def send_weights(self, member: GroupMember) -> WeightVersion:
        return self._version

    async def call_off_sending(self, group_id: str) -> None:
        pass

    async def close(self) -> None:
        await self._telemetry.close()

    @property
    def _queued(self) -> Batches:
        if self._batches is None:
            raise NotReady("the trainer is not started")
        return self._batches
