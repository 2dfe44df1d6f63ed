"""The actors of one run: made, named, and ended together.

A name tells the runs of a cluster apart, and a namespace keeps them apart: no other run has it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import ray
from ray.actor import ActorHandle

from areal_ray import logs
from areal_ray.actors.checkpoint_engine import CheckpointEngineManager
from areal_ray.actors.crew_specs import (
    controller_spec,
    engine_name,
    engine_spec,
    manager_spec,
    monitor_spec,
    window_of,
)
from areal_ray.actors.generation import GenerationActor
from areal_ray.actors.rehearsal import PacedTrainer, Rehearsal
from areal_ray.actors.rollout_controller import RolloutController
from areal_ray.actors.rollout_worker import RolloutWorker
from areal_ray.actors.run_monitor import RunMonitor
from areal_ray.actors.telemetry import MonitorAddress
from areal_ray.actors.trainer import TrainerActor
from areal_ray.actors.trainer_rank import TrainerRank
from areal_ray.actors.trajectory_queue import TrajectoryQueue
from areal_ray.config import Config
from areal_ray.deadlines import within
from areal_ray.observability.run_status import ActorSpans
from areal_ray.placement import Reservation, Slot

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0
"""For each of the rounds in which actors are asked to let go: then they are ended."""
NAMESPACE = "areal_ray/"
"""How the namespaces of runs begin."""
MONITOR = "monitor"
MAX_CONTROL_RESTARTS = 16
"""Of the controller, of the queue and of the monitor, each: beyond that, something kills them on
purpose."""


@dataclass(frozen=True)
class _Engine:
    handle: ActorHandle
    seat: Reservation | None
    """Its own place in the cluster, if it joined later."""


class CrewMembers:
    def __init__(
        self,
        config: Config,
        *,
        model_path: str,
        run_dir: Path,
        seats: Reservation,
        rehearsal: Rehearsal | None,
    ) -> None:
        """None of them does anything yet."""
        self._config = config
        self._model_path = model_path
        self._rehearsal = rehearsal
        self._namespace = f"{NAMESPACE}{run_dir.name}/{uuid.uuid4().hex[:8]}"
        self._engines_made = 0
        self._engines: dict[str, _Engine] = {}
        self.run = run_dir.name
        self.monitor: ActorHandle | None = None
        self.monitor_address: MonitorAddress | None = None
        if config.observability.telemetry:
            self.monitor_address = MonitorAddress(f"{self.run}/{MONITOR}", self._namespace)
            self.monitor = RunMonitor.options(
                **self._named(MONITOR), num_cpus=0, max_restarts=MAX_CONTROL_RESTARTS
            ).remote(monitor_spec(config, run_dir))
        self.queue = self._make_queue()
        self.trainer, *self.other_ranks = self._make_trainer(seats.slots("trainer"))
        self.manager = CheckpointEngineManager.options(**self._named("manager"), num_cpus=0).remote(
            self.trainer, manager_spec(config), self.monitor_address
        )
        self.workers = {
            name: RolloutWorker.options(
                **self._named(name),
                num_cpus=0,
                max_concurrency=self._calls_at_once,
                max_restarts=-1,
            ).remote(name, self.monitor_address)
            for name in (f"worker-{index}" for index in range(config.rollout.workers))
        }
        self.controller = RolloutController.options(
            **self._named("controller"),
            num_cpus=0,
            max_concurrency=self._calls_at_once,
            max_restarts=MAX_CONTROL_RESTARTS,
        ).remote(controller_spec(config, run_dir), self.monitor_address)
        # Last: Ray starts processes one after the other, and there may be many of these.
        for slot in seats.slots("engine"):
            self.add_engine(slot)

    @property
    def engines(self) -> dict[str, ActorHandle]:
        return {name: engine.handle for name, engine in self._engines.items()}

    def add_engine(self, slot: Slot, seat: Reservation | None = None) -> None:
        """`seat`: given back when it leaves."""
        index, self._engines_made = self._engines_made, self._engines_made + 1
        name = engine_name(index)
        if self._rehearsal is None:
            spec = engine_spec(self._config, index, self._model_path)
        else:
            spec = msgspec.structs.replace(self._rehearsal.engine, name=name)
        handle = GenerationActor.options(
            **self._named(name),
            max_concurrency=self._calls_at_once,
            max_restarts=-1,
            **vars(slot),
        ).remote(spec, self.monitor_address)
        self._engines[name] = _Engine(handle, seat)

    async def remove_engine(self, name: str) -> None:
        """Nobody uses it any more."""
        engine = self._engines.pop(name)
        await _closed(engine.handle.close.remote())
        await asyncio.to_thread(ray.kill, engine.handle)
        if engine.seat is not None:
            await asyncio.to_thread(engine.seat.release)
        if self.monitor is not None:
            await _closed(self.monitor.forget.remote(name))

    async def close(self) -> list[ActorSpans]:
        """Ask all to let go of what they hold; then end them, whether they did or not. Returns what
        they have done at the end."""
        # First, or it would mend what is being taken apart.
        await _closed(self.controller.close.remote())
        try:
            others = (*self.engines.values(), *self.workers.values(), *self.other_ranks)
            await _closed(
                *(one.close.remote() for one in (self.trainer, self.manager, *others)),
                self.queue.end.remote(),
            )
            if self.monitor is None:
                return []
            # Last: it hears the others' last words.
            told = await _closed(self.monitor.close.remote())
            return told[0] if told else []
        finally:
            self.kill()

    def kill(self) -> None:
        control = [self.controller, self.manager, self.queue]
        if self.monitor is not None:
            control.append(self.monitor)
        ranks = (self.trainer, *self.other_ranks)
        for actor in (*control, *ranks, *self.engines.values(), *self.workers.values()):
            ray.kill(actor)
        for engine in self._engines.values():
            if engine.seat is not None:
                engine.seat.release()

    def _make_queue(self) -> ActorHandle:
        rollout, batch = self._config.rollout, self._config.trainer.groups_per_step
        return TrajectoryQueue.options(
            **self._named("queue"),
            num_cpus=0,
            max_concurrency=self._calls_at_once,
            max_restarts=MAX_CONTROL_RESTARTS,
        ).remote(
            batch=batch,
            # One batch in training and as many as may wait: the ledger's bound, kept here too.
            max_groups=(rollout.max_staleness + 2) * batch,
            max_bytes=int(rollout.max_queue_gib * 2**30),
            max_staleness=rollout.max_staleness,
            window=window_of(rollout),
            monitor=self.monitor_address,
        )

    def _make_trainer(self, slots: list[Slot]) -> list[ActorHandle]:
        """All its ranks, the first first."""
        first, *others = slots
        trainer = TrainerActor if self._rehearsal is None else PacedTrainer
        # None, if there is nothing that it could go on from. How often it may, the session counts.
        max_restarts = -1 if self._config.checkpoint.every else 0
        ranks = [
            trainer.options(
                **self._named("trainer"), max_restarts=max_restarts, **vars(first)
            ).remote(self.monitor_address)
        ]
        for rank, slot in enumerate(others, start=1):
            name = f"trainer-{rank}"
            made = TrainerRank.options(
                **self._named(name), max_restarts=max_restarts, **vars(slot)
            ).remote(name, self.monitor_address)
            ranks.append(made)
        return ranks

    @property
    def _calls_at_once(self) -> int:
        """Each group in flight may need a second call to its worker, the queue's for the finished
        group; and a probe or a commit must not wait behind all of them."""
        return 1024 + 2 * self._config.rollout.max_concurrent_groups

    def _named(self, name: str) -> dict[str, str]:
        return {"name": f"{self.run}/{name}", "namespace": self._namespace}


async def _closed(*calls: Awaitable[T]) -> list[T]:
    """All of them have ended, or their time has. Returns what came of those that did not fail."""
    outcomes = await asyncio.gather(
        *(within(CLOSE_TIMEOUT_S, call, who="an actor", doing="its shutdown") for call in calls),
        return_exceptions=True,
    )
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            logs.debug("while closing: {}", outcome)
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
