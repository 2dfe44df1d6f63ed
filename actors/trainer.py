"""TrainerActor: the trainer as all others know it.

It awaits its batches from the queue and answers at any time. The computing is its ranks': the
first is in this process, in a thread of its own; the others, if there are any, do what it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError

from areal_ray.actors.batches import Batch, Batches
from areal_ray.actors.telemetry import MonitorAddress
from areal_ray.actors.trainer_rank import FirstRank, together
from areal_ray.actors.trajectory_queue import Place, read_places
from areal_ray.checkpoints import write_groups
from areal_ray.config import WarmupConfig
from areal_ray.errors import NotReady, TrainerLost, described
from areal_ray.observability.jsonl import JsonlWriter
from areal_ray.observability.loop_health import LoopReport
from areal_ray.observability.records import RolloutRecord
from areal_ray.training.spec import RankPlace, StepMetrics, TrainerSpec, TrainerStart
from areal_ray.types import Prompt, TrajectoryGroup, WeightVersion
from areal_ray.weights.update import GroupMember, SendingPlan

if TYPE_CHECKING:  # whoever holds a handle of this actor imports this module, but needs no torch
    from areal_ray.weights.transport import Rendezvous


class TrainReport(msgspec.Struct, frozen=True):
    """One optimizer step: what it was made of and what it measured."""

    step: int
    mean_reward: float
    mean_response_tokens: float
    mean_staleness: float
    max_staleness: int
    staleness_tokens: list[int]
    """How many tokens were 0, 1, 2 ... versions old."""
    staleness_samples: list[int]
    """The same for samples, by their oldest token."""
    waited_s: float
    """How long the trainer waited for its batch."""
    metrics: StepMetrics
    group_ids: list[int]
    loop: LoopReport
    """Of the trainer's event loop, when it had its batch."""


