"""What it takes to keep engines and workers going: the two kinds of members that pools have."""

from __future__ import annotations

import asyncio
from functools import partial

from ray.actor import ActorHandle

from areal_ray.actors.calls import ASK_TIMEOUT_S, until_back
from areal_ray.actors.checkpoint_engine import EngineMember
from areal_ray.actors.generation import Started
from areal_ray.actors.rollout_worker import WorkerSpec
from areal_ray.deadlines import within
from areal_ray.errors import NotReady, TrainerAway
from areal_ray.observability.loop_health import LoopReport

WORKER_START_TIMEOUT_S = 300.0
PROCESS_TIMEOUT_S = 300.0


class EngineKeeper:
    """An engine is brought up, gets the trainer's weights, and proves itself by a token."""

    what = "engine"

    manager: ActorHandle
    """Who gives an engine its weights."""

    def __init__(
        self,
        *,
        tensor_parallel: int,
        startup_timeout_s: float,
        sync_timeout_s: float,
        is_colocated: bool,
    ) -> None:
        self._tensor_parallel = tensor_parallel
        self._startup_timeout_s = startup_timeout_s
        self._sync_timeout_s = sync_timeout_s
        self._is_colocated = is_colocated
        self._started: dict[str, Started] = {}
        self._has_synced = False
        self.weights_are_there = asyncio.Event()
        """The trainer has weights to give. Until then engines wait before they are synced."""

    def is_process_of(self, name: str, process: str) -> bool:
        """Whether an engine is still, or again, in this process: news of an earlier is stale."""
        return name in self._started and self._started[name].process == process

    async def bring_up(self, name: str, handle: ActorHandle) -> None:
        await _until_there(name, handle)
        if self._is_colocated:
            await within(
                self._sync_timeout_s,
                self.manager.may_start.remote(name),
                who="the trainer",
                doing=f"making room for {name} (trainer.step_timeout_s)",
            )
        self._started[name] = await within(
            self._startup_timeout_s,
            handle.start.remote(),
            who=name,
            doing="its start (generation.startup_timeout_s)",
        )

    async def sync(self, name: str, handle: ActorHandle) -> None:
        await self.weights_are_there.wait()
        started = self._started[name]
        member = EngineMember(
            name=name,
            handle=handle,
            address=started.address,
            process=started.process,
            workers=self._tensor_parallel,
        )
        await until_back(
            self._sync_timeout_s,
            partial(self._sync, member),
            who=name,
            doing="getting the current weights (weights.timeout_s)",
        )
        self._has_synced = True

    async def _sync(self, member: EngineMember) -> None:
        try:
            await self.manager.sync.remote(member)
        except TrainerAway as away:
            # Before the first one has weights, nobody brings a trainer back; and one that shares
            # devices with it must not hold them while it comes.
            if self._is_colocated or not self._has_synced:
                raise
            raise NotReady(f"{member.name} waits for the trainer") from away

    async def prove(self, name: str, handle: ActorHandle) -> LoopReport:
        return await handle.probe.remote()

    async def lost(self, name: str) -> None:
        self._started.pop(name, None)
        await within(
            ASK_TIMEOUT_S,
            self.manager.forget.remote(name),
            who="the checkpoint engine manager",
            doing=f"forgetting {name}",
        )


class WorkerKeeper:
    """A worker has nothing to catch up with: it is told who gives the work."""

    what = "rollout worker"

    spec: WorkerSpec
    queue: ActorHandle
    """What a worker is told. Not arguments of its constructor: those may be gone by the time Ray
    restarts it, and an error in a constructor takes the actor down for good."""

    def __init__(self, controller: ActorHandle) -> None:
        self._controller = controller

    async def bring_up(self, name: str, handle: ActorHandle) -> None:
        await _until_there(name, handle)
        await within(
            WORKER_START_TIMEOUT_S,
            handle.start.remote(self.spec, self.queue, self._controller),
            who=name,
            doing="its start",
        )

    async def sync(self, name: str, handle: ActorHandle) -> None:
        pass

    async def prove(self, name: str, handle: ActorHandle) -> LoopReport:
        return await handle.probe.remote()

    async def lost(self, name: str) -> None:
        pass


async def _until_there(name: str, handle: ActorHandle) -> None:
    """Wait for the process alone, which Ray may be restarting. A death after that is a failed
    start, not a reason to wait on."""
    await until_back(
        PROCESS_TIMEOUT_S, handle.is_there.remote, who=name, doing="coming back as a process"
    )
