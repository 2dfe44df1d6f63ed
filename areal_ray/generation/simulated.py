"""A simulated engine: chosen latencies, token rates and faults, for tests of all that is around it.

Nothing runs per token. An engine has a clock of its own, which a fault slows and a commit stops;
on it, the moment of every token is fixed when its request comes. So one timer ends a request,
and how much of it is made by now, and under which weights, is arithmetic: exact, at any scale.

The tokens of a sample follow from the seed, the prompt and the sample's index alone, whichever
engine makes them and however often it moves: a continued sample can be compared with one that
was never interrupted.

Example: first_token_s 0.5, tokens_per_s 8. A request that comes at 10 s makes tokens at 10.5,
10.625, 10.75 ... A commit at 10.7 with a pause of 1 s comes after two of them; the third is made
at 11.75, by the new weights.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

from areal_ray.errors import EngineError, EngineNotServing
from areal_ray.generation.engine import CommitReport
from areal_ray.generation.faults import (
    Die,
    FailRequest,
    FailStart,
    FailStep,
    Fault,
    FaultPlan,
    RestStep,
    Slow,
    SpoilResult,
    Step,
    Wedge,
)
from areal_ray.generation.paced_clock import Clock, PacedClock, Timer
from areal_ray.generation.simulated_tokens import SimulatedGeneration
from areal_ray.generation.simulated_weights import SimulatedWeights
from areal_ray.generation.weight_switch import WeightSwitch
from areal_ray.types import Completion, GenerationRequest, GenerationResult, WeightVersion
from areal_ray.weights.update import StagingMode


class SimulatedSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How one simulated engine behaves. Engines with the same seed make the same tokens."""

    name: str
    seed: int = 0
    tokens_per_s: float
    """Of each sample."""
    first_token_s: float
    mean_tokens: float
    """The mean length of a sample, before the limit: lengths are geometrically distributed."""
    vocabulary: int
    """More than the samples of any request."""
    start_s: float = 0.0
    commit_pause_s: float = 0.0
    """How long generation stands still for a swap."""
    staging: StagingMode = "device"
    release_kv_cache: bool = False
    restore_timeout_s: float = 10.0
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        for field, least in (("tokens_per_s", 0), ("first_token_s", 0), ("mean_tokens", 1)):
            if not getattr(self, field) > least:
                raise ValueError(f"{field}: expected more than {least}, got {getattr(self, field)}")


