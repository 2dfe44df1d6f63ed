"""Run: config -> placement -> actors -> training steps. The one place that composes.

    result = await Run(config).train()          # in a notebook
    result = areal_ray.train(config)            # in a script

Everything that the user brings is loaded and checked when the Run is made, before anything
starts. The training itself is the loop in `_learn`; the rest is about beginning and ending well.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from areal_ray.actors.checkpoint_engine import UpdateReport
from areal_ray.actors.crew import Crew, Task
from areal_ray.actors.trainer import TrainReport
from areal_ray.algorithms import ADVANTAGES, POLICY_LOSSES
from areal_ray.config import Config, check, resolve
from areal_ray.data import load_prompts
from areal_ray.data.source import as_prompts, refuse_without_answers
from areal_ray.deadlines import within
from areal_ray.errors import ConfigError, ModelError, PluginError, QueueClosed
from areal_ray.observability.records import EvaluationRecord, StepRecord
from areal_ray.observability.run_files import RunFiles
from areal_ray.observability.terminal import View, open_view
from areal_ray.placement import connect, plan, reserve
from areal_ray.plugins import load_function, pack
from areal_ray.rewards import Reward
from areal_ray.stopping import StopRequested, StopSignals
from areal_ray.tasks import guarded
from areal_ray.types import Prompt
from areal_ray.workflows import Workflow, load_workflow

Ending = Literal["all steps done", "goal reached", "stopped"]

STATUS_TIMEOUT_S = 60.0


class RunResult(msgspec.Struct, frozen=True):
    directory: str
    steps: int
    ended: Ending
    first_evaluation: float | None = None
    last_evaluation: float | None = None
    exit_code: int = 0

    def summary(self) -> str:
        """How it ended and where everything is, for the last screen."""
        lines = [f"areal-ray: {self.ended} after {self.steps} steps"]
        if self.last_evaluation is not None:
            lines.append(
                f"  held-out reward  {self.first_evaluation:.3f} -> {self.last_evaluation:.3f}"
            )
        if self.steps:
            lines.append(f"  model            {self.directory}/model")
        lines.append(f"  metrics, curve   {self.directory}")
        return "\n".join(lines)


def train(
    config: Config,
    *,
    prompts: Iterable[Prompt] | None = None,
    held_out: Iterable[Prompt] | None = None,
    reward: Reward | None = None,
    workflow: Workflow | None = None,
) -> RunResult:
    """Train to the end, from a script. See `Run`."""
    run = Run(config, prompts=prompts, held_out=held_out, reward=reward, workflow=workflow)
    return asyncio.run(run.train())


class Run:
    """One training run. What is not given here is what the config names."""

    def __init__(
        self,
        config: Config,
        *,
        prompts: Iterable[Prompt] | None = None,
        held_out: Iterable[Prompt] | None = None,
        reward: Reward | None = None,
        workflow: Workflow | None = None,
    ) -> None:
        check(config, held_out_given=held_out is not None)
        self._config = config
        self._prompts = _prompts(prompts, config.data.train, "data.train")
        self._held_out: list[Prompt] = []
        if held_out is not None or config.data.held_out is not None:
            chosen = _prompts(held_out, config.data.held_out, "data.held_out")
            self._held_out = chosen[: config.evaluation.prompts]
        self._demonstrations: list[Prompt] = []
        if config.warmup.steps:
            spec = config.warmup.data
            self._demonstrations = self._prompts if spec is None else load_prompts(spec)
            refuse_without_answers(self._demonstrations)
        self._reward = _reward(reward, config.reward.function)
        self._workflow = workflow or load_workflow(config.rollout.workflow)
        self._make_model = _model_factory(config)
        # Looked up now, so that an unknown name is told before anything starts.
        _ = ADVANTAGES[config.algorithm.advantage], POLICY_LOSSES[config.algorithm.loss]

    async def train(self) -> RunResult:
        """Train to the end, the goal, or the first Ctrl-C; raises what made it fail."""
        files = await asyncio.to_thread(RunFiles, self._config)
        view = open_view(files.directory.name, self._config.steps)
        try:
            with StopSignals() as stop:
                return await self._train(files, view, stop)
        finally:
            view.close()
            await asyncio.to_thread(files.close)

    async def _train(self, files: RunFiles, view: View, stop: StopSignals) -> RunResult:
        async with contextlib.AsyncExitStack() as ending:
            try:
                crew, config = await stop.race(self._begin(files, view, ending))
                session = _Session(config, crew, files, view, self._held_out, stop)
                ended = await session.run()
            except StopRequested:
                return _stopped(files, stop, steps=0)
            view.phase("saving the model")
            await session.finish(ended)
            view.phase("closing the engines")
        if ended == "stopped":
            return _stopped(files, stop, steps=session.steps)
        rewards = [record.reward for record in session.evaluations]
        return RunResult(
            directory=str(files.directory),
            steps=session.steps,
            ended=ended,
            first_evaluation=rewards[0] if rewards else None,
            last_evaluation=rewards[-1] if rewards else None,
        )

    async def _begin(
        self, files: RunFiles, view: View, ending: contextlib.AsyncExitStack
    ) -> tuple[Crew, Config]:
        """Cluster and model side by side, then the actors; each undone by `ending`."""
        view.phase("connecting to Ray")
        model_path, cluster = await asyncio.gather(
            asyncio.to_thread(self._make_model, files.base_model),
            asyncio.to_thread(connect, self._config),
        )
        ending.push_async_callback(asyncio.to_thread, cluster.leave)
        config = resolve(self._config, device=cluster.device)
        await asyncio.to_thread(files.save_config, config)
        seats = await reserve(plan(config, device=cluster.device))
        ending.callback(seats.release)
        task = Task(
            prompts=self._prompts,
            demonstrations=self._demonstrations,
            packed_workflow=pack(self._workflow),
            packed_reward=pack(self._reward),
        )
        crew = Crew(config, task, model_path=model_path, run_dir=files.directory, seats=seats)
        ending.push_async_callback(crew.close)
        warmup = f", {config.warmup.steps} supervised steps" if config.warmup.steps else ""
        where = f" · dashboard {cluster.dashboard_url}" if cluster.dashboard_url else ""
        view.phase(f"starting {config.generation.engines} engines and the trainer{warmup}{where}")
        await crew.start()
        return crew, config


class _Session:
    """The training of one run, from the first batch to the exported model."""

    def __init__(
        self,
        config: Config,
        crew: Crew,
        files: RunFiles,
        view: View,
        held_out: list[Prompt],
        stop: StopSignals,
    ) -> None:
        self._config = config
        self._crew = crew
        self._files = files
        self._view = view
        self._held_out = held_out
        self._stop = stop
        self._began = self._recorded = time.monotonic()
        self._tokens_recorded = 0
        self._evaluation: asyncio.Task[EvaluationRecord] | None = None
        self.steps = 0
        self.evaluations: list[EvaluationRecord] = []

    async def run(self) -> Ending:
        """Learn until the end; whatever the control plane finds wrong ends it at once."""
        self._view.phase("training")
        try:
            return await guarded(self._learn(), self._watch(), self._end_rollout_when_stopped())
        except BaseException:
            if self._evaluation is not None:
                self._evaluation.cancel()
            raise

    async def finish(self, ended: Ending) -> None:
        """Export the model and, at the same time, evaluate it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                within(
                    self._config.trainer.step_timeout_s,
                    self._crew.trainer.export.remote(str(self._files.model)),
                    who="the trainer",
                    doing="the export (trainer.step_timeout_s)",
                )
            )
            if ended == "stopped":
                await self._end_evaluation(cancel=True)
            else:
                self._begin_evaluation()
                await self._end_evaluation()

    async def _learn(self) -> Ending:
        config, crew = self._config, self._crew
        self._begin_evaluation()
        while self.steps < config.steps:
            step = self.steps + 1
            try:
                report = await within(
                    config.trainer.step_timeout_s,
                    crew.trainer.train_step.remote(step, self.steps),
                    who="the trainer",
                    doing=f"step {step} (trainer.step_timeout_s)",
                )
            except QueueClosed:
                return "stopped"
            # An evaluation is of one version: the next weights wait for it, the trainer did not.
            reward = await self._end_evaluation()
            update = await crew.update_weights(step)
            self.steps = step
            await self._record(report, update)
            if reward is not None and config.goal is not None and reward >= config.goal:
                return "goal reached"
            if self._stop.requested.is_set():
                return "stopped"
            if config.evaluation.every and step % config.evaluation.every == 0:
                self._begin_evaluation()
        return "all steps done"

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
        evaluation = await within(
            self._config.evaluation.timeout_s,
            self._crew.controller.evaluate.remote(self._held_out),
            who="the engines",
            doing="an evaluation (evaluation.timeout_s)",
        )
        record = EvaluationRecord(
            step=step,
            version=evaluation.version,
            seconds=time.monotonic() - self._began,
            prompts=evaluation.prompts,
            reward=evaluation.mean_reward,
        )
        self.evaluations.append(record)
        self._files.record(record)
        self._view.evaluation(record)
        return record

    async def _record(self, report: TrainReport, update: UpdateReport) -> None:
        controller, queue = self._crew.controller, self._crew.queue
        rollout, waiting, _ = await within(
            STATUS_TIMEOUT_S,
            _all(
                controller.status.remote(),
                queue.status.remote(),
                controller.trained.remote(report.group_ids),
            ),
            who="the control plane",
            doing="its status",
        )
        now = time.monotonic()
        generated = rollout.generated_tokens - self._tokens_recorded
        record = StepRecord(
            step=report.step,
            version=update.version,
            seconds=now - self._began,
            reward=report.mean_reward,
            response_tokens=report.mean_response_tokens,
            tokens_per_s=generated / (now - self._recorded),
            staleness_mean=report.mean_staleness,
            staleness_max=report.max_staleness,
            queue_groups=waiting.waiting_groups,
            groups_failed=rollout.ledger.failed,
            groups_expired=rollout.ledger.expired,
            waited_s=report.waited_s,
            train_s=report.metrics.seconds,
            staged_s=update.staged_s,
            pause_s=update.longest_pause_s,
            loss=report.metrics.loss,
            grad_norm=report.metrics.grad_norm,
            lr=report.metrics.lr,
            clipped=report.metrics.clipped,
            kl_to_behaviour=report.metrics.kl_to_behaviour,
        )
        self._recorded, self._tokens_recorded = now, rollout.generated_tokens
        self._files.record(record)
        self._view.step(record)

    async def _watch(self) -> None:
        await self._crew.controller.watch.remote()

    async def _end_rollout_when_stopped(self) -> None:
        await self._stop.requested.wait()
        self._view.phase("stopping: finishing the step, then saving")
        await within(
            STATUS_TIMEOUT_S,
            self._crew.stop_rollout(),
            who="the control plane",
            doing="ending rollout",
        )


