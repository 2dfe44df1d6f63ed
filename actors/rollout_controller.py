"""RolloutController: the control plane. It moves metadata only; no token array passes here.

It draws prompts while the book has room, leases each group an engine and a worker, and takes
completions as summaries. What happens to a group is written to the journal; a controller that
was killed reads it, asks the queue and the workers what they have, and goes on. Whatever fails
is either mended here (an engine, a worker, the queue) or charged to the error budget; `watch` is
how the outside learns of anything that ends the run.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import ray
from ray.actor import ActorHandle

from areal_ray.actors.bookkeeper import Bookkeeper
from areal_ray.actors.group_calls import WORKER_GONE, GroupCalls
from areal_ray.actors.keepers import EngineKeeper, WorkerKeeper
from areal_ray.actors.pool import ActorPool, Care
from areal_ray.actors.queue_line import QueueLine
from areal_ray.actors.rollout_worker import WorkerSpec
from areal_ray.actors.settling import Settling
from areal_ray.actors.telemetry import MonitorAddress, Telemetry
from areal_ray.changes import Changes
from areal_ray.error_budget import ErrorBudget, FailureKind
from areal_ray.errors import (
    DeadlineExceeded,
    GroupTimedOut,
    NotReady,
    WorkerLost,
)
from areal_ray.fleet import MemberStatus
from areal_ray.observability.actor_report import ControllerFacts
from areal_ray.observability.loop_health import LoopReport
from areal_ray.rollout_book import BookState, RolloutBook, Ticket
from areal_ray.staleness import LedgerCounts
from areal_ray.tasks import TaskRunner
from areal_ray.types import GroupOutcome, GroupSummary, Prompt, Sampling, WeightVersion
from areal_ray.weights.transaction import LostEngine

WORKERS_PER_GROUP = 3
"""A group that so many workers died under is at fault itself."""


class ControllerSpec(msgspec.Struct, frozen=True):
    samples: int
    sampling: Sampling
    group_timeout_s: float
    groups_per_step: int
    max_staleness: int
    max_concurrent_groups: int
    max_failed_groups: int
    max_failure_rate: float
    max_filtered_in_a_row: int
    shuffle: bool
    seed: int
    journal: str
    tensor_parallel: int
    is_colocated: bool
    startup_timeout_s: float
    sync_timeout_s: float
    engine_care: Care
    worker_care: Care


class RolloutStatus(msgspec.Struct, frozen=True):
    ledger: LedgerCounts
    generated_tokens: int
    paused: bool
    engines: list[MemberStatus]
    engine_loads: dict[str, int]
    """Outstanding tokens, at most, of each engine."""
    workers: list[MemberStatus]
    failures: list[FailureKind]
    loops: dict[str, LoopReport]
    """How late event loops run: this one, and those of engines and workers by their last word."""


class Evaluation(msgspec.Struct, frozen=True):
    version: WeightVersion
    prompts: int
    mean_reward: float


@ray.remote(max_concurrency=4096)
class RolloutController:
    def __init__(self, spec: ControllerSpec, monitor: MonitorAddress | None = None) -> None:
        self._spec = spec
        self._tasks: TaskRunner[None] = TaskRunner()
        self._groups: TaskRunner[GroupOutcome] = TaskRunner()
        self._tickets: dict[int, Ticket] = {}
        self._engine_keeper = EngineKeeper(
            tensor_parallel=spec.tensor_parallel,
            is_colocated=spec.is_colocated,
            startup_timeout_s=spec.startup_timeout_s,
            sync_timeout_s=spec.sync_timeout_s,
        )
        self._worker_keeper = WorkerKeeper(ray.get_runtime_context().current_actor)
        self._engines = ActorPool(
            self._engine_keeper, spec.engine_care, self._tasks, self._tell_of_member
        )
        self._workers = ActorPool(
            self._worker_keeper, spec.worker_care, self._tasks, self._tell_of_member
        )
        self._calls = GroupCalls(self._engines, self._workers, timeout_s=spec.group_timeout_s)
        self._budget = ErrorBudget(
            max_failures=spec.max_failed_groups, max_rate=spec.max_failure_rate
        )
        self._bookkeeper = Bookkeeper(
            Path(spec.journal),
            batch=spec.groups_per_step,
            max_staleness=spec.max_staleness,
            max_concurrent=spec.max_concurrent_groups,
        )
        self._attaching = asyncio.Lock()
        self._line_to_queue: QueueLine | None = None
        self._changed = Changes()
        self._evaluated = 0
        self._telemetry = Telemetry(
            "controller", monitor=monitor, facts=self._facts, shown=self.__repr__
        )
        self._telemetry.start()

    def __repr__(self) -> str:
        if self._line_to_queue is None:
            return "RolloutController"
        counts = self._book.counts
        doing = "paused, " if self._groups.paused else ""
        return (
            f"RolloutController[v{counts.version} {doing}{counts.running} groups running, "
            f"{counts.accepted} accepted]"
        )

    async def attach(
        self, prompts: Sequence[Prompt], queue: ActorHandle, trainer: ActorHandle
    ) -> None:
        """What there is to ask, and who takes the answers. Before anything else.

        Not arguments of the constructor: those may be gone by the time Ray calls it again.
        """
        async with self._attaching:
            if self._line_to_queue is not None:
                return
            self._worker_keeper.queue = queue
            await self._bookkeeper.read(prompts, seed=self._spec.seed, shuffle=self._spec.shuffle)
            self._line_to_queue = QueueLine(
                self._bookkeeper,
                queue,
                trainer,
                self._changed,
                startup_timeout_s=self._spec.startup_timeout_s,
            )
            if self._book.is_paused:
                self._groups.pause()
            # A million prompts stay for good: looking through them again and again for garbage
            # would hold the loop.
            gc.freeze()

    async def keep(
        self,
        engines: Sequence[tuple[str, ActorHandle]],
        workers: Sequence[tuple[str, ActorHandle]],
        worker_spec: WorkerSpec,
        manager: ActorHandle,
    ) -> None:
        """Look after these from now on: they are brought up, and kept up."""
        self._refuse_unless_attached()
        self._engine_keeper.manager = manager
        self._worker_keeper.spec = worker_spec
        taken_over = self._bookkeeper.found_a_journal
        for name, handle in workers:
            self._workers.add(name, handle, has_served=taken_over)
        for name, handle in engines:
            self._engines.add(name, handle, has_served=taken_over)

    async def start(self) -> None:
        """The trainer has weights: sync the engines and begin to roll out. Returns at once."""
        self._refuse_unless_attached()
        if not self._engine_keeper.weights_are_there.is_set():
            self._engine_keeper.weights_are_there.set()
            self._tasks.spawn(self._line.follow, name="following the queue")
            self._tasks.spawn(self._dispatch, name="dispatch")
            self._tasks.spawn(self._settle_all, name="settling")

    async def until_engines_settled(self) -> None:
        """Wait until each engine serves, or is given up."""
        self._refuse_unless_attached()
        await self._engines.until_settled()

    async def dismiss_engine(self, name: str) -> None:
        """Drain an engine; returns when nobody uses it any more."""
        self._refuse_unless_attached()
        await self._engines.remove(name)

    async def watch(self) -> None:
        """Wait until something ends the run, and raise it."""
        self._refuse_unless_attached()
        await self._tasks.failed()

    async def pause(self) -> None:
        """Start no new groups. Those that run go on, and are taken."""
        self._book.pause(True)
        self._groups.pause()
        await self._bookkeeper.write()

    async def resume(self) -> None:
        self._book.pause(False)
        self._groups.resume()
        await self._bookkeeper.write()

    async def commit_version(
        self, version: WeightVersion, lost: Sequence[LostEngine], recovered: bool = False
    ) -> None:
        """All engines but the `lost` ones serve `version` from now on. `recovered`: it is that of
        a trainer which went on from a checkpoint, and has had no batch since."""
        if version > self._book.counts.version:
            if recovered:
                await self._line.settle_a_dead_trainers()
                self._book.commit_recovered(version)
            else:
                self._book.commit(version)
        await self.engines_lost(lost)
        await self._bookkeeper.write()
        self._changed.notify()

    async def engines_lost(self, lost: Sequence[LostEngine]) -> None:
        """These must not serve as they are, unless they are others by now."""
        for one in lost:
            if self._engine_keeper.is_process_of(one.name, one.process):
                self._engines.condemn(one.name, one.cause)

    async def trained(self, group_ids: Sequence[int]) -> None:
        """These groups can't expire any more: their prompts need not be kept."""
        self._book.trained(group_ids)
        await self._bookkeeper.write()

    async def book_state(self) -> BookState:
        """All that is known of every group, for a checkpoint."""
        await self._bookkeeper.write()
        return self._book.state

    async def engine(self, name: str) -> ActorHandle:
        """For a worker that does not know it yet."""
        self._refuse_unless_attached()
        return self._engines.handles[name]

    async def relocate(self, group_id: int, lost: str) -> str:
        """Another engine for a group whose engine is lost; waits until there is one."""
        self._refuse_unless_attached()
        return await self._calls.relocate(group_id, lost)

    async def status(self) -> RolloutStatus:
        return RolloutStatus(
            ledger=self._book.counts,
            generated_tokens=self._book.generated_tokens,
            paused=self._groups.paused,
            engines=self._engines.statuses,
            engine_loads=self._engines.loads,
            workers=self._workers.statuses,
            failures=self._budget.failures,
            loops={
                "controller": self._telemetry.loop(),
                **self._workers.loops,
                **self._engines.loops,
            },
        )

    async def evaluate(self, prompts: Sequence[Prompt]) -> Evaluation:
        """Greedy answers to `prompts` by the engines as they are, beside the rollouts."""
        version = self._book.counts.version
        answers: TaskRunner[GroupSummary] = TaskRunner(limit=self._spec.max_concurrent_groups)
        try:
            for prompt in prompts:
                answers.submit(partial(self._answer, prompt), name="an evaluation")
            # In one order, so that the same answers have the same mean to the last digit.
            results = answers.results(order="submission")
            rewards = [ended.result().mean_reward async for ended in results]
        finally:
            await answers.close()
        return Evaluation(
            version=version, prompts=len(rewards), mean_reward=sum(rewards) / len(rewards)
        )

    async def try_out(
        self, method: Literal["try_out", "ask"], prompt: Prompt, samples: int, sampling: Sampling
    ) -> tuple[str, int]:
        """A group for somebody who wants to see it, beside the rollouts. Returns the worker that
        has it, and by which number."""
        self._evaluated += 1
        group_id = -self._evaluated
        worker = await self._calls.call(
            method, group_id, prompt, samples=samples, sampling=sampling
        )
        return worker, group_id

    async def equip(self, worker_spec: WorkerSpec) -> None:
        """A worker that is restarted gets these."""
        self._worker_keeper.spec = worker_spec

    async def until_death(self) -> None:
        """Never returns: the call ends with the process, and so tells when that is gone."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        await self._tasks.close()
        await self._groups.close()
        await self._telemetry.close()

    def _tell_of_member(self, name: str, is_lost: bool, text: str) -> None:
        self._telemetry.event("warning" if is_lost else "info", text, who=name)

    def _facts(self) -> ControllerFacts:
        is_attached = self._line_to_queue is not None
        return ControllerFacts(
            ledger=self._book.counts if is_attached else LedgerCounts(),
            engines=self._engines.statuses,
            workers=self._workers.statuses,
            is_paused=self._groups.paused,
        )

    @property
    def _book(self) -> RolloutBook:
        self._refuse_unless_attached()
        return self._bookkeeper.book

    @property
    def _line(self) -> QueueLine:
        self._refuse_unless_attached()
        return self._line_to_queue

    def _refuse_unless_attached(self) -> None:
        """A controller that was just restarted knows nothing, and must not answer as if it did."""
        if self._line_to_queue is None:
            raise NotReady("the controller was restarted, and is not attached yet")

    async def _dispatch(self) -> None:
        await self._changed.until(lambda: self._line.incarnation)
        await self._resume_recovered()
        while True:
            tickets = [self._book.draw() for _ in range(self._book.capacity)]
            await self._line.update([ticket.group_id for ticket in tickets])
            for ticket in tickets:
                self._submit(ticket)
                # A whole batch may start at once: let others have the loop in between.
                await asyncio.sleep(0)
            await self._changed.until(
                lambda: self._book.capacity or self._line.has_drops or self._book.has_events
            )

    async def _resume_recovered(self) -> None:
        """Groups that a controller before this one had dispatched: where they run, they go on."""
        if recovered := self._book.running:
            places = await self._calls.places()
            for ticket in recovered:
                self._submit(ticket, *places.get(ticket.group_id, ("", "")))

    def _submit(self, ticket: Ticket, worker: str = "", engine: str = "") -> None:
        work = partial(self._roll_out, ticket, worker, engine)
        self._tickets[self._groups.submit(work, name=f"group {ticket.group_id}")] = ticket

    async def _roll_out(self, ticket: Ticket, worker: str, engine: str) -> GroupOutcome:
        """Over as many workers as it takes. Whether a group is in the queue, the queue decides."""
        group_id = ticket.group_id
        for _ in range(WORKERS_PER_GROUP):
            try:
                outcome = await self._calls.call(
                    "roll_out",
                    group_id,
                    ticket.prompt,
                    samples=self._spec.samples,
                    sampling=self._spec.sampling,
                    worker=worker,
                    engine=engine,
                )
            except WORKER_GONE as error:
                lost = error
                if taken_by := await self._line.taken_by(group_id):
                    return GroupOutcome("taken", queue=taken_by)
                continue
            except DeadlineExceeded as error:
                if taken_by := await self._line.taken_by(group_id, withdraw=True):
                    return GroupOutcome("taken", queue=taken_by)
                raise GroupTimedOut(str(error)) from error
            if outcome.kind == "not wanted":
                return GroupOutcome("taken", outcome.summary, self._line.incarnation)
            return outcome
        raise WorkerLost(
            f"{WORKERS_PER_GROUP} workers died while they ran group {group_id}"
        ) from lost

    async def _answer(self, prompt: Prompt) -> GroupSummary:
        """One greedy answer. A failure is tried again, at the cost of the error budget."""
        sampling = msgspec.structs.replace(self._spec.sampling, temperature=0.0)
        while True:
            self._evaluated += 1
            try:
                return await self._calls.call(
                    "evaluate", -self._evaluated, prompt, samples=1, sampling=sampling
                )
            except WORKER_GONE:
                continue
            except Exception as error:  # noqa: BLE001 - kept, and raised when there are too many
                self._budget.failed("an evaluation", error)

    async def _settle_all(self) -> None:
        settling = Settling(
            self._book,
            self._line,
            self._budget,
            max_filtered_in_a_row=self._spec.max_filtered_in_a_row,
            tell=lambda text: self._telemetry.event("warning", text),
        )
        while True:
            ended = await self._groups.next_ended()
            settling.settle(self._tickets.pop(ended.number), ended)
            self._changed.notify()
