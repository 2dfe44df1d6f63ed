"""TrainerActor: one rank of the trainer.

It awaits its batches from the queue and answers at any time: all computing happens in one
thread of its own, all writing in another.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
import ray
from ray.actor import ActorHandle

from areal_ray.actors.batches import Batch, Batches
from areal_ray.actors.trajectory_queue import Place, read_places
from areal_ray.checkpoints import open_checkpoint, write_groups
from areal_ray.config import WarmupConfig
from areal_ray.errors import NotReady
from areal_ray.observability.jsonl import JsonlWriter
from areal_ray.observability.loop_health import LoopHealth, LoopReport
from areal_ray.priority import step_aside
from areal_ray.training.spec import StepMetrics, TrainerSpec, TrainerStart
from areal_ray.types import Prompt, TrajectoryGroup, WeightVersion
from areal_ray.weights.update import GroupMember, SendingPlan

if TYPE_CHECKING:  # whoever holds a handle of this actor imports this module, but needs no torch
    from areal_ray.training.state import Snapshot
    from areal_ray.training.trainer import PolicyTrainer
    from areal_ray.weights.sender import Sender

T = TypeVar("T")


class TrainReport(msgspec.Struct, frozen=True):
    """One optimizer step: what it was made of and what it measured."""

    step: int
    mean_reward: float
    mean_response_tokens: float
    mean_staleness: float
    max_staleness: int
    waited_s: float
    """How long the trainer waited for its batch."""
    metrics: StepMetrics
    group_ids: list[int]
    loop: LoopReport
    """Of the trainer's event loop, when it had its batch."""


class RolloutRecord(msgspec.Struct, frozen=True):
    """A line of rollouts.jsonl."""

    step: int
    group: int
    prompt: str
    answer: str | None
    text: str
    reward: float
    finish_reason: str
    prompt_tokens: list[int]
    tokens: list[int]
    versions: list[int]