class SimulatedEngine:
    def __init__(self, spec: SimulatedSpec, *, clock: Clock | None = None) -> None:
        """`clock`: the event loop that the engine is started on, unless another is given."""
        self._spec = spec
        self._clock = clock
        self._work: PacedClock | None = None
        self._is_started = False
        self._lost = ""
        self._is_wedged = False
        self._slowdowns: list[float] = []
        self._plan = FaultPlan(f"{spec.seed} {spec.name}")
        self._fault_timers: set[Timer] = set()
        self._waiting: set[asyncio.Future[str]] = set()
        self._running: dict[str, SimulatedGeneration] = {}
        self._generated_tokens = 0
        self.weights = SimulatedWeights(self, spec.staging)
        self._switch = WeightSwitch(
            self.weights,
            name=spec.name,
            in_place=spec.staging == "none",
            release_kv=spec.release_kv_cache,
            restore_timeout_s=spec.restore_timeout_s,
            clock=lambda: self._clock.time(),
        )

    async def start(self) -> None:
        if self._work is not None:
            raise EngineError(f"{self._spec.name} was started before")
        self._clock = self._clock or asyncio.get_running_loop()
        self._work = PacedClock(self._clock)
        for fault in self._spec.faults:
            self.inject(fault)
        await self._pass(self._clock, self._clock.time() + self._spec.start_s)
        if self._plan.take(FailStart):
            self._lose("failed to start")
        self._is_started = True
        await self._answer()

    def inject(self, fault: Fault) -> None:
        """From now on, until it strikes, this fault is on its way."""
        if self._work is None or self._lost:
            raise EngineNotServing(f"{self._spec.name} {self._lost or 'is not started'}")
        if fault.after_s is not None:
            self._after(fault.after_s, self._strike, fault)
        elif fault.after_requests is not None or fault.probability is not None:
            self._plan.add(fault)
        else:
            self._strike(fault)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self._check()
        for fault in self._plan.at_request():
            self._strike(fault)
        self._check()
        if self._plan.take(FailRequest):
            raise EngineError(f"{self._spec.name} failed {request.request_id}, as it was told to")
        if request.request_id in self._running:
            raise EngineError(f"{self._spec.name} runs {request.request_id} already")
        spoil = self._plan.take(SpoilResult)
        made = SimulatedGeneration(self._spec, request, self._work.time(), self.weights.version)
        self._running[request.request_id] = made
        try:
            lost = await self._reach(self._work, made.ends_s)
        finally:
            del self._running[request.request_id]
        completions = made.completions(self._work.time(), known=[0] * request.n)
        self._generated_tokens += sum(len(completion.token_ids) for completion in completions)
        is_whole = all(completion.finish_reason for completion in completions)
        return GenerationResult(
            request_id=request.request_id,
            engine=self._spec.name,
            completions=_spoiled(completions, spoil) if spoil else completions,
            interrupted="" if is_whole else f"{self._spec.name} {lost}",
        )

    def progress(self, known: dict[str, list[int]]) -> dict[str, list[Completion]]:
        return {
            request_id: self._running[request_id].completions(self._work.time(), known=counts)
            for request_id, counts in known.items()
            if request_id in self._running
        }

    async def probe(self) -> None:
        self._check()
        if self._switch.stands_still:
            return
        now_s = self._work.time()
        next_tokens = [made.next_token_s(now_s) for made in self._running.values()]
        await self._pass(self._work, min([now_s + self._spec.first_token_s, *next_tokens]))

    async def stage_weights(self, encoded_update: bytes) -> None:
        await self._answer()
        await self._switch.stage(encoded_update)

    async def commit_weights(self, version: WeightVersion) -> CommitReport:
        await self._answer()
        paused_s = await self._switch.commit(version)
        return CommitReport(engine=self._spec.name, version=version, paused_s=paused_s)

    async def discard_weights(self) -> str:
        await self._answer()
        return await self._switch.discard()

    async def rest(self) -> None:
        await self._answer()
        await self._switch.rest()

    async def wake(self) -> None:
        await self._answer()
        await self._switch.wake()

    @property
    def is_dead(self) -> bool:
        """It did not come up, or it is lost. A wedged one looks alive."""
        return not self._is_started or bool(self._lost)

    @property
    def is_resting(self) -> bool:
        return self._switch.is_resting

    @property
    def stands_still(self) -> bool:
        return self._switch.stands_still

    @property
    def version(self) -> WeightVersion:
        return self.weights.version

    @property
    def generated_tokens(self) -> int:
        return self._generated_tokens

    async def close(self) -> None:
        self._lose("was closed")

    def _strike(self, fault: Fault) -> None:
        match fault:
            case Die():
                self._lose("died")
            case Wedge():
                self._is_wedged = True
                self.set_pace()
            case Slow():
                self._slowdowns.append(fault.factor)
                self.set_pace()
                if fault.duration_s is not None:
                    self._after(fault.duration_s, self._end_slowdown, fault.factor)
            case _:
                self._plan.hold(fault)

    async def answer_at_step(self, step: Step | RestStep, when: Literal["before", "after"]) -> None:
        """A step of a change of weights has come: it goes well, unless a fault is meant for it."""
        await self._answer()
        fault = self._plan.take(FailStep, lambda one: (one.step, one.when) == (step, when))
        if fault is None:
            return
        if fault.how == "die":
            self._lose("died")
        elif fault.how == "hang":
            await self._pass(self._clock, math.inf)
        self._check()
        raise EngineError(f"{self._spec.name} failed to {step}, as it was told to")

    async def copy_weights(self) -> None:
        await self._pass(self._clock, self._clock.time() + self._spec.commit_pause_s)

    def commit(self, version: WeightVersion) -> None:
        """What runs goes on under this version."""
        for made in self._running.values():
            made.commit(self._work.time(), version)

    def _end_slowdown(self, factor: float) -> None:
        self._slowdowns.remove(factor)
        self.set_pace()

    def set_pace(self) -> None:
        held = self.weights.is_paused or self.weights.is_asleep
        stands_still = self._lost or self._is_wedged or held
        self._work.set_rate(0.0 if stands_still else math.prod(self._slowdowns))

    def _lose(self, reason: str) -> None:
        """Nothing is made from now on, and nobody is left waiting."""
        if self._lost:
            return
        self._lost = reason
        if self._work is not None:
            self.set_pace()
        for timer in self._fault_timers:
            timer.cancel()
        self._fault_timers.clear()
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(reason)

    def _check(self) -> None:
        if self.is_dead:
            raise EngineNotServing(f"{self._spec.name} {self._lost or 'is not started'}")

    async def _answer(self) -> None:
        """At once, unless the engine is wedged or lost."""
        self._check()
        if self._is_wedged:
            await self._pass(self._work, math.inf)

    async def _pass(self, clock: Clock, when_s: float) -> None:
        """Wait until then; raises if the engine is lost before."""
        if lost := await self._reach(clock, when_s):
            raise EngineNotServing(f"{self._spec.name} {lost}")

    async def _reach(self, clock: Clock, when_s: float) -> str:
        """Wait until then, or until the engine is lost: how it was lost, if so."""
        if self._lost:
            return self._lost
        waiter: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        timer = clock.call_at(when_s, _release, waiter)
        self._waiting.add(waiter)
        try:
            return await waiter
        finally:
            self._waiting.discard(waiter)
            timer.cancel()

    def _after(self, delay_s: float, callback: Callable[..., None], argument: object) -> None:
        def fire() -> None:
            self._fault_timers.discard(timer)
            callback(argument)

        timer = self._clock.call_at(self._clock.time() + delay_s, fire)
        self._fault_timers.add(timer)


def _spoiled(completions: list[Completion], spoil: SpoilResult) -> list[Completion]:
    if spoil.how == "missing_completion":
        return completions[:-1]
    completions[0].logprobs[:1] = np.nan
    return completions


def _release(waiter: asyncio.Future[str]) -> None:
    if not waiter.done():
        waiter.set_result("")
