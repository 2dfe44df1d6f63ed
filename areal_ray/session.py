"""The training of one run: the short loop over awaited actors, and what it writes down.

    report = await crew.train_step(...)         learn from the next batch
    update = await crew.update_weights(...)     and the engines serve the next version

Rollout goes on all the while; the loop never waits for it, the trainer only for its batch. An
evaluation is of one version, so while one is under way the engines stay at theirs; the trainer goes
on without them, as far ahead as `max_staleness` lets what they generate be learnt from. (An engine
that comes back meanwhile gets the trainer's weights, and answers with those.)
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from areal_ray import logs
from areal_ray.checkpoints import Checkpoint
from areal_ray.config import Config
from areal_ray.deadlines import within
from areal_ray.errors import CheckpointError, QueueClosed, TrainerLost, described
from areal_ray.observability.records import EvaluationRecord, StepRecord
from areal_ray.observability.run_files import RunFiles
from areal_ray.observability.step_recorder import StepRecorder
from areal_ray.observability.views import View
from areal_ray.oversight import Overseer
from areal_ray.stopping import StopSignals
from areal_ray.tasks import guarded
from areal_ray.types import Prompt

if TYPE_CHECKING:
    from areal_ray.actors.checkpoint_engine import UpdateReport
    from areal_ray.actors.checkpointing import Cut
    from areal_ray.actors.crew import Crew
    from areal_ray.actors.trainer import TrainReport

Ending = Literal["all steps done", "goal reached", "stopped"]

STATUS_TIMEOUT_S = 60.0


class Session:
    """From the first batch to the exported model."""

    def __init__(
        self,
        config: Config,
        crew: Crew,
        files: RunFiles,
        view: View,
        held_out: list[Prompt],
        stop: StopSignals,
        resumed: Checkpoint | None = None,
        overseer: Overseer | None = None,
    ) -> None:
        self._config = config
        self._crew = crew
        self._files = files
        self._view = view
        self._held_out = held_out
        self._stop = stop
        self._overseer = overseer
        before = files.records() if resumed is not None else []
        spent_s = max((record.seconds for record in before), default=0.0)
        tokens = 0 if resumed is None else resumed.book().generated_tokens
        self._recorder = StepRecorder(spent_s=spent_s, tokens=tokens)
        self._evaluation: asyncio.Task[EvaluationRecord] | None = None
        self._saving: asyncio.Task[None] | None = None
        # A checkpoint of another run is none that this one could be recovered from.
        is_own = resumed is not None and resumed.directory.is_relative_to(files.directory)
        self._saved_step = resumed.step if is_own else None
        self._version = 0 if resumed is None else resumed.manifest.version
        """The trainer's."""
        self._served = self._version
        """The engines'."""
        self._recoveries = 0
        self.steps = 0 if resumed is None else resumed.step
        self.evaluations = [one for one in before if isinstance(one, EvaluationRecord)]
        steps = [one for one in before if isinstance(one, StepRecord)]
        self.last_step = steps[-1] if steps else None

    @property
    def directory(self) -> Path:
        return self._files.directory

    @property
    def is_evaluated(self) -> bool:
        return bool(self._held_out)

    @property
    def is_saved(self) -> bool:
        """Whether the last checkpoint is of the last step, if only as a copy in memory so far."""
        return self._saved_step == self.steps

    async def run(self) -> Ending:
        """Learn until the end; whatever the control plane finds wrong ends it at once."""
        self._view.phase("training")
        try:
            return await guarded(
                self._learn(),
                self._crew.watch(),
                self._end_rollout_when_stopped(),
                self._crew.obey(self._view.phase),
            )
        except BaseException:
            under_way = [task for task in (self._evaluation, self._saving) if task is not None]
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            raise

    async def finish(self, ended: Ending) -> None:
        """Save the model and the rollouts; at the same time evaluate, unless the run is stopped.

        An evaluation that fails is told only after the model is saved.
        """
        if self._served != self._version:  # it was stopped while the trainer was ahead
            await self._crew.note_version(self._version)
        if self._config.checkpoint.every:
            await self._checkpoint()
        saving = within(
            self._config.trainer.step_timeout_s,
            self._crew.trainer.finish.remote(str(self._files.model)),
            who="the trainer",
            doing="saving the model (trainer.step_timeout_s)",
        )
        outcomes = await asyncio.gather(
            saving, self._last_evaluation(ended), self._until_saved(), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def save(self) -> None:
        """Write a checkpoint of this moment between two steps, and wait until it is whole."""
        if self._served != self._version:
            # Only what is served can be saved, and an evaluation keeps the engines from it.
            if self._evaluation is not None:
                await asyncio.wait({self._evaluation})
            await self._update()
        await self._checkpoint()
        await self._until_saved()
        if not self.is_saved:
            raise CheckpointError(f"the checkpoint of step {self.steps} could not be written")

    async def _last_evaluation(self, ended: Ending) -> None:
        if ended == "stopped":
            await self._end_evaluation(cancel=True)
        else:
            self._begin_evaluation()
            await self._end_evaluation()

    async def _learn(self) -> Ending:
        config = self._config
        if config.checkpoint.every:
            await self._checkpoint()
        self._begin_evaluation()
        while self.steps < config.steps:
            try:
                reward = await self._step()
                if config.checkpoint.every and self.steps % config.checkpoint.every == 0:
                    await self._checkpoint()
            except QueueClosed:
                return "stopped"
            except TrainerLost as lost:
                await self._recover(lost)
                continue
            if reward is not None and config.goal is not None and reward >= config.goal:
                return "goal reached"
            if self._stop.requested.is_set():
                return "stopped"
            if config.evaluation.every and self.steps % config.evaluation.every == 0:
                self._begin_evaluation()
            if self._overseer is not None and self.steps < config.steps:
                await self._overseer.after_step(self)
        return "all steps done"

    async def _step(self) -> float | None:
        """Returns the reward of an evaluation that ended meanwhile."""
        report = await self._crew.train_step(self.steps + 1, self._version)
        # At once: whatever comes now, these groups are done with.
        await self._crew.trained(report.group_ids)
        self._version += 1
        reward, update = None, None
        if not self._may_go_ahead():
            reward = await self._end_evaluation()
            update = await self._update()
        self.steps += 1
        await self._record(report, update)
        return reward

    async def _update(self) -> UpdateReport:
        update = await self._crew.update_weights(self._version)
        self._served = self._version
        return update

    def _may_go_ahead(self) -> bool:
        """Whether the step after this one can be taken while the engines stay at their version."""
        if self._evaluation is None or self._evaluation.done():
            return False
        config, step = self._config, self.steps + 1
        # Whoever is evaluated or saved next is of a version that was served.
        needs_update = step == config.steps or any(
            every and step % every == 0
            for every in (config.checkpoint.every, config.evaluation.every)
        )
        is_fresh_enough = self._version - self._served <= config.rollout.max_staleness
        return is_fresh_enough and not needs_update and not self._stop.requested.is_set()

    async def _recover(self, lost: TrainerLost) -> None:
        """Go on from the last checkpoint: what was learnt since is lost, and no group is trained on
        again for it."""
        await self._until_saved()
        # Not waited for: it may itself wait for an engine that waits for the trainer.
        is_evaluating = self._evaluation is not None and not self._evaluation.done()
        if is_evaluating:
            await self._end_evaluation(cancel=True)
        may_restart = self._config.trainer.max_restarts if self._config.checkpoint.every else 0
        while self._recoveries < may_restart:
            self._recoveries += 1
            logs.warning("{}", lost)
            self._view.warn("the trainer is lost: going on from the last checkpoint")
            try:
                checkpoint = await self._crew.recover_trainer(self._version + 1)
            except TrainerLost as again:
                lost = again
                continue
            self._version += 1
            self._served = self._version
            self._view.phase(f"the trainer goes on from step {checkpoint.step}")
            if is_evaluating:
                self._begin_evaluation()
            return
        raise lost

    async def _checkpoint(self) -> None:
        """Wait for the copy alone; it is written while training goes on."""
        if self._saved_step == self.steps:
            return
        await self._until_saved()
        try:
            cut = await self._crew.checkpointing.take_snapshot(self.steps)
        except CheckpointError as error:
            self._tell_unsaved(self.steps, error)
            return
        self._saved_step = self.steps
        self._saving = asyncio.create_task(self._write(cut))

    async def _until_saved(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def _write(self, cut: Cut) -> None:
        try:
            await self._crew.checkpointing.write(cut)
        except Exception as error:  # noqa: BLE001 - told; the run goes on, and has the one before
            self._tell_unsaved(cut.step, error)
            self._saved_step = None

    def _tell_unsaved(self, step: int, error: Exception) -> None:
        told = f"the checkpoint of step {step} was not written: {described(error)}"
        logs.warning("{}", told)
        self._view.warn(told)

    def _begin_evaluation(self) -> None:
        """Evaluate the version that the engines serve, unless that is done or under way."""
        known = self.evaluations and self.evaluations[-1].step == self.steps
        if self._held_out and not known and self._evaluation is None:
            self._evaluation = asyncio.create_task(self._evaluate(self.steps))

    async def _end_evaluation(self, *, cancel: bool = False) -> float | None:
        """The reward of the evaluation under way, if there is one."""
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is None:
            return None
        if cancel:
            evaluation.cancel()
            await asyncio.gather(evaluation, return_exceptions=True)
            return None
        return (await evaluation).reward

    async def _evaluate(self, step: int) -> EvaluationRecord:
        evaluation = await self._crew.evaluate(self._held_out)
        record = EvaluationRecord(
            step=step,
            version=evaluation.version,
            seconds=self._recorder.seconds,
            prompts=evaluation.prompts,
            reward=evaluation.mean_reward,
            at=time.time(),
        )
        self.evaluations.append(record)
        self._files.record(record)
        self._view.evaluation(record)
        return record

    async def _record(self, report: TrainReport, update: UpdateReport | None) -> None:
        rollout, waiting = await self._crew.status()
        record = self._recorder.record(report, update, rollout, waiting, served=self._served)
        self.last_step = record
        self._files.record(record)
        self._view.step(record)

    async def _end_rollout_when_stopped(self) -> None:
        await self._stop.requested.wait()
        self._view.phase("stopping: finishing the step, then saving")
        await within(
            STATUS_TIMEOUT_S,
            self._crew.stop_rollout(),
            who="the control plane",
            doing="ending rollout",
        )
