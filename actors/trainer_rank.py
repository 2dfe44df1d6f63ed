"""One rank of the trainer: its model, and the one thread that computes with it.

The first rank is inside the `TrainerActor`, the others are actors of their own that do what it
asks. What all ranks compute together, all of them must be asked for, and in the same order.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import ray
from ray.exceptions import ActorDiedError, ObjectLostError

from areal_ray.actors.calls import ON_ITS_WAY_BACK
from areal_ray.actors.telemetry import MonitorAddress, Telemetry
from areal_ray.actors.trajectory_queue import Place, read_places
from areal_ray.checkpoints import open_checkpoint
from areal_ray.config import WarmupConfig
from areal_ray.errors import NotReady, TrainerAway, TrainerLost, described
from areal_ray.observability.activity import ActivityMeter
from areal_ray.observability.actor_report import TrainerFacts
from areal_ray.observability.timeline import Activity
from areal_ray.priority import step_aside
from areal_ray.training.spec import RankPlace, StepMetrics, TrainerSpec, TrainerStart
from areal_ray.types import Prompt, TrajectoryGroup, WeightVersion
from areal_ray.weights.update import GroupMember, SendingPlan

if TYPE_CHECKING:  # whoever holds a handle of this actor imports this module, but needs no torch
    from areal_ray.training.state import Snapshot
    from areal_ray.training.trainer import PolicyTrainer
    from areal_ray.weights.sender import Sender

T = TypeVar("T")

GRACE_S = 30.0
"""For the other ranks to end what one has failed in."""


class Rank:
    what = "TrainerRank"

    def __init__(self, name: str, monitor: MonitorAddress | None = None) -> None:
        """What it is told comes with `start`: arguments may be gone by the time Ray calls this
        again."""
        step_aside()
        self._name = name
        self._tokens = 0
        self._is_out = False
        self.meter = ActivityMeter("idle")
        self.meter.begin("restarting")
        self.telemetry = Telemetry(
            name,
            monitor=monitor,
            facts=self._facts,
            shown=self.__repr__,
            meter=self.meter,
            tokens=lambda: self._tokens,
            devices=1,
        )
        self.telemetry.start()
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._trainer: PolicyTrainer | None = None
        self._sender: Sender | None = None
        self._version: WeightVersion = 0
        self._snapshot: Snapshot | None = None
        self._fetched: list[TrajectoryGroup] = []

    async def is_there(self) -> None:
        """Answers as soon as there is a process."""

    async def until_death(self) -> None:
        """Never returns: the call ends with the process, and so tells when that is gone."""
        await asyncio.Event().wait()

    async def start(
        self, spec: TrainerSpec, start: TrainerStart, place: RankPlace | None = None
    ) -> None:
        """`place`: among the other ranks, if there are any."""
        if start.gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(start.gpus)
        trainer = await self._in_thread(lambda: _new_trainer(spec, place))
        if start.checkpoint is not None:
            taken_up = await asyncio.to_thread(open_checkpoint, Path(start.checkpoint))
            await self._in_thread(lambda: trainer.restore(taken_up.trainer))
        if self._trainer is None:
            self.meter.end("restarting")
        # Only now: who asks for weights before must not get others.
        self._trainer, self._version = trainer, start.version

    @property
    def is_started(self) -> bool:
        return self._trainer is not None

    async def warm_up(self, prompts: Sequence[Prompt], warmup: WarmupConfig) -> float:
        """The supervised phase; returns its last loss."""
        trainer = self._started
        return await self._at(
            "busy",
            "warm-up",
            lambda: trainer.warm_up(prompts, steps=warmup.steps, batch=warmup.batch, lr=warmup.lr),
        )

    async def move_in(self) -> None:
        """To the devices that it shares with engines. They have made room."""
        await self._in_thread(self._started.residence.move_in)
        if self._is_out:
            self.meter.end("resting")
        self._is_out = False

    async def move_out(self) -> None:
        """To host memory. Comes when a step that is being computed is done."""
        await self._in_thread(self._started.residence.move_out)
        if not self._is_out:
            self.meter.begin("resting")
        self._is_out = True

    async def train(self, groups: Sequence[TrajectoryGroup]) -> StepMetrics:
        """A step on these groups, of which this rank computes its share."""
        trainer = self._started

        def step() -> StepMetrics:
            metrics = trainer.train_on(groups, self._version)
            self._version += 1
            self._tokens += sum(len(t.response_ids) for g in groups for t in g.trajectories)
            return metrics

        return await self._at("busy", "train", step)

    async def fetch(self, places: Sequence[Place]) -> bool:
        """The groups that lie there, for `train_on_fetched`; whether they could be read."""
        try:
            self._fetched = await read_places(places)
        except ObjectLostError:
            return False
        return True

    async def train_on_fetched(self) -> None:
        groups, self._fetched = self._fetched, []
        await self.train(groups)

    async def sending_plan(self, bucket_bytes: int, timeout_s: float, verify: bool) -> SendingPlan:
        """Open the place where engines join; the weights' names, shapes and order. Comes when a
        step that is being computed is done: engines that wait for weights have a time limit."""
        trainer = self._started

        def make_sender() -> Sender:
            return self._sender or _new_sender(trainer, bucket_bytes, timeout_s, verify)

        self._sender = await self._at("waiting for weights", "sending plan", make_sender)
        return self._sender.plan

    async def send_weights(self, member: GroupMember) -> WeightVersion:
        """Broadcast the weights; returns their version once every member has staged them."""
        sender = self._sender
        if sender is None:
            raise NotReady("the trainer was restarted, and has no sending plan")

        def send() -> WeightVersion:
            sender.send(member)
            return self._version

        return await self._at("waiting for weights", "send weights", send)

    async def gather_along(self) -> None:
        """While the first rank sends what is sharded over all of them."""
        from areal_ray.weights.sender import gather_along

        parameters = self._started.model.named_parameters()
        await self._at("waiting for weights", "gather weights", lambda: gather_along(parameters))

    async def call_off_sending(self, group_id: str) -> None:
        """Not everybody will come to this group: a `send_weights` to it fails at once."""
        if self._sender is not None:
            await asyncio.to_thread(self._sender.call_off, group_id)

    async def take_snapshot(self) -> None:
        """Of all that the trainer is, in host memory, for `write_snapshot`."""
        self._snapshot = await self._at("saving", "snapshot", self._started.snapshot)

    async def write_snapshot(self, directory: str) -> None:
        """This rank's part, while training goes on."""
        taken, self._snapshot = self._snapshot, None
        if taken is None:
            raise NotReady("the trainer was restarted since it took its snapshot")
        with self.telemetry.span("write checkpoint"):
            await asyncio.to_thread(self._started.write, taken, Path(directory))

    async def export(self, directory: str) -> None:
        await self._at("saving", "export", lambda: self._started.export(Path(directory)))

    @property
    def _started(self) -> PolicyTrainer:
        if self._trainer is None:
            raise NotReady("the trainer was restarted, and is not started yet")
        return self._trainer

    def __repr__(self) -> str:
        doing = f" v{self._version} {self.meter.now}" if self.is_started else ""
        return f"{self.what}[{self._name}{doing}]"

    def _facts(self) -> TrainerFacts:
        return TrainerFacts(version=self._version)

    async def _at(self, activity: Activity, span: str, work: Callable[[], T]) -> T:
        with self.meter.during(activity), self.telemetry.span(span):
            return await self._in_thread(work)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """In the one compute thread: torch keeps a pool of helpers for each thread it sees."""
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)