@ray.remote(max_concurrency=64)
class TrainerActor:
    _spec: TrainerSpec

    def __init__(self) -> None:
        """What it is told comes with `start`: arguments may be gone by the time Ray calls this
        again."""
        step_aside()
        self._batches: Batches | None = None
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._trainer: PolicyTrainer | None = None
        self._rollouts: JsonlWriter[tuple[int, list[TrajectoryGroup]]] | None = None
        self._sender: Sender | None = None
        self._version: WeightVersion = 0
        self._snapshot: Snapshot | None = None
        self._loop_health = LoopHealth(who="the trainer")
        self._loop_health.start()

    async def is_there(self) -> None:
        """Answers as soon as there is a process."""

    async def start(
        self, spec: TrainerSpec, queue: ActorHandle, run_dir: str, start: TrainerStart
    ) -> None:
        self._spec = spec
        if start.gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(start.gpus)
        trainer = await self._in_thread(self._new_trainer)
        if start.checkpoint is not None:
            taken_up = await asyncio.to_thread(open_checkpoint, Path(start.checkpoint))
            await self._in_thread(lambda: trainer.restore(taken_up.trainer))
        # Only now: who asks for weights before must not get others.
        self._trainer, self._version = trainer, start.version
        self._rollouts = await asyncio.to_thread(
            JsonlWriter, Path(run_dir) / "rollouts.jsonl", _rollout_records
        )
        self._batches = Batches(queue, holder="trainer")

    async def warm_up(self, prompts: Sequence[Prompt], warmup: WarmupConfig) -> float:
        """The supervised phase; returns its last loss."""
        trainer = self._started
        return await self._in_thread(
            lambda: trainer.warm_up(prompts, steps=warmup.steps, batch=warmup.batch, lr=warmup.lr)
        )

    async def move_in(self) -> None:
        """To the devices that it shares with engines. They have made room."""
        if self._trainer is not None:
            await self._in_thread(self._trainer.residence.move_in)

    async def move_out(self) -> None:
        """To host memory. Comes when a step that is being computed is done."""
        if self._trainer is not None:
            await self._in_thread(self._trainer.residence.move_out)

    async def take_batch(self, version: WeightVersion) -> None:
        """Wait for the batch that the next step learns from."""
        await self._queued.take(version)

    async def train_step(self, step: int) -> TrainReport:
        """Learn from the batch that was taken, and let it go."""
        batch = self._queued.taken
        try:
            loop = self._loop_health.report()
            report = await self._in_thread(
                lambda: _report(step, batch, self._train(batch.groups), loop)
            )
        except BaseException:
            await self._queued.give_back(batch)
            raise
        await self._queued.done(batch)
        assert self._rollouts is not None
        self._rollouts.write((step, batch.groups))
        return report

    async def queue_restarted(self, incarnation: str) -> list[int]:
        """The queue lost what it held. Returns the groups that are here, and will be used."""
        return [] if self._batches is None else self._batches.queue_restarted(incarnation)

    async def sending_plan(self, bucket_bytes: int, timeout_s: float, verify: bool) -> SendingPlan:
        """Open the place where engines join; the weights' names, shapes and order. Comes when a
        step that is being computed is done: engines that wait for weights have a time limit."""

        def make_sender() -> None:
            self._sender = self._sender or self._new_sender(bucket_bytes, timeout_s, verify)

        await self._in_thread(make_sender)
        return self._sender.plan

    async def send_weights(self, member: GroupMember) -> WeightVersion:
        """Broadcast the weights; returns their version once every member has staged them."""
        return await self._in_thread(lambda: self._send(member))

    async def call_off_sending(self, group_id: str) -> None:
        """Not everybody will come to this group: a `send_weights` to it fails at once."""
        if self._sender is not None:
            await asyncio.to_thread(self._sender.call_off, group_id)

    async def take_snapshot(self) -> None:
        """Of all that the trainer is, in host memory, for `write_snapshot`."""
        self._snapshot = await self._in_thread(self._started.snapshot)

    async def write_snapshot(self, directory: str) -> None:
        """While training goes on."""
        from areal_ray.training import state

        taken, self._snapshot = self._snapshot, None
        assert taken is not None
        await asyncio.to_thread(state.write, taken, Path(directory))

    async def write_groups(self, places: Sequence[Place], path: str) -> None:
        """These groups of the queue, to a file."""
        await asyncio.to_thread(write_groups, Path(path), await read_places(places))

    async def export(self, directory: str) -> None:
        await self._in_thread(lambda: self._started.export(Path(directory)))

    async def finish(self, directory: str) -> None:
        """Export, and see that every rollout is in its file: raises if either is not."""
        await self.export(directory)
        await self.close()

    async def close(self) -> None:
        self._loop_health.close()
        rollouts, self._rollouts = self._rollouts, None
        if rollouts is not None:
            await asyncio.to_thread(rollouts.close)

    @property
    def _queued(self) -> Batches:
        if self._batches is None:
            raise NotReady("the trainer is not started")
        return self._batches

    @property
    def _started(self) -> PolicyTrainer:
        if self._trainer is None:
            raise NotReady("the trainer is not started")
        return self._trainer

    def _new_trainer(self) -> PolicyTrainer:
        from areal_ray.training.trainer import PolicyTrainer

        return PolicyTrainer(self._spec)

    def _new_sender(self, bucket_bytes: int, timeout_s: float, verify: bool) -> Sender:
        import torch

        from areal_ray.weights.sender import Sender

        return Sender(
            ray.util.get_node_ip_address(),
            self._started.model.named_parameters(),
            dtype=getattr(torch, self._spec.dtype),
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            verify=verify,
        )

    def _send(self, member: GroupMember) -> WeightVersion:
        if self._sender is None:
            raise NotReady("the trainer was restarted since it gave its sending plan")
        self._sender.send(member)
        return self._version

    def _train(self, groups: Sequence[TrajectoryGroup]) -> StepMetrics:
        metrics = self._started.train_on(groups, self._version)
        self._version += 1
        return metrics

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """In the one compute thread: torch keeps a pool of helpers for each thread it sees."""
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)


def _report(step: int, batch: Batch, metrics: StepMetrics, loop: LoopReport) -> TrainReport:
    trajectories = [t for group in batch.groups for t in group.trajectories]
    staleness = batch.version - np.concatenate([t.versions[t.response_mask] for t in trajectories])
    return TrainReport(
        step=step,
        mean_reward=float(np.mean([t.reward for t in trajectories])),
        mean_response_tokens=float(np.mean([len(t.response_ids) for t in trajectories])),
        mean_staleness=float(staleness.mean()),
        max_staleness=int(staleness.max()),
        waited_s=batch.waited_s,
        metrics=metrics,
        group_ids=batch.group_ids,
        loop=loop,
    )


def _rollout_records(item: tuple[int, list[TrajectoryGroup]]) -> Iterator[RolloutRecord]:
    step, groups = item
    for group in groups:
        prompt = group.prompt.text
        if prompt is None:
            prompt = "\n".join(f"{m.role}: {m.content}" for m in group.prompt.messages or ())
        for trajectory in group.trajectories:
            yield RolloutRecord(
                step=step,
                group=group.group_id,
                prompt=prompt,
                answer=group.prompt.answer,
                text=trajectory.text,
                reward=trajectory.reward,
                finish_reason=trajectory.finish_reason,
                prompt_tokens=trajectory.prompt_ids.tolist(),
                tokens=trajectory.response_ids.tolist(),
                versions=trajectory.versions.tolist(),
            )
