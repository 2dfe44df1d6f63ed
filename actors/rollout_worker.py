"""RolloutWorker: runs episodes and their rewards, a group at a time, many groups at once.

A group that runs here is known by its id: asked for it again, by a controller that was restarted
and has forgotten whom it asked, the worker goes on with the one it runs. When an engine is lost,
it asks the controller for another and goes on there from the tokens it has. A finished group is
kept until the queue has it, over a restart of the queue if need be.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import ray
from ray.actor import ActorHandle

from areal_ray import logs
from areal_ray.actors.calls import ASK_TIMEOUT_S, until_back
from areal_ray.actors.engine_calls import EngineCalls, EngineLost
from areal_ray.actors.offers import NOT_WANTED, Offers
from areal_ray.actors.telemetry import MonitorAddress, Telemetry
from areal_ray.data.tokenizer import PromptTokenizer
from areal_ray.errors import ArealRayError, NotReady, WorkflowError
from areal_ray.generation.continuation import Continuation
from areal_ray.observability.actor_report import WorkerFacts
from areal_ray.observability.loop_health import LoopReport
from areal_ray.plugins import unpack, users_traceback
from areal_ray.priority import step_aside
from areal_ray.rewards import RewardPool
from areal_ray.try_outs import Answers, TriedOut
from areal_ray.types import (
    Completion,
    GenerationRequest,
    GroupOutcome,
    GroupSummary,
    Prompt,
    Sampling,
    TokenIds,
    TrajectoryGroup,
)
from areal_ray.workflows import RolloutContext, checked

T = TypeVar("T")


class WorkerSpec(msgspec.Struct, frozen=True):
    packed_tokenizer: bytes
    packed_workflow: bytes
    packed_reward: bytes
    packed_filter: bytes
    reward_processes: int
    reward_timeout_s: float
    request_timeout_s: float
    progress_every_s: float
    relocate_timeout_s: float


@dataclass(frozen=True)
class Assignment:
    """One group to roll out, and the engine that is leased for it."""

    group_id: int
    prompt: Prompt
    samples: int
    sampling: Sampling
    engine: str


class _Equipment:
    """What episodes are run with: made once, off the loop."""

    def __init__(self, spec: WorkerSpec, controller: ActorHandle, offers: Offers) -> None:
        self.spec = spec
        self.controller = controller
        self.offers = offers
        self.engines = EngineCalls(
            self._engine,
            request_timeout_s=spec.request_timeout_s,
            progress_every_s=spec.progress_every_s,
        )
        self.workflow = unpack(spec.packed_workflow)
        self.filter = unpack(spec.packed_filter)
        self.rewards = RewardPool(
            spec.packed_reward, processes=spec.reward_processes, timeout_s=spec.reward_timeout_s
        )
        self.tokenizer: PromptTokenizer = pickle.loads(spec.packed_tokenizer)

    async def _engine(self, name: str) -> ActorHandle:
        return await until_back(
            ASK_TIMEOUT_S,
            lambda: self.controller.engine.remote(name),
            who="the controller",
            doing=f"telling where {name} is",
        )


@dataclass
class _Running:
    assignment: Assignment
    engine: str
    task: asyncio.Task[GroupOutcome] | None = None
    moving: asyncio.Lock = field(default_factory=asyncio.Lock)


@ray.remote(max_concurrency=4096)
class RolloutWorker:
    def __init__(self, name: str, monitor: MonitorAddress | None = None) -> None:
        step_aside()
        self._name = name
        self._running: dict[int, _Running] = {}
        self._equipment: _Equipment | None = None
        self._tried_out: dict[int, TriedOut | Answers] = {}
        """Until they are collected."""
        # One thread: it keeps the loop free, and a tokenizer must not be used by two at once.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._telemetry = Telemetry(
            name,
            monitor=monitor,
            facts=lambda: WorkerFacts(groups=len(self._running)),
            shown=self.__repr__,
        )
        self._telemetry.start()

    def __repr__(self) -> str:
        doing = f" {len(self._running)} groups" if self._equipment is not None else ""
        return f"RolloutWorker[{self._name}{doing}]"

    async def start(self, spec: WorkerSpec, queue: ActorHandle, controller: ActorHandle) -> None:
        """Get ready to take work from `controller`, and to give it to `queue`."""
        if self._equipment is None:
            me = ray.get_runtime_context().current_actor
            self._equipment = await self._in_thread(
                lambda: _Equipment(spec, controller, Offers(queue, me))
            )

    async def is_there(self) -> None:
        """Answers as soon as there is a process."""

    async def probe(self) -> LoopReport:
        """Answers for as long as the event loop runs."""
        return self._telemetry.loop()

    async def running(self) -> dict[int, str]:
        """The groups that run here, and the engine of each."""
        return {group_id: one.engine for group_id, one in self._running.items()}

    async def roll_out(self, assignment: Assignment) -> GroupOutcome:
        """Run a group and hand it to the queue; only its summary goes back."""
        running = self._running.get(assignment.group_id)
        if running is None:
            running = _Running(assignment, assignment.engine)
            self._running[assignment.group_id] = running
            running.task = asyncio.create_task(self._roll_out(running))
            running.task.add_done_callback(lambda task: self._ended(assignment.group_id, task))
        return await asyncio.shield(running.task)

    async def give_up(self, group_id: int) -> None:
        """Nobody waits for this group any more."""
        running = self._running.get(group_id)
        if running is not None and running.task is not None:
            running.task.cancel()

    async def hand_over(self, chunks: list[list[int]]) -> tuple[list[TrajectoryGroup] | bool, ...]:
        """Called by the queue, which so becomes the owner of the groups."""
        return self._own.offers.hand_over(chunks)

    async def evaluate(self, assignment: Assignment) -> GroupSummary:
        """Run a group whose reward is wanted and nothing else."""
        running = _Running(assignment, assignment.engine)
        return (await self._run(running)).summary()

    async def try_out(self, assignment: Assignment) -> str:
        """Run a group for somebody who wants to see it. It goes neither to the queue nor through
        the controller: returns who has it, for `collect`."""
        began = time.monotonic()
        running = _Running(assignment, assignment.engine)
        try:
            group = await self._run(running)
        except ArealRayError:
            raise
        except Exception as error:
            told = users_traceback(error, called_from=__file__)
            raise WorkflowError(f"the workflow raised\n{told}") from error
        self._tried_out[group.group_id] = TriedOut(
            group_id=group.group_id,
            prompt=group.prompt,
            trajectories=group.trajectories,
            pieces=await self._pieces(t.response_ids for t in group.trajectories),
            engine=running.engine,
            seconds=time.monotonic() - began,
        )
        return self._name

    async def ask(self, assignment: Assignment) -> str:
        """The same for answers alone: no workflow, no reward."""
        began = time.monotonic()
        running = _Running(assignment, assignment.engine)
        context = self._context(running)
        prompt_ids = await context.encode(assignment.prompt)
        completions = await context.generate(prompt_ids, n=assignment.samples)
        self._tried_out[assignment.group_id] = Answers(
            prompt=assignment.prompt,
            completions=completions,
            pieces=await self._pieces(completion.token_ids for completion in completions),
            engine=running.engine,
            seconds=time.monotonic() - began,
        )
        return self._name

    async def collect(self, group_id: int) -> TriedOut | Answers:
        return self._tried_out.pop(group_id)

    async def equip(self, spec: WorkerSpec) -> None:
        """Run episodes with this workflow, reward and filter, once those that run have ended."""
        before = self._own
        if running := [one.task for one in self._running.values() if one.task is not None]:
            await asyncio.wait(running)
        self._equipment = await self._in_thread(
            lambda: _Equipment(spec, before.controller, before.offers)
        )
        await before.rewards.close()

    async def until_death(self) -> None:
        """Never returns: the call ends with the process, and so tells when that is gone."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        await self._telemetry.close()
        if self._equipment is not None:
            await self._equipment.rewards.close()

    async def _roll_out(self, running: _Running) -> GroupOutcome:
        which = f"group {running.assignment.group_id}"
        with self._telemetry.span("episode", which):
            group = await self._run(running)
        keep, summary = await self._in_thread(lambda: (self._own.filter(group), group.summary()))
        if not keep:
            return GroupOutcome("filtered", summary)
        with self._telemetry.span("wait for the queue", which):
            taken_by = await self._own.offers.offer(group, summary)
        if taken_by == NOT_WANTED:
            return GroupOutcome("not wanted", summary)
        return GroupOutcome("taken", summary, queue=taken_by)

    async def _run(self, running: _Running) -> TrajectoryGroup:
        assignment = running.assignment
        workflow = self._own.workflow
        trajectories = checked(await workflow(assignment.prompt, self._context(running)))
        return TrajectoryGroup(
            group_id=assignment.group_id, prompt=assignment.prompt, trajectories=trajectories
        )

    def _context(self, running: _Running) -> RolloutContext:
        async def generate(request: GenerationRequest) -> list[Completion]:
            return await self._generate(running, request)

        assignment = running.assignment
        return RolloutContext(
            group_id=assignment.group_id,
            samples=assignment.samples,
            sampling=assignment.sampling,
            generate=generate,
            tokenizer=self._own.tokenizer,
            off_loop=self._in_thread,
            rewards=self._own.rewards,
            span=self._telemetry.span,
        )

    async def _generate(self, running: _Running, request: GenerationRequest) -> list[Completion]:
        """On the engine of the group; if that is lost, on the next one it gets."""
        continuation = Continuation(request)
        while (rest := continuation.rest()) is not None:
            name = running.engine
            try:
                await self._own.engines.generate(name, rest, continuation)
            except EngineLost as lost:
                logs.warning("{} goes on elsewhere: {}", request.request_id, lost)
                async with running.moving:
                    if running.engine == name:  # else another request of the group was first
                        await self._relocate(running)
        return continuation.completions()

    async def _relocate(self, running: _Running) -> None:
        group_id, lost = running.assignment.group_id, running.engine
        running.engine = await until_back(
            self._own.spec.relocate_timeout_s,
            lambda: self._own.controller.relocate.remote(group_id, lost),
            who="the controller",
            doing=f"finding an engine for group {group_id} (generation.startup_timeout_s)",
        )

    @property
    def _own(self) -> _Equipment:
        if self._equipment is None:
            raise NotReady(f"{self._name} was given work before it was started")
        return self._equipment

    def _ended(self, group_id: int, task: asyncio.Task[GroupOutcome]) -> None:
        del self._running[group_id]
        if not task.cancelled():
            task.exception()  # looked at, even if the controller that asked is gone

    async def _pieces(self, sequences: Iterable[TokenIds]) -> list[list[str]]:
        tokenizer = self._own.tokenizer
        return await self._in_thread(lambda: [tokenizer.pieces(ids) for ids in sequences])

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
