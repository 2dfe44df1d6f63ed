"""GenerationActor: one engine of the pool."""

from __future__ import annotations

import ray

from areal_ray.errors import EngineError
from areal_ray.generation.engine import CommitReport, EngineSpec
from areal_ray.generation.vllm import VllmEngine
from areal_ray.types import GenerationRequest, GenerationResult, WeightVersion

MAX_CALLS_AT_ONCE = 4096


@ray.remote(max_concurrency=MAX_CALLS_AT_ONCE)
class GenerationActor:
    def __init__(self, spec: EngineSpec) -> None:
        self._name = spec.name
        self._engine = VllmEngine(spec)

    async def start(self) -> str:
        """Start the engine; returns the address of the node it runs on."""
        await self._engine.start()
        return ray.util.get_node_ip_address()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        with self._naming_the_engine():
            return await self._engine.generate(request)

    async def probe(self) -> None:
        with self._naming_the_engine():
            await self._engine.probe()

    async def stage_weights(self, encoded_update: bytes) -> None:
        with self._naming_the_engine():
            await self._engine.stage_weights(encoded_update)

    async def commit_weights(self, version: WeightVersion) -> CommitReport:
        with self._naming_the_engine():
            return await self._engine.commit_weights(version)

    async def discard_weights(self) -> str:
        with self._naming_the_engine():
            return await self._engine.discard_weights()

    async def close(self) -> None:
        await self._engine.close()

    def _naming_the_engine(self) -> _NamingTheEngine:
        return _NamingTheEngine(self._name)


class _NamingTheEngine:
    """vLLM's errors do not say which of many engines failed: this does."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, EngineError):
            raise EngineError(f"{self._name}: {type(error).__name__}: {error}") from error
