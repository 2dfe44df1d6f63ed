"""A crew in rehearsal: every actor real but the engines, which are simulated, and the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path

import cloudpickle
import pytest
from ray.actor import ActorHandle

from areal_ray.actors.crew import Crew
from areal_ray.actors.crew_specs import Task, pack_tokenizer
from areal_ray.actors.rehearsal import PacedReport, Rehearsal
from areal_ray.checkpoints import Checkpoint
from areal_ray.config import resolve
from areal_ray.config_file import from_mapping
from areal_ray.deadlines import within
from areal_ray.generation.faults import Fault
from areal_ray.generation.simulated import SimulatedSpec
from areal_ray.placement import plan, reserve
from areal_ray.plugins import pack
from areal_ray.staleness import LedgerCounts
from areal_ray.tasks import guarded
from areal_ray.types import Completion, Prompt
from areal_ray.workflows import Workflow, load_filter, single_turn

PROMPTS = [Prompt(text=f"{a}+{a}=", answer=str(2 * a)) for a in range(10, 50)]


def zero(prompt: Prompt, completion: Completion) -> float:
    return 0.0


def merged(base: dict, changes: dict) -> dict:
    return {
        key: merged(base[key], changes[key])
        if isinstance(base.get(key), dict) and key in changes
        else changes.get(key, base.get(key))
        for key in base | changes
    }


async def nothing() -> None:
    pass


class RehearsedCrew:
    def __init__(
        self,
        model: Path,
        run_dir: Path,
        *,
        reward: Callable = zero,
        engine: SimulatedSpec | None = None,
        step_s: float = 0.0,
        prompts: list[Prompt] = PROMPTS,
        workflow: Workflow = single_turn,
        resumed: Checkpoint | None = None,
        **changes: object,
    ) -> None:
        base = {
            "name": "rehearsal",
            "model": {"path": str(model)},
            "data": {"max_prompt_tokens": 8, "shuffle": False},
            "generation": {
                "engines": 1,
                "max_new_tokens": 4,
                "probe_every_s": 0.1,
                "suspect_after_s": 5,
                "dead_after_s": 20,
                "progress_every_s": 0.05,
            },
            "rollout": {"samples": 2, "max_staleness": 1, "group_timeout_s": 60},
            "trainer": {"groups_per_step": 4},
            "weights": {"timeout_s": 20},
        }
        for function in (reward, workflow):
            # Other processes can't import test modules.
            module = sys.modules[function.__module__]
            if "areal_ray" not in module.__name__:
                cloudpickle.register_pickle_by_value(module)
        self.config = resolve(from_mapping(merged(base, changes)), device="cpu")
        self._engine = engine or simulated()
        self._model = model
        self.run_dir = run_dir
        self._step_s = step_s
        self.task = Task(
            prompts=prompts,
            demonstrations=(),
            packed_workflow=pack(workflow),
            packed_reward=pack(reward),
            packed_filter=pack(load_filter(self.config.rollout.filter)),
        )
        self._resumed = resumed
        self.version = 0 if resumed is None else resumed.manifest.version
        self.skipped = 0
        """Versions that were a recovery's."""
        self.trained: list[int] = []

    async def __aenter__(self) -> RehearsedCrew:
        self._seats = await reserve(plan(self.config, device="cpu"))
        self.crew = Crew(
            self.config,
            self.task,
            model_path=str(self._model),
            packed_tokenizer=pack_tokenizer(self.config, str(self._model)),
            run_dir=self.run_dir,
            seats=self._seats,
            rehearsal=Rehearsal(engine=self._engine, step_s=self._step_s),
            resumed=self._resumed,
        )
        try:
            await self.crew.start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.crew.close()
        await asyncio.to_thread(self._seats.release)

    async def step(
        self,
        *,
        fresh_at: int | None = None,
        once_trained: Callable[[], Awaitable[None]] = nothing,
    ) -> PacedReport:
        """Train on a batch, and let the engines serve the next version. The batch is fresh enough
        at the version `fresh_at`, else at the current one. `once_trained` is awaited before
        anybody is told that the batch is trained on."""
        at = self.version if fresh_at is None else fresh_at
        return await guarded(self._step(at, once_trained), self.crew.watch())

    async def steps(self, count: int) -> None:
        for _ in range(count):
            await self.step()

    async def step_reached(self, version: int) -> None:
        while self.version < version:
            await asyncio.sleep(0.01)

    async def set_engine_version(self, version: int) -> None:
        """Let all engines stamp what they make from now on with this version."""
        for engine in self.crew.engines.values():
            await engine.stage_weights.remote(b"")
            await engine.commit_weights.remote(version)

    async def inject(self, engine: str, fault: Fault) -> None:
        def strike(actor) -> None:
            actor._engine.inject(fault)

        await self.crew.engines[engine].__ray_call__.remote(strike)

    @property
    def workers(self) -> dict[str, ActorHandle]:
        return self.crew.workers

    async def _step(
        self, fresh_at: int, once_trained: Callable[[], Awaitable[None]]
    ) -> PacedReport:
        report = await self.crew.train_step(self.version + 1, fresh_at)
        self.version += 1
        self.trained += report.group_ids
        await once_trained()
        await self.crew.update_weights(self.version)
        await self.crew.trained(report.group_ids)
        return report

    async def check_that_all_is_well(self, *, may_fail: bool = False) -> None:
        """Every group is somewhere, none was used twice, and all who should serve do."""
        await guarded(self._everybody_serves(), self.crew.watch())
        await self.until(lambda c: c.running == 0, "the last groups to end")
        batch, max_staleness = (
            self.config.trainer.groups_per_step,
            self.config.rollout.max_staleness,
        )
        rollout, queue = await self.crew.status()
        counts = rollout.ledger
        assert len(self.trained) == len(set(self.trained)) == self._consumed * batch
        # All that was accepted is trained on or waits: nothing else holds a place in the ledger.
        assert counts.accepted == len(self.trained) + queue.waiting_groups
        ended = counts.accepted + counts.filtered + counts.failed + counts.expired
        assert counts.submitted == ended
        # Full capacity: no place is held by something that is gone.
        assert counts.accepted == (max_staleness + self._consumed + 1) * batch
        assert not any(rollout.engine_loads.values())
        assert may_fail or counts.failed == 0

    @property
    def _consumed(self) -> int:
        """Batches."""
        return self.version - self.skipped

    async def _everybody_serves(self) -> None:
        while True:
            rollout, _ = await self.crew.status()
            members = [*rollout.engines, *rollout.workers]
            if members and all(member.state == "serving" for member in members):
                return
            await asyncio.sleep(0.05)

    async def until_full(self) -> int:
        """Until all that may start has ended; returns how many groups that are."""
        held = (self.config.rollout.max_staleness + self._consumed + 1) * (
            self.config.trainer.groups_per_step
        )
        await self.until(lambda c: (c.accepted, c.running) == (held, 0), f"{held} groups")
        return held

    async def counts(self) -> LedgerCounts:
        rollout, _ = await self.crew.status()
        return rollout.ledger

    async def until(self, condition: Callable[[LedgerCounts], bool], what: str) -> None:
        """Until the ledger's counts fulfil `condition`, and then still do a moment later."""

        async def poll() -> None:
            while not condition(await self.counts()):
                await asyncio.sleep(0.01)

        await guarded(within(60, poll(), who="the ledger", doing=what), self.crew.watch())
        await asyncio.sleep(0.1)
        assert condition(await self.counts()), await self.counts()


