"""GenerationActor: one engine of the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import ray

from areal_ray.errors import EngineError, described
from areal_ray.generation.engine import CommitReport, EngineSpec
from areal_ray.generation.log_tail import last_engine_error
from areal_ray.generation.vllm import VllmEngine
from areal_ray.types import GenerationRequest, GenerationResult, WeightVersion

T = TypeVar("T")


@ray.remote
class GenerationActor:
    def __init__(self, spec: EngineSpec) -> None:
        self._name = spec.name
        self._address = ray.util.get_node_ip_address()
        self._engine = VllmEngine(spec, address=self._address)

    async def start(self) -> str:
        """Start the engine; returns the address of the node it runs on."""
        await self._named(self._engine.start())
        return self._address

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return await self._named(self._engine.generate(request))

    async def probe(self) -> None:
        await self._named(self._engine.probe())

    async def stage_weights(self, encoded_update: bytes) -> None:
        await self._named(self._engine.stage_weights(encoded_update))

    async def commit_weights(self, version: WeightVersion) -> CommitReport:
        return await self._named(self._engine.commit_weights(version))

    async def discard_weights(self) -> str:
        return await self._named(self._engine.discard_weights())

    async def close(self) -> None:
        await self._engine.close()

    async def _named(self, call: Awaitable[T]) -> T:
        """vLLM's errors say neither which of many engines failed nor why: this does."""
        try:
            return await call
        except EngineError:
            raise
        except Exception as error:  # noqa: BLE001 - raised again, as what it means here
            # Not chained: vLLM gives all callers the same object, whose traceback only grows.
            cause = described(error)
            if self._engine.is_dead:
                cause = await asyncio.to_thread(last_engine_error) or cause
            raise EngineError(f"{self._name} failed: {cause}") from None
