"""The trainer as a run drives it: its start, its steps, its death, and whose turn it is.

Where trainer and engines share devices, all that it computes happens in a turn of its own, which
the engines rest through, and which ends whatever happens in it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ray.actor import ActorHandle, ActorMethod
from ray.exceptions import ActorDiedError, ActorUnavailableError

from areal_ray import logs
from areal_ray.actors.calls import ON_ITS_WAY_BACK, end_process, until_back
from areal_ray.actors.crew_specs import update_timeout_s
from areal_ray.actors.trainer import TrainReport
from areal_ray.config import Config, WarmupConfig
from areal_ray.deadlines import within
from areal_ray.errors import DeadlineExceeded, TrainerLost, described
from areal_ray.restoring import Undo
from areal_ray.training.spec import TrainerStart
from areal_ray.types import Prompt, WeightVersion
from areal_ray.weights.transaction import LostEngine

T = TypeVar("T")


class TrainerCalls:
    def __init__(
        self,
        config: Config,
        trainer: ActorHandle,
        manager: ActorHandle,
        *,
        other_ranks: Sequence[ActorHandle],
        tell: Callable[[TrainerStart], Awaitable[None]],
        shared_gpus: Callable[[], Awaitable[list[str] | None]],
        tell_lost: Callable[[Sequence[LostEngine]], Awaitable[None]],
    ) -> None:
        """`tell` starts the trainer. `shared_gpus`: of the engine that it shares them with, if it
        does. `tell_lost`: engines that could not take their turn."""
        self._config = config
        self._trainer = trainer
        self._manager = manager
        self._other_ranks = other_ranks
        self._tell = tell
        self._shared_gpus = shared_gpus
        self._tell_lost = tell_lost
        self._is_paused = False
        self._pauses = 0

    def note_pause(self, is_paused: bool) -> None:
        """Rollout stands still on purpose: meanwhile a batch may take as long as it likes."""
        self._is_paused = is_paused
        self._pauses += 1

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The devices are the trainer's; afterwards, whatever happened, the engines'."""
        if not self._config.generation.colocated:
            yield
            return
        async with Undo(timeout_s=update_timeout_s(self._config)) as undo:
            undo.later(
                "the end of the trainer's turn",
                lambda: self._change_turns(self._manager.end_trainers_turn),
            )
            await self._change_turns(self._manager.begin_trainers_turn)
            yield

    async def start(self, checkpoint: Path | None, version: WeightVersion) -> None:
        """In its turn. `checkpoint`: what to take up again."""
        start = TrainerStart(
            version=version,
            checkpoint=None if checkpoint is None else str(checkpoint),
            gpus=await self._shared_gpus(),
        )
        try:
            await within(
                self._config.generation.startup_timeout_s,
                self._tell(start),
                who="the trainer",
                doing="start",
            )
        except (ActorUnavailableError, ActorDiedError) as error:
            raise TrainerLost(f"the trainer was lost as it started: {described(error)}") from error

    async def warm_up(self, demonstrations: Sequence[Prompt], warmup: WarmupConfig) -> float:
        """In its turn. Returns the last loss."""
        return await self._ask(
            self._trainer.warm_up.remote(demonstrations, warmup), "the supervised warm-up"
        )

    async def step(self, step: int, version: WeightVersion) -> TrainReport:
        """Wait for a batch that is fresh enough at this version, and learn from it."""
        await self._take_batch(step, version)
        async with self.turn():
            named = self._trainer.train_step.options(name=f"TrainerActor: train step {step}")
            return await self._ask(named.remote(step), f"step {step}")

    async def _take_batch(self, step: int, version: WeightVersion) -> None:
        named = self._trainer.take_batch.options(name=f"TrainerActor: wait for batch {step}")
        while True:
            pauses = self._pauses
            try:
                await self._ask(named.remote(version), f"waiting for the batch of step {step}")
            except DeadlineExceeded:
                if not self._is_paused and self._pauses == pauses:
                    raise
            else:
                return

    async def take_snapshot(self) -> None:
        named = self._trainer.take_snapshot.options(name="TrainerActor: snapshot")
        await self._ask(named.remote(), "a snapshot")

    async def until_there(self) -> None:
        """After its death: Ray brings its process back, if it may. Where there are more ranks, all
        of them begin anew: those that are left may wait for one that is not."""
        ranks = [self._trainer, *self._other_ranks]
        if self._other_ranks:
            ends = (end_process(rank, may_restart=True) for rank in ranks)
            for outcome in await asyncio.gather(*ends, return_exceptions=True):
                if isinstance(outcome, Exception):
                    logs.warning("a rank of the trainer: {}", described(outcome))
        for number, rank in enumerate(ranks):
            await until_back(
                self._config.generation.startup_timeout_s,
                rank.is_there.remote,
                who=f"rank {number} of the trainer",
                doing="coming back as a process",
            )

    async def _change_turns(self, call: ActorMethod) -> None:
        lost = await within(
            update_timeout_s(self._config),
            call.remote(),
            who="the checkpoint engine manager",
            doing="changing turns between trainer and engines",
        )
        if lost:
            await self._tell_lost(lost)

    async def _ask(self, call: Awaitable[T], doing: str) -> T:
        try:
            return await within(
                self._config.trainer.step_timeout_s,
                call,
                who="the trainer",
                doing=f"{doing} (trainer.step_timeout_s)",
            )
        except (*ON_ITS_WAY_BACK, ActorDiedError) as error:
            raise TrainerLost(f"the trainer was lost during {doing}: {described(error)}") from error