def simulated(**changes: object) -> SimulatedSpec:
    """An engine that answers at once, with a few tokens of the demo's vocabulary."""
    defaults = {
        "name": "",
        "tokens_per_s": 10_000.0,
        "first_token_s": 0.001,
        "mean_tokens": 3.0,
        "vocabulary": 12,
    }
    return SimulatedSpec(**(defaults | changes))


def run(work: Coroutine[object, object, object], timeout_s: float = 120) -> object:
    return asyncio.run(within(timeout_s, work, who="the test", doing="its work"))


async def pid_of(actor: ActorHandle) -> int:
    return await actor.__ray_call__.remote(lambda _: __import__("os").getpid())


def busy_crew(model: Path, directories: pytest.TempPathFactory, **changes: object) -> RehearsedCrew:
    """Two engines, slow enough that groups are always in flight."""
    settings = {
        "engine": simulated(tokens_per_s=100.0, mean_tokens=15.0),
        "generation": {
            "engines": 2,
            "max_new_tokens": 40,
            "suspect_after_s": 1,
            "dead_after_s": 3,
        },
    }
    return RehearsedCrew(model, directories.mktemp("run"), **(settings | changes))


Scenario = Callable[[RehearsedCrew], Awaitable[None]]
LiveThrough = Callable[[Scenario], None]


def lasting(crew: RehearsedCrew) -> Iterator[LiveThrough]:
    """A crew that several tests use, one after the other, each by a scenario."""
    with asyncio.Runner() as runner:
        runner.run(crew.__aenter__())

        def live_through(scenario: Scenario) -> None:
            runner.run(within(120, scenario(crew), who="the test", doing="its work"))

        yield live_through
        runner.run(crew.__aexit__())


async def kill(actor: ActorHandle, how: signal.Signals = signal.SIGKILL) -> int:
    pid = await pid_of(actor)
    os.kill(pid, how)
    return pid


async def until_gone(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            await asyncio.sleep(0.01)