async def _all(*awaitables: Awaitable[object]) -> list[object]:
    return await asyncio.gather(*awaitables)


def _prompts(given: Iterable[Prompt] | None, spec: str | None, key: str) -> list[Prompt]:
    if given is not None:
        return as_prompts(given, where=key)
    if spec is None:
        raise ConfigError(f"{key}: missing; expected a .jsonl file or file.py:function")
    return load_prompts(spec)


def _reward(given: Reward | None, spec: str | None) -> Reward:
    if given is None and spec is None:
        raise ConfigError("reward.function: missing; expected file.py:function")
    reward = given if given is not None else load_function(spec)
    try:
        inspect.signature(reward).bind(None, None)
    except TypeError as error:
        raise PluginError(
            f"reward.function: {reward.__name__} must take a prompt and a completion: {error}"
        ) from error
    return reward


def _model_factory(config: Config) -> Callable[[Path], str]:
    """What gives the model's path, in a directory that the factory may fill."""
    path = config.model.path
    if path is not None:
        if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
            raise ModelError(f"model.path: {path} holds no config.json")
        return lambda _: path
    factory = load_function(config.model.factory)

    def make(directory: Path) -> str:
        directory.mkdir(parents=True)
        factory(directory)
        if not (directory / "config.json").is_file():
            raise ModelError(f"model.factory: {config.model.factory} saved no model")
        return str(directory)

    return make


def _stopped(files: RunFiles, stop: StopSignals, *, steps: int) -> RunResult:
    return RunResult(
        directory=str(files.directory),
        steps=steps,
        ended="stopped",
        exit_code=128 + stop.signal if stop.signal else 0,
    )