@ray.remote(max_concurrency=64)
class TrainerActor:
    def __init__(self, monitor: MonitorAddress | None = None) -> None:
        """What it is told comes with `start`: arguments may be gone by the time Ray calls this
        again."""
        self._rank = FirstRank("trainer", monitor)
        self._others: Sequence[ActorHandle] = ()
        self._deaths: list[asyncio.Future[None]] = []
        """Of the other ranks: done when one has died."""
        self._is_sharded = False
        self._meeting: Rendezvous | None = None
        self._batches: Batches | None = None
        self._rollouts: JsonlWriter[tuple[int, list[TrajectoryGroup]]] | None = None

    def __repr__(self) -> str:
        return repr(self._rank)

    async def is_there(self) -> None:
        """Answers as soon as there is a process."""

    async def until_death(self) -> None:
        await self._rank.until_death()

    async def start(
        self,
        spec: TrainerSpec,
        queue: ActorHandle,
        run_dir: str,
        start: TrainerStart,
        others: Sequence[ActorHandle],
    ) -> None:
        """`others`: the ranks but this first one."""
        self._others = others
        self._is_sharded = spec.trainer.sharding == "full"
        places = await asyncio.to_thread(self._places, spec)
        await together(
            self._rank.start(spec, start, places[0]),
            [
                rank.start.remote(spec, start, place)
                for rank, place in zip(others, places[1:], strict=True)
            ],
        )
        self._rollouts = await asyncio.to_thread(
            JsonlWriter, Path(run_dir) / "rollouts.jsonl", _rollout_records
        )
        self._deaths = [asyncio.wrap_future(r.until_death.remote().future()) for r in others]
        reader = self._fetch_elsewhere if others else None
        self._batches = Batches(queue, holder="trainer", read_elsewhere=reader)

    async def warm_up(self, prompts: Sequence[Prompt], warmup: WarmupConfig) -> float:
        """The supervised phase; returns its last loss."""
        return await together(
            self._rank.warm_up(prompts, warmup),
            [rank.warm_up.remote(prompts, warmup) for rank in self._others],
        )

    async def move_in(self) -> None:
        """To the devices that it shares with engines. They have made room."""
        if self._rank.is_started:
            await self._rank.move_in()

    async def move_out(self) -> None:
        """To host memory. Comes when a step that is being computed is done."""
        if self._rank.is_started:
            await self._rank.move_out()

    async def take_batch(self, version: WeightVersion) -> None:
        """Wait for the batch that the next step learns from. No longer than all ranks live: engines
        that get no weights from them might be what the batch waits for."""
        taking = asyncio.ensure_future(self._queued.take(version))
        try:
            with (
                self._rank.meter.during("waiting for data"),
                self._rank.telemetry.span("wait for a batch"),
            ):
                await asyncio.wait({taking, *self._deaths}, return_when=asyncio.FIRST_COMPLETED)
            for rank, death in enumerate(self._deaths, start=1):
                if death.done():
                    error = death.exception()
                    raise TrainerLost(f"rank {rank} of the trainer is lost: {described(error)}")
            taking.result()
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)

    async def train_step(self, step: int) -> TrainReport:
        """Learn from the batch that was taken, and let it go."""
        batch = self._queued.taken
        loop = self._rank.telemetry.loop()
        try:
            metrics = await together(
                self._rank.train(batch.groups),
                [rank.train_on_fetched.remote() for rank in self._others],
            )
            report = await asyncio.to_thread(_report, step, batch, metrics, loop)
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
        return await self._rank.sending_plan(bucket_bytes, timeout_s, verify)

    async def send_weights(self, member: GroupMember) -> WeightVersion:
        return await together(
            self._rank.send_weights(member),
            [rank.gather_along.remote() for rank in self._others if self._is_sharded],
        )

    async def call_off_sending(self, group_id: str) -> None:
        await self._rank.call_off_sending(group_id)

    async def take_snapshot(self) -> None:
        """Of all that the trainer is, in host memory, for `write_snapshot`."""
        await together(
            self._rank.take_snapshot(), [rank.take_snapshot.remote() for rank in self._others]
        )

    async def write_snapshot(self, directory: str) -> None:
        """While training goes on."""
        await together(
            self._rank.write_snapshot(directory),
            [rank.write_snapshot.remote(directory) for rank in self._others],
        )

    async def write_groups(self, places: Sequence[Place], path: str) -> None:
        """These groups of the queue, to a file."""
        await asyncio.to_thread(write_groups, Path(path), await read_places(places))

    async def export(self, directory: str) -> None:
        """The model as it is now, as a Hugging Face directory."""
        await together(
            self._rank.export(directory), [rank.export.remote(directory) for rank in self._others]
        )

    async def finish(self, directory: str) -> None:
        """Export, and see that every rollout is in its file: raises if either is not."""
        await self.export(directory)
        await self._close_rollouts()

    async def close(self) -> None:
        await self._rank.telemetry.close()
        await self._close_rollouts()

    async def _close_rollouts(self) -> None:
        rollouts, self._rollouts = self._rollouts, None
        if rollouts is not None:
            await asyncio.to_thread(rollouts.close)

    async def _fetch_elsewhere(self, places: Sequence[Place]) -> bool:
        try:
            return all(await asyncio.gather(*(rank.fetch.remote(places) for rank in self._others)))
        except (ActorUnavailableError, ActorDiedError) as error:
            raise TrainerLost(f"a rank of the trainer is lost: {described(error)}") from error

    def _places(self, spec: TrainerSpec) -> list[RankPlace | None]:
        """One for each rank, where they meet here; None for one that is alone."""
        if not self._others:
            return [None]
        from areal_ray.weights.transport import Rendezvous

        host = ray.util.get_node_ip_address()
        self._meeting = Rendezvous(host, timeout_s=spec.ranks_timeout_s)
        size = 1 + len(self._others)
        return [
            RankPlace(rank, size, host, self._meeting.port, spec.ranks_timeout_s)
            for rank in range(size)
        ]

    @property
    def _queued(self) -> Batches:
        if self._batches is None:
            raise NotReady("the trainer was restarted, and is not started yet")
        return self._batches


def _report(step: int, batch: Batch, metrics: StepMetrics, loop: LoopReport) -> TrainReport:
    trajectories = [t for group in batch.groups for t in group.trajectories]
    staleness = batch.version - np.concatenate([t.versions[t.response_mask] for t in trajectories])
    oldest = [batch.version - t.oldest_version for t in trajectories]
    return TrainReport(
        step=step,
        mean_reward=float(np.mean([t.reward for t in trajectories])),
        mean_response_tokens=float(np.mean([len(t.response_ids) for t in trajectories])),
        mean_staleness=float(staleness.mean()),
        max_staleness=int(staleness.max()),
        staleness_tokens=np.bincount(np.maximum(staleness, 0)).tolist(),
        staleness_samples=np.bincount(np.maximum(oldest, 0)).tolist(),
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