class FirstRank(Rank):
    """It is in the process of the trainer that all others know."""

    what = "TrainerActor"


@ray.remote(max_concurrency=64)
class TrainerRank(Rank):
    """Any rank but the first."""

    async def close(self) -> None:
        await self.telemetry.close()


async def together(first: Awaitable[T], others: Sequence[Awaitable[object]]) -> T:
    """What the first rank gives, once all ranks are through.

    If one fails, the others may wait for it in vain: then, as when one has died, the trainer is
    lost, and all of them have to begin anew.
    """
    if not others:
        return await first
    calls = [asyncio.ensure_future(call) for call in (first, *others)]
    try:
        _, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        _raise_if_dead(calls)
        if waiting:
            _, waiting = await asyncio.wait(waiting, timeout=GRACE_S)
            _raise_if_dead(calls)
        if waiting:
            rank, error = next(iter(_failures(calls).items()))
            raise TrainerLost(
                f"rank {rank} of the trainer failed, and others wait for it: {described(error)}"
            ) from error
        for call in calls:
            call.result()
        return calls[0].result()
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def _failures(calls: Sequence[asyncio.Future[object]]) -> dict[int, BaseException]:
    """By rank."""
    return {
        rank: call.exception()
        for rank, call in enumerate(calls)
        if call.done() and call.exception() is not None
    }


def _raise_if_dead(calls: Sequence[asyncio.Future[object]]) -> None:
    for rank, error in _failures(calls).items():
        if isinstance(error, ON_ITS_WAY_BACK):
            raise TrainerAway(f"rank {rank} of the trainer is away: {described(error)}") from error
        if isinstance(error, ActorDiedError):
            raise TrainerLost(f"rank {rank} of the trainer is lost: {described(error)}") from error


def _new_trainer(spec: TrainerSpec, place: RankPlace | None) -> PolicyTrainer:
    import torch

    from areal_ray.training.ranks import join
    from areal_ray.training.trainer import PolicyTrainer

    if place is None:
        return PolicyTrainer(spec)
    ranks = join(
        place,
        torch.device(spec.device),
        address=ray.util.get_node_ip_address(),
        shards=spec.trainer.sharding == "full",
    )
    return PolicyTrainer(spec, ranks)


def _new_sender(
    trainer: PolicyTrainer, bucket_bytes: int, timeout_s: float, verify: bool
) -> Sender:
    import torch

    from areal_ray.weights.sender import Sender

    return Sender(
        ray.util.get_node_ip_address(),
        trainer.model.named_parameters(),
        dtype=getattr(torch, trainer.dtype),
        bucket_bytes=bucket_bytes,
        timeout_s=timeout_s,
        verify=verify,
    )
