"""A trainer and simulated engines in one process: real weight updates over real gloo, with a trap
at any step of the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, get_args

import torch

from areal_ray.errors import EngineError, TrainerLost, WeightUpdateError
from areal_ray.generation.faults import RestStep, Step
from areal_ray.generation.simulated import SimulatedEngine, SimulatedSpec
from areal_ray.types import WeightVersion
from areal_ray.weights.receiver import StagingReceiver
from areal_ray.weights.sender import Sender
from areal_ray.weights.transaction import Limits, WeightUpdates
from areal_ray.weights.transport import Transport, join
from areal_ray.weights.update import GroupMember, SendingPlan, StagingMode

How = Literal["raise", "hang", "die", "cancel"]
When = Literal["before", "after"]

PATIENT = Limits(timeout_s=30.0, busy_timeout_s=30.0, restore_timeout_s=30.0, max_failures=1)
TENSORS = {"embed": (40, 8), "norm": (8,), "up": (16, 8)}
BUCKET_BYTES = 1024


class Trap:
    """Strikes once, the first time that its point is reached."""

    def __init__(self, point: str, when: When, how: How) -> None:
        self._point, self._when, self._how = point, when, how
        self._release = threading.Event()
        self._lock = threading.Lock()
        self.has_struck = False
        self.cancel: Callable[[], object]
        self.die: dict[str, Callable[[], None]] = {}

    def release(self) -> None:
        """What hangs goes on: so it is with anything that hangs in a group, in the end."""
        self._release.set()

    async def around(self, point: str, work: Callable[[], object]) -> object:
        await self._spring(point, "before")
        result = await work()
        await self._spring(point, "after")
        return result

    def around_blocking(self, point: str, work: Callable[[], object]) -> object:
        self._spring_blocking(point, "before")
        result = work()
        self._spring_blocking(point, "after")
        return result

    async def _spring(self, point: str, when: When) -> None:
        if self._is_for(point, when):
            if self._how == "hang":
                await asyncio.Event().wait()
            self._act(point)
            await asyncio.sleep(0)

    def _spring_blocking(self, point: str, when: When) -> None:
        if self._is_for(point, when):
            if self._how == "hang":
                self._release.wait()
            self._act(point)

    def _is_for(self, point: str, when: When) -> bool:
        with self._lock:
            if self.has_struck or (point, when) != (self._point, self._when):
                return False
            self.has_struck = True
            return True

    def _act(self, point: str) -> None:
        if self._how == "cancel":
            self.cancel()
            return
        if self._how == "die":
            self.die[point.partition(".")[0]]()
        raise EngineError(f"{point} failed, as it was told to")


class TrappedTransport:
    def __init__(self, inner: Transport, who: str, trap: Trap) -> None:
        self._inner = inner
        self._who, self._trap = who, trap
        self._sent = 0
        self.member = inner.member

    def broadcast(self, buffer: torch.Tensor) -> torch.distributed.Work:
        self._sent += 1
        point = f"{self._who}.broadcast {self._sent}"
        return self._trap.around_blocking(point, lambda: self._inner.broadcast(buffer))

    def acknowledge(self, device: torch.device, *, is_right: bool) -> bool:
        self._sent = 0
        return self._trap.around_blocking(
            f"{self._who}.acknowledge",
            lambda: self._inner.acknowledge(device, is_right=is_right),
        )

    def close(self) -> None:
        self._inner.close()

    def interrupt(self) -> None:
        self._inner.interrupt()


class TrappedTrainer:
    def __init__(self, trap: Trap) -> None:
        self._trap = trap
        self.version: WeightVersion = 0
        self.is_in = False
        self._parameters = [(name, torch.zeros(shape)) for name, shape in TENSORS.items()]
        self._begin()

    def _begin(self) -> None:
        self._is_dead = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._sender = Sender(
            "127.0.0.1",
            self._parameters,
            dtype=torch.float32,
            bucket_bytes=BUCKET_BYTES,
            timeout_s=PATIENT.timeout_s,
            verify=True,
            join=self._join,
        )

    def _join(self, member: GroupMember, store: torch.distributed.Store) -> Transport:
        joined = self._trap.around_blocking("trainer.join", lambda: join(member, store))
        return TrappedTransport(joined, "trainer", self._trap)

    def train(self) -> None:
        self.version += 1
        for number, (_, tensor) in enumerate(self._parameters):
            tensor.copy_(weights(self.version, number, tensor.shape))

    def die(self) -> None:
        self._is_dead = True
        self._sender._hang_up()

    def restart_if_dead(self) -> None:
        if self._is_dead:
            self.close()
            self._begin()

    def close(self) -> None:
        self._thread.shutdown(wait=False)
        self._sender._hang_up()

    async def plan(self) -> SendingPlan:
        return await self._call("plan", self._plan)

    async def send(self, member: GroupMember) -> WeightVersion:
        return await self._call("send", lambda: self._in_thread(lambda: self._send(member)))

    async def call_off(self, group_id: str) -> None:
        off = self._sender.call_off
        await self._call("call_off", lambda: asyncio.to_thread(off, group_id))

    async def move_in(self) -> None:
        await self._call("move_in", lambda: self._move(is_in=True))

    async def move_out(self) -> None:
        await self._call("move_out", lambda: self._move(is_in=False))

    async def _move(self, *, is_in: bool) -> None:
        self.is_in = is_in

    async def _plan(self) -> SendingPlan:
        return self._sender.plan

    def _send(self, member: GroupMember) -> WeightVersion:
        self._sender.send(member)
        return self.version

    async def _in_thread(self, work: Callable[[], object]) -> object:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _call(self, name: str, work: Callable[[], object]) -> object:
        self._refuse_if_dead()
        try:
            result = await self._trap.around(f"trainer.{name}", work)
        finally:
            self._refuse_if_dead()
        return result

    def _refuse_if_dead(self) -> None:
        if self._is_dead:
            raise TrainerLost("the trainer is dead")


class TrappedEngine:
    """An engine as a transaction sees it, with a trap at each call and each step within."""

    address = "127.0.0.1"
    workers = 1

    def __init__(
        self, name: str, incarnation: int, trap: Trap, *, staging: StagingMode, release_kv: bool
    ) -> None:
        self.name = name
        self.process = f"{name} {incarnation}"
        self._trap = trap
        self._transport: Transport | None = None
        self.engine = SimulatedEngine(
            SimulatedSpec(
                name=name,
                tokens_per_s=1000.0,
                first_token_s=0.001,
                mean_tokens=5.0,
                vocabulary=8,
                staging=staging,
                release_kv_cache=release_kv,
                restore_timeout_s=1.0,
            )
        )
        held = self.engine.weights
        held.receiver = StagingReceiver(torch.device("cpu"), held._make_staging, join=self._join)
        for step in get_args(Step) + get_args(RestStep):
            self._trap_step(step)

    def _trap_step(self, step: str) -> None:
        held = self.engine.weights
        do = getattr(held, step)
        point = f"{self.name}.{step}"
        setattr(held, step, lambda *args: self._trap.around(point, lambda: do(*args)))

    def _join(self, member: GroupMember) -> Transport:
        joined = self._trap.around_blocking(f"{self.name}.join", lambda: join(member))
        self._transport = TrappedTransport(joined, self.name, self._trap)
        return self._transport

    def die(self) -> None:
        self.engine._lose("died")
        if self._transport is not None:
            self._transport.close()

    async def stage(self, encoded_update: bytes) -> None:
        await self._call("stage", lambda: self.engine.stage_weights(encoded_update))

    async def commit(self, version: WeightVersion) -> float:
        report = await self._call("commit", lambda: self.engine.commit_weights(version))
        return report.paused_s

    async def discard(self) -> str:
        return await self._call("discard", self.engine.discard_weights)

    async def rest(self) -> None:
        await self._call("rest", self.engine.rest)

    async def wake(self) -> None:
        await self._call("wake", self.engine.wake)

    async def end(self) -> None:
        self.die()

    async def _call(self, name: str, work: Callable[[], object]) -> object:
        return await self._trap.around(f"{self.name}.{name}", work)


class Fleet:
    def __init__(
        self, trap: Trap, *, engines: int, limits: Limits, staging: StagingMode, release_kv: bool
    ) -> None:
        self._trap = trap
        self._modes = {"staging": staging, "release_kv": release_kv}
        self.trainer = TrappedTrainer(trap)
        trap.die["trainer"] = self.trainer.die
        self.updates = WeightUpdates(self.trainer, backend="gloo", verify=True, limits=PATIENT)
        self._limits = limits
        self.engines: dict[str, TrappedEngine] = {}
        self._made = 0
        self._names = [f"engine-{index}" for index in range(engines)]

    async def start(self) -> None:
        """All serve, and have a group that the next update uses again."""
        for name in self._names:
            # Known from the start: the update below brings all of them to one version.
            self.updates._members[name] = await self._new_engine(name)
        self._set_limits(self._limits)
        self.trainer.train()
        while True:
            try:
                await self.updates.update(self.trainer.version)
            except WeightUpdateError:  # on a busy machine the short limits may be too short
                continue
            return

    def be_patient(self) -> None:
        self._set_limits(PATIENT)

    def _set_limits(self, limits: Limits) -> None:
        """The limits are a group's own: with others, all meet in a new one."""
        self.updates._limits = limits
        self.updates._group_of = ()

    async def replace(self, name: str) -> None:
        """As the pool does with a lost engine: forget it, start another, give it the weights."""
        self.updates.forget(name)
        self.engines[name].die()
        await self.updates.sync(await self._new_engine(name))

    async def _new_engine(self, name: str) -> TrappedEngine:
        self._made += 1
        engine = TrappedEngine(name, self._made, self._trap, **self._modes)
        self._trap.die[name] = engine.die
        self.engines[name] = engine
        await engine.engine.start()
        return engine

    def served(self) -> dict[str, WeightVersion]:
        """The version of each engine that takes part, proved by its weights."""
        found = {}
        for name in self.updates.members:
            held = self.engines[name].engine.weights
            assert not held.is_paused, f"{name} is paused"
            assert not held.is_asleep, f"{name} is asleep"
            assert not held.is_kv_released, f"{name} has no KV cache"
            for number, (tensor_name, shape) in enumerate(TENSORS.items()):
                expected = weights(held.version, number, torch.Size(shape))
                assert torch.equal(held.tensors[tensor_name], expected), (name, tensor_name)
            found[name] = held.version
        return found

    async def close(self) -> None:
        for engine in self.engines.values():
            engine.die()
        self.trainer.close()


def weights(version: int, number: int, shape: torch.Size) -> torch.Tensor:
    """What a tensor holds in a version: nothing of another version, and no two tensors alike."""
    if version == 0:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(1000 * version + number)
    return torch.randn(shape, generator=generator)


def descriptors() -> set[tuple[str, str]]:
    """All that this process has open: numbers, and what they lead to."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found
