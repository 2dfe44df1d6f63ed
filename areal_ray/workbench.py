"""Workbench: the actors of a run in one's hands, step by step, as in a notebook.

    bench = await Workbench.open(config)        engines, trainer and control plane are up
    await bench.ask("17+25=", samples=4)        what would they answer?
    await bench.roll_out(prompt)                one group, through workflow and reward
    await bench.use(reward=mine)                another reward, the same engines
    await bench.step()                          learn from the next batch
    await bench.update_weights()                and the engines serve what was learnt
    await bench.train(steps=5)                  five times both
    await bench.close()

The engines stand still but for what is asked of them: groups are rolled out for training only
while a step is awaited. Nothing is left behind: a bench is closed before another of its name is
opened, and its actors end with the process at the latest. What fails is raised where it was
awaited, as what it is, and the bench can be used on, as long as its engines and its trainer live.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from areal_ray import logs
from areal_ray.actors.checkpoint_engine import UpdateReport
from areal_ray.actors.crew import Crew
from areal_ray.actors.crew_specs import Task
from areal_ray.actors.rollout_controller import RolloutStatus
from areal_ray.actors.trainer import TrainReport
from areal_ray.actors.trajectory_queue import QueueStatus
from areal_ray.actors.watching import MonitorView
from areal_ray.config import Config
from areal_ray.errors import DataError, PluginError, TrainingError, described, root_cause
from areal_ray.observability import loop_health
from areal_ray.observability.cell import CellView, at_cells
from areal_ray.observability.history import History, Plot
from areal_ray.observability.html import bench_html
from areal_ray.observability.records import EvaluationRecord, Record, StepRecord
from areal_ray.observability.run_files import RunFiles
from areal_ray.observability.step_recorder import StepRecorder
from areal_ray.plugins import pack
from areal_ray.rewards import Reward
from areal_ray.run import Run, checked_reward
from areal_ray.tasks import guarded
from areal_ray.try_outs import Answers, TriedOut
from areal_ray.types import Prompt, WeightVersion
from areal_ray.weights.transaction import Outcome
from areal_ray.workflows import Workflow
from areal_ray.workflows.filters import GroupFilter

T = TypeVar("T")

_open: dict[str, Workbench] = {}
"""Those of this process, by name."""


class BenchStatus(msgspec.Struct, frozen=True):
    """A bench as it was when it was last looked at."""

    name: str
    directory: str
    steps: int
    version: WeightVersion
    """The trainer's."""
    served: WeightVersion
    """The engines'."""
    rollout: RolloutStatus
    queue: QueueStatus

    def _repr_html_(self) -> str:
        return bench_html(self)


