"""GenerationActor: one engine of the pool."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable
from typing import TypeVar

import msgspec
import ray

from areal_ray.actors.telemetry import MonitorAddress, Telemetry
from areal_ray.errors import EngineError, WeightUpdateError, described
from areal_ray.generation.engine import CommitReport, EngineSpec
from areal_ray.generation.factory import make_engine
from areal_ray.generation.log_tail import last_engine_error
from areal_ray.generation.simulated import SimulatedSpec
from areal_ray.observability.activity import ActivityMeter
from areal_ray.observability.actor_report import EngineFacts
from areal_ray.observability.loop_health import LoopReport
from areal_ray.observability.timeline import Activity
from areal_ray.priority import step_aside
from areal_ray.types import Completion, GenerationRequest, GenerationResult, WeightVersion

T = TypeVar("T")


class Started(msgspec.Struct, frozen=True):
    """Where an engine runs: the node's address, and the process, which no restart has again."""

    address: str
    process: str


@ray.remote
class GenerationActor:
    def __init__(
        self, spec: EngineSpec | SimulatedSpec, monitor: MonitorAddress | None = None
    ) -> None:
        step_aside()
        self._name = spec.name
        self._address = ray.util.get_node_ip_address()
        self._process = uuid.uuid4().hex
        self._engine = make_engine(spec, address=self._address)
        self._is_up = False
        self._has_weights = False
        self._requests = 0
        self._standing: Activity | None = None
        self._meter = ActivityMeter("waiting for data")
        self._meter.begin("restarting")
        self._telemetry = Telemetry(
            spec.name,
            monitor=monitor,
            facts=self._facts,
            shown=self.__repr__,
            meter=self._meter,
            tokens=lambda: self._engine.generated_tokens,
            devices=1 if isinstance(spec, SimulatedSpec) else spec.tensor_parallel,
        )
        self._telemetry.start()

    def __repr__(self) -> str:
        if not self._is_up:
            return f"GenerationActor[{self._name}]"
        return (
            f"GenerationActor[{self._name} v{self._engine.version} {self._meter.now} "
            f"{self._requests} req]"
        )

    async def is_there(self) -> None:
        """Answers as soon as there is a process."""

    async def start(self) -> Started:
        """Start the engine, unless it runs."""
        if not self._is_up:
            with self._telemetry.span("start"):
                await self._named(self._engine.start())
            self._is_up = True
            self._meter.begin("waiting for weights")
            self._meter.end("restarting")
        return Started(address=self._address, process=self._process)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self._requests += 1
        try:
            with (
                self._meter.during("busy"),
                self._telemetry.span("generate", request.request_id),
            ):
                return await self._named(self._engine.generate(request))
        finally:
            self._requests -= 1

    async def progress(self, known: dict[str, list[int]]) -> dict[str, list[Completion]]:
        return self._engine.progress(known)

    async def probe(self) -> LoopReport:
        await self._named(self._engine.probe())
        return self._telemetry.loop()

    async def stage_weights(self, encoded_update: bytes) -> None:
        with self._telemetry.span("stage"):
            await self._switching(self._engine.stage_weights(encoded_update))

    async def commit_weights(self, version: WeightVersion) -> CommitReport:
        with self._meter.during("paused"), self._telemetry.span("commit", f"v{version}"):
            report = await self._switching(self._engine.commit_weights(version))
        if not self._has_weights:
            self._has_weights = True
            self._meter.end("waiting for weights")
        return report

    async def discard_weights(self) -> str:
        return await self._switching(self._engine.discard_weights())

    async def rest(self) -> None:
        await self._switching(self._engine.rest())

    async def wake(self) -> None:
        await self._switching(self._engine.wake())

    async def gpus(self) -> list[str]:
        """Those that it was given."""
        return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids()["GPU"]]

    async def until_death(self) -> None:
        """Never returns: the call ends with the process, and so tells when that is gone."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        await self._telemetry.close()
        await self._engine.close()

    def _facts(self) -> EngineFacts:
        return EngineFacts(
            version=self._engine.version,
            requests=self._requests,
        )

    async def _switching(self, call: Awaitable[T]) -> T:
        """A step of a change of weights, or of a rest: the engine may stand still after it."""
        try:
            return await self._named(call)
        finally:
            resting, still = self._engine.is_resting, self._engine.stands_still
            standing: Activity | None = "resting" if resting else "paused" if still else None
            if standing != self._standing:
                if self._standing is not None:
                    self._meter.end(self._standing)
                if standing is not None:
                    self._meter.begin(standing)
                self._standing = standing

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
