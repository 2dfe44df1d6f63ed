"""GenerationActor: one engine of the pool."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable
from typing import TypeVar

import msgspec
import ray

from areal_ray.errors import EngineError, WeightUpdateError, described
from areal_ray.generation.engine import CommitReport, EngineSpec
from areal_ray.generation.factory import make_engine
from areal_ray.generation.log_tail import last_engine_error
from areal_ray.generation.simulated import SimulatedSpec
from areal_ray.observability.loop_health import LoopHealth, LoopReport
from areal_ray.priority import step_aside
from areal_ray.types import Completion, GenerationRequest, GenerationResult, WeightVersion

T = TypeVar("T")


class Started(msgspec.Struct, frozen=True):
    """Where an engine runs: the node's address, and the process, which no restart has again."""

    address: str
    process: str


@ray.remote
class GenerationActor:
    def __init__(self, spec: EngineSpec | SimulatedSpec) -> None:
        step_aside()
        self._name = spec.name
        self._address = ray.util.get_node_ip_address()
        self._process = uuid.uuid4().hex
        self._engine = make_engine(spec, address=self._address)
        self._is_up = False
        self._loop_health = LoopHealth(who=spec.name)
        self._loop_health.start()

    async def is_there(self) -> None:
        """Answers as soon as there is a process."""

    async def start(self) -> Started:
        """Start the engine, unless it runs."""
        if not self._is_up:
            await self._named(self._engine.start())
            self._is_up = True
        return Started(address=self._address, process=self._process)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return await self._named(self._engine.generate(request))

    async def progress(self, known: dict[str, list[int]]) -> dict[str, list[Completion]]:
        return self._engine.progress(known)

    async def probe(self) -> LoopReport:
        await self._named(self._engine.probe())
        return self._loop_health.report()

    async def stage_weights(self, encoded_update: bytes) -> None:
        await self._named(self._engine.stage_weights(encoded_update))

    async def commit_weights(self, version: WeightVersion) -> CommitReport:
        return await self._named(self._engine.commit_weights(version))

    async def discard_weights(self) -> str:
        return await self._named(self._engine.discard_weights())

    async def rest(self) -> None:
        await self._named(self._engine.rest())

    async def wake(self) -> None:
        await self._named(self._engine.wake())

    async def gpus(self) -> list[str]:
        """Those that it was given."""
        return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids()["GPU"]]

    async def until_death(self) -> None:
        """Never returns: the call ends with the process, and so tells when that is gone."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        self._loop_health.close()
        await self._engine.close()

    async def _named(self, call: Awaitable[T]) -> T:
        """vLLM's errors say neither which of many engines failed nor why: this does."""
        try:
            return await call
        except (EngineError, WeightUpdateError):
            raise
        except Exception as error:  # noqa: BLE001 - raised again, as what it means here
            # Not chained: vLLM gives all callers the same object, whose traceback only grows.
            cause = described(error)
            if self._engine.is_dead:
                cause = await asyncio.to_thread(last_engine_error) or cause
            raise EngineError(f"{self._name} failed: {cause}") from None
