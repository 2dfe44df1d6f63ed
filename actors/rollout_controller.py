"""RolloutController: the control plane. It moves metadata only; no token array passes here.

It draws prompts while the ledger has room, leases each group an engine and a worker, and takes
completions as summaries. It holds the run's error budget: a failed group's prompt is rolled out
again, and too many failures end the run with the first one as the cause. `watch` is how the
outside learns of anything that ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import ray
from ray.actor import ActorHandle

from areal_ray import logs
from areal_ray.actors.rollout_worker import Assignment
from areal_ray.data import Draw, PromptSource
from areal_ray.deadlines import within
from areal_ray.errors import TooManyFailures, described
from areal_ray.routing import LeastLoaded
from areal_ray.staleness import LedgerCounts, StalenessLedger
from areal_ray.tasks import Supervisor
from areal_ray.types import GroupSummary, Prompt, Sampling, WeightVersion


class ControllerSpec(msgspec.Struct, frozen=True):
    samples: int
    sampling: Sampling
    group_timeout_s: float
    groups_per_step: int
    max_staleness: int
    max_concurrent_groups: int
    max_failed_groups: int
    probe_every_s: float
    probe_timeout_s: float
    shuffle: bool
    seed: int


class RolloutStatus(msgspec.Struct, frozen=True):
    ledger: LedgerCounts
    generated_tokens: int


class Evaluation(msgspec.Struct, frozen=True):
    version: WeightVersion
    prompts: int
    mean_reward: float


@ray.remote(max_concurrency=4096)
class RolloutController:
    def __init__(
        self,
        spec: ControllerSpec,
        prompts: Sequence[Prompt],
        engines: Sequence[tuple[str, ActorHandle]],
        workers: Sequence[tuple[str, ActorHandle]],
        queue: ActorHandle,
    ) -> None:
        self._spec = spec
        self._source = PromptSource(prompts, seed=spec.seed, shuffle=spec.shuffle)
        self._engines = LeastLoaded(engines)
        self._engine_handles = engines
        self._workers = LeastLoaded(workers)
        self._queue = queue
        self._ledger = StalenessLedger(
            batch=spec.groups_per_step,
            max_staleness=spec.max_staleness,
            max_concurrent=spec.max_concurrent_groups,
        )
        self._supervisor = Supervisor()
        self._room = asyncio.Event()
        self._untrained: dict[int, Draw] = {}
        self._running: set[int] = set()
        self._expired_early: set[int] = set()
        self._next_group = 0
        self._generated_tokens = 0
        self._failures: list[Exception] = []

    async def start(self) -> None:
        """Begin to roll out. The engines must serve the current version by now."""
        self._supervisor.spawn(self._dispatch(), name="dispatch")
        self._supervisor.spawn(self._reroll_expired(), name="expired groups")
        for name, engine in self._engine_handles:
            self._supervisor.spawn(self._probe(name, engine), name=f"probe {name}")

    async def watch(self) -> None:
        """Wait until something ends the run, and raise it."""
        await self._supervisor.failed()

    async def commit_version(self, version: WeightVersion) -> None:
        """Every engine serves `version` from now on."""
        self._ledger.commit(version)
        self._room.set()

    async def trained(self, group_ids: Sequence[int]) -> None:
        """These groups can't expire any more: their prompts need not be kept."""
        for group_id in group_ids:
            self._untrained.pop(group_id, None)

    async def status(self) -> RolloutStatus:
        return RolloutStatus(
            ledger=self._ledger.counts,
            generated_tokens=self._generated_tokens,
        )

    async def evaluate(self, prompts: Sequence[Prompt]) -> Evaluation:
        """Greedy answers to `prompts` by the engines as they are, beside the rollouts."""
        version = self._ledger.counts.version
        sampling = msgspec.structs.replace(self._spec.sampling, temperature=0.0)
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(self._answer(prompt, sampling)) for prompt in prompts]
        rewards = [answer.result().mean_reward for answer in answers]
        return Evaluation(
            version=version, prompts=len(rewards), mean_reward=sum(rewards) / len(rewards)
        )

    async def close(self) -> None:
        await self._supervisor.close()

    async def _dispatch(self) -> None:
        while True:
            while self._ledger.capacity:
                self._ledger.submit()
                self._supervisor.spawn(self._roll_out(self._source.draw()), name="group")
            self._room.clear()
            await self._room.wait()

    async def _answer(self, prompt: Prompt, sampling: Sampling) -> GroupSummary:
        """One greedy answer. A failure is tried again, at the cost of the error budget."""
        while True:
            try:
                return await self._run(
                    "evaluate", self._new_group_id(), prompt, samples=1, sampling=sampling
                )
            except Exception as error:  # noqa: BLE001 - kept, and raised when there are too many
                self._spend_error_budget(error)

    async def _roll_out(self, draw: Draw) -> None:
        group_id = self._new_group_id()
        self._untrained[group_id] = draw
        self._running.add(group_id)
        accepted = False
        try:
            summary = await self._run(
                "roll_out",
                group_id,
                draw.prompt,
                samples=self._spec.samples,
                sampling=self._spec.sampling,
            )
            accepted = True
            self._ledger.accept()
            self._generated_tokens += summary.generated_tokens
        except Exception as error:  # noqa: BLE001 - kept, and raised when there are too many
            del self._untrained[group_id]
            if not self._source.failed(draw):
                logs.warning("a prompt failed too often and is given up: {}", draw.prompt)
            self._spend_error_budget(error)
        finally:
            self._running.discard(group_id)
            if not accepted:
                self._ledger.fail()
            elif group_id in self._expired_early:
                self._expired_early.discard(group_id)
                self._expire(group_id)
            self._room.set()

    async def _run(
        self, method: str, group_id: int, prompt: Prompt, *, samples: int, sampling: Sampling
    ) -> GroupSummary:
        weight = samples * sampling.max_new_tokens
        with (
            self._engines.lease(weight=weight) as (name, engine),
            self._workers.lease(weight=1) as (worker_name, worker),
        ):
            assignment = Assignment(
                group_id=group_id,
                prompt=prompt,
                samples=samples,
                sampling=sampling,
                engine=engine,
                engine_name=name,
            )
            return await within(
                self._spec.group_timeout_s,
                getattr(worker, method).remote(assignment),
                who=worker_name,
                doing=f"group {group_id} (rollout.group_timeout_s)",
            )

    async def _reroll_expired(self) -> None:
        while True:
            for group_id in await self._queue.expired.remote():
                if group_id in self._running:
                    # The queue tells before the worker's own answer has come.
                    self._expired_early.add(group_id)
                else:
                    self._expire(group_id)
            self._room.set()

    def _expire(self, group_id: int) -> None:
        """Its prompt is drawn again. A worker that died between handing a group over and saying
        so has had its prompt drawn again already."""
        if group_id in self._untrained:
            self._ledger.expire()
            self._source.put_back(self._untrained.pop(group_id))

    def _new_group_id(self) -> int:
        group_id, self._next_group = self._next_group, self._next_group + 1
        return group_id

    async def _probe(self, name: str, engine: ActorHandle) -> None:
        while True:
            await asyncio.sleep(self._spec.probe_every_s)
            await within(
                self._spec.probe_timeout_s,
                engine.probe.remote(),
                who=name,
                doing="a one-token probe (generation.probe_timeout_s)",
            )

    def _spend_error_budget(self, error: Exception) -> None:
        self._failures.append(error)
        logs.warning("a group failed ({} so far): {}", len(self._failures), described(error))
        if len(self._failures) > self._spec.max_failed_groups:
            first = self._failures[0]
            raise TooManyFailures(
                f"{len(self._failures)} groups failed, more than rollout.max_failed_groups "
                f"({self._spec.max_failed_groups}) allows. The first: {described(first)}"
            ) from first