class Workbench:
    def __init__(
        self,
        config: Config,
        crew: Crew,
        task: Task,
        files: RunFiles,
        *,
        held_out: Sequence[Prompt],
        ending: contextlib.AsyncExitStack,
    ) -> None:
        """Of a crew that is started, and paused. `ending` undoes all. See `open`."""
        self.config = config
        self.crew = crew
        """The actors themselves, for what a bench has no word for."""
        self._task = task
        self._files = files
        self._shown_directory = os.path.relpath(files.directory)
        self._held_out = held_out
        self._ending = ending
        self._monitor = MonitorView(crew)
        self._recorder = StepRecorder()
        self._records: list[Record] = []
        self._watching = asyncio.create_task(crew.watch())
        """Whether something ends the rollout. One task for good, since each is a call that stays
        with the controller."""
        self._learning: asyncio.Task[TrainReport] | None = None
        """The step that is under way: one whose cell was interrupted still is."""
        self._version: WeightVersion = 0
        self._served: WeightVersion = 0
        self._steps = 0
        self._seen: BenchStatus | None = None

    @classmethod
    async def open(
        cls,
        config: Config,
        *,
        prompts: Iterable[Prompt] | None = None,
        held_out: Iterable[Prompt] | None = None,
        reward: Reward | None = None,
        workflow: Workflow | None = None,
    ) -> Workbench:
        """Start the engines and the trainer that the config asks for. What is not given here is
        what the config names. A bench of this name that is open is closed first."""
        # It writes no checkpoints: a trainer that is lost is told of, not brought back.
        unsaved = msgspec.structs.replace(config.checkpoint, every=0)
        config = msgspec.structs.replace(config, checkpoint=unsaved)
        run = await asyncio.to_thread(
            Run, config, prompts=prompts, held_out=held_out, reward=reward, workflow=workflow
        )
        if (before := _open.get(config.name)) is not None:
            await before.close()
        view = CellView()
        async with contextlib.AsyncExitStack() as ending:
            # This loop is the user's, and cells hold it for as long as they like.
            ending.enter_context(logs.without(loop_health.__name__))
            files = await asyncio.to_thread(run.make_files)
            ending.push_async_callback(asyncio.to_thread, files.close)
            crew, config = await run.begin(files, view, ending, paused=True)
            bench = cls(
                config, crew, run.task, files, held_out=run.held_out, ending=ending.pop_all()
            )
        _open[config.name] = bench
        await bench.status()
        view.phase(f"{len(crew.engines)} engines serve, the trainer is up; rollout is paused")
        view.close()
        return bench

    async def ask(
        self, prompt: Prompt | str, *, samples: int = 1, temperature: float | None = None
    ) -> Answers:
        """What the engines answer: no workflow, no reward. At temperature 0 they are greedy."""
        asked = Prompt(text=prompt) if isinstance(prompt, str) else prompt
        sampling = self.config.sampling
        if temperature is not None:
            sampling = msgspec.structs.replace(sampling, temperature=temperature)
        return await self._guarded(self.crew.try_outs.ask(asked, samples, sampling))

    async def roll_out(self, prompt: Prompt, *, samples: int | None = None) -> TriedOut:
        """One group through workflow and reward, to look at: it is not trained on."""
        samples = self.config.rollout.samples if samples is None else samples
        sampling = self.config.sampling
        return await self._guarded(self.crew.try_outs.roll_out(prompt, samples, sampling))

    async def use(
        self,
        *,
        reward: Reward | None = None,
        workflow: Workflow | None = None,
        filter: GroupFilter | None = None,
    ) -> None:
        """Go by these from now on; the engines stay as they are. Groups that wait to be trained
        on went by the ones before: they are rolled out again."""
        task = self._task
        if reward is not None:
            task = dataclasses.replace(task, packed_reward=pack(checked_reward(reward)))
        if workflow is not None:
            if not inspect.iscoroutinefunction(workflow):
                raise PluginError(f"{workflow!r} must be an async function to be a workflow")
            task = dataclasses.replace(task, packed_workflow=pack(workflow))
        if filter is not None:
            task = dataclasses.replace(task, packed_filter=pack(filter))
        await self._guarded(self.crew.equip(task))
        self._task = task

    async def step(self) -> StepRecord:
        """Roll out, and let the trainer learn from the next batch. The engines stay at their
        version until `update_weights`."""
        return await self._guarded(self._rolling_out(lambda: self._step(updates=False)))

    async def update_weights(self) -> Outcome:
        """Let the engines serve what the trainer has learnt."""
        return (await self._guarded(self._update())).outcome

    async def train(self, steps: int) -> History:
        """So many steps, each with its weight update. What was done before an interruption or a
        failure is in `history`."""
        first, view = len(self._records), CellView()

        async def all_steps() -> None:
            for number in range(1, steps + 1):
                record = await self._step(updates=True)
                view.phase(f"{number} of {steps} steps: reward {record.reward:.3f}")

        await self._guarded(self._rolling_out(all_steps))
        return History(self.name, self._records[first:])

    async def evaluate(self, prompts: Sequence[Prompt] | None = None) -> EvaluationRecord:
        """The mean reward of greedy answers to the held-out prompts, or to these."""
        chosen = self._held_out if prompts is None else prompts
        if not chosen:
            raise DataError("there are no held-out prompts: give some, here or to `open`")
        evaluation = await self._guarded(self.crew.evaluate(chosen))
        record = EvaluationRecord(
            step=self._steps,
            version=evaluation.version,
            seconds=self._recorder.seconds,
            prompts=evaluation.prompts,
            reward=evaluation.mean_reward,
            at=time.time(),
        )
        self._note(record)
        return record

    async def status(self) -> BenchStatus:
        """As it is now. The bench itself shows what was last seen."""
        rollout, queue = await self.crew.status()
        self._seen = BenchStatus(
            name=self.name,
            directory=self._shown_directory,
            steps=self._steps,
            version=self._version,
            served=self._served,
            rollout=rollout,
            queue=queue,
        )
        return self._seen

    async def close(self) -> None:
        """End the actors, and leave the cluster as it was."""
        if _open.get(self.name) is self:
            del _open[self.name]
        own = [task for task in (self._watching, self._learning) if task is not None]
        for task in own:
            task.cancel()
        await asyncio.gather(*own, return_exceptions=True)
        await self._ending.aclose()

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def directory(self) -> Path:
        """Where its files are, as those of a run."""
        return self._files.directory

    @property
    def prompts(self) -> Sequence[Prompt]:
        """What it trains on."""
        return self._task.prompts

    @property
    def history(self) -> History:
        return History(self.name, self._records)

    def plot(self) -> Plot:
        """The reward, by step."""
        return self.history.plot()

    async def __aenter__(self) -> Workbench:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return (
            f"Workbench({self.name}: {len(self.crew.engines)} engines at version {self._served}, "
            f"{self._steps} steps)"
        )

    def _repr_html_(self) -> str:
        assert self._seen is not None
        return bench_html(self._seen)

    async def _guarded(self, work: Coroutine[object, object, T]) -> T:
        """Its result, unless something ends the rollout meanwhile. What goes wrong is raised as
        what it is, without what remote calls wrap around it."""
        try:
            result = await guarded(work, self._watch())
            await self.status()
        except Exception as error:  # noqa: BLE001 - raised again, as what it means
            cause = at_cells(root_cause(error))
            if self._watching.done():
                await self._begin_anew(cause)
            raise cause from None
        return result

    async def _watch(self) -> None:
        await asyncio.shield(self._watching)

    async def _begin_anew(self, cause: BaseException) -> None:
        """The controller has given up, for a reason that may be mended: by another reward, say."""
        try:
            await self.crew.restart_rollout()
        except Exception as late:  # noqa: BLE001 - told with the error that came first
            cause.add_note(f"The rollout could not be taken up again: {described(late)}")
        else:
            self._watching = asyncio.create_task(self.crew.watch())

    async def _rolling_out(self, work: Callable[[], Awaitable[T]]) -> T:
        self._recorder.skip_time()
        await self.crew.try_outs.resume()
        try:
            return await work()
        finally:
            await self.crew.try_outs.pause()

    async def _step(self, *, updates: bool) -> StepRecord:
        """The step that is under way already, if there is one: a trainer can't be interrupted in
        the middle of one, and its batch is not to be lost."""
        if self._learning is None:
            behind, allowed = self._version - self._served, self.config.rollout.max_staleness
            if behind > allowed:
                raise TrainingError(
                    f"the engines are {behind} versions behind the trainer, and what they generate "
                    f"is not learnt from any more (rollout.max_staleness {allowed}): "
                    "update_weights() first"
                )
            self._learning = asyncio.create_task(self._learn())
        try:
            report = await asyncio.shield(self._learning)
        finally:
            if self._learning.done():
                self._learning = None
        update = await self._update() if updates else None
        rollout, queue = await self.crew.status()
        record = self._recorder.record(report, update, rollout, queue, served=self._served)
        self._note(record)
        return record

    async def _learn(self) -> TrainReport:
        report = await self.crew.train_step(self._steps + 1, self._version)
        await self.crew.trained(report.group_ids)
        self._steps += 1
        self._version += 1
        return report

    async def _update(self) -> UpdateReport:
        update = await self.crew.update_weights(self._version)
        self._served = self._version
        return update

    def _note(self, record: Record) -> None:
        self._records.append(record)
        self._files.record(record)
        if isinstance(record, StepRecord):
            self._monitor.step(record)
        else:
            self._monitor.evaluation(record)
