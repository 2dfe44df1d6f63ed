"""Run: config -> placement -> actors -> training steps. The one place that composes.

    result = await Run(config).train()          # in a notebook
    result = areal_ray.train(config)            # in a script

Everything that the user brings is loaded and checked when the Run is made, before anything
starts. The training itself is `areal_ray.session`; this is about beginning and ending well.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import ray

from areal_ray.actors.crew import Crew
from areal_ray.actors.crew_specs import Task, pack_tokenizer
from areal_ray.actors.watching import MonitorView
from areal_ray.algorithms import Algorithm
from areal_ray.checkpoints import (
    LATEST,
    Checkpoint,
    Draws,
    draws_of,
    open_checkpoint,
)
from areal_ray.config import Config, check, resolve
from areal_ray.config_file import from_mapping
from areal_ray.data import load_prompts
from areal_ray.data.source import as_prompts, refuse_without_answers
from areal_ray.errors import ConfigError, ModelError, PluginError, described, root_cause
from areal_ray.observability.run_files import RunFiles, latest_checkpoint
from areal_ray.observability.terminal import open_view
from areal_ray.observability.trackers import load_trackers
from areal_ray.observability.tracking import Tracker
from areal_ray.observability.views import View, Views
from areal_ray.oversight import Overseer
from areal_ray.placement import Cluster, adopt, connect, plan, reserve
from areal_ray.placement.job import stop_warning
from areal_ray.plugins import load_function, pack
from areal_ray.rewards import Reward
from areal_ray.session import Ending, Session
from areal_ray.sights import Sights, keep_trace, leave_report
from areal_ray.stopping import StopRequested, StopSignals
from areal_ray.types import Prompt
from areal_ray.weights.memory import staging_memory
from areal_ray.workflows import Workflow, load_filter, load_workflow


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
        lines.append(f"  report           {self.directory}/report.html")
        return "\n".join(lines)


def train(
    config: Config,
    *,
    prompts: Iterable[Prompt] | None = None,
    held_out: Iterable[Prompt] | None = None,
    reward: Reward | None = None,
    workflow: Workflow | None = None,
    trackers: Sequence[Tracker] = (),
    resume: str | None = None,
) -> RunResult:
    """Train to the end, from a script. See `Run`."""
    run = Run(
        config,
        prompts=prompts,
        held_out=held_out,
        reward=reward,
        workflow=workflow,
        trackers=trackers,
        resume=resume,
    )
    try:
        return asyncio.run(run.train())
    except asyncio.CancelledError:
        raise KeyboardInterrupt("stopped at once") from None


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
        trackers: Sequence[Tracker] = (),
        resume: str | None = None,
    ) -> None:
        """`trackers`: besides those that the config names. `resume`: a checkpoint's directory, or
        `latest` for the last whole one of all runs with this config's name."""
        # Once more by the strict way: a config made in Python has not gone through it.
        config = from_mapping(msgspec.to_builtins(config))
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
        self._reward = checked_reward(_reward(reward, config.reward.function))
        self._workflow = workflow or load_workflow(config.rollout.workflow)
        self._filter = load_filter(config.rollout.filter)
        self._make_model = _model_factory(config)
        self._trackers = load_trackers(config.observability.trackers, trackers)
        self._resumed = _checkpoint(config, resume)
        # Looked up now, so that an unknown name is told before anything starts.
        Algorithm.of(config.algorithm)

    @property
    def prompts(self) -> Sequence[Prompt]:
        return self._prompts

    @property
    def held_out(self) -> Sequence[Prompt]:
        """What each evaluation uses."""
        return self._held_out

    def make_files(self) -> RunFiles:
        """In a directory of the run's own. Blocks: call it off the event loop."""
        return RunFiles(self._config, self._resumed, self._trackers)

    @property
    def task(self) -> Task:
        """What the user brings, as the actors get it."""
        return Task(
            prompts=self._prompts,
            demonstrations=self._demonstrations,
            packed_workflow=pack(self._workflow),
            packed_reward=pack(self._reward),
            packed_filter=pack(self._filter),
        )

    async def train(self, *, overseer: Overseer | None = None) -> RunResult:
        """Train to the end, the goal, or the first Ctrl-C; raises what made it fail."""
        files = await asyncio.to_thread(self.make_files)
        view = open_view(files.directory.name, self._config.steps)
        try:
            with StopSignals() as stop:
                result = await self._train(files, view, stop, overseer)
        except BaseException as error:
            view.close()
            await _close_after(files, error)
            how = "stopped" if isinstance(error, asyncio.CancelledError) else "failed"
            await asyncio.to_thread(leave_report, files.directory, how, error)
            # Raised as what it is, so that it stands on the last line of the last screen.
            if (cause := root_cause(error)) is error:
                raise
            raise cause from error
        view.close()
        stopped = StopRequested() if result.ended == "stopped" else None
        await asyncio.to_thread(files.close, stopped)
        await asyncio.to_thread(leave_report, files.directory, result.ended)
        return result

    async def _train(
        self, files: RunFiles, view: View, stop: StopSignals, overseer: Overseer | None
    ) -> RunResult:
        async with contextlib.AsyncExitStack() as ending:
            try:
                crew, config = await stop.race(self.begin(files, view, ending))
                stop.renew()
                view = Views(view, MonitorView(crew))
                session = await asyncio.to_thread(
                    Session,
                    config,
                    crew,
                    files,
                    view,
                    self._held_out,
                    stop,
                    self._resumed,
                    overseer,
                )
                if overseer is not None:
                    overseer.began(session)
                ended = await session.run()
            except StopRequested:
                return _stopped(files, stop, steps=0)
            except Exception as error:
                # At once: what is to be closed may take its time, or hang to its limit.
                view.warn(f"failed, closing the engines: {described(error)}")
                raise
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

    async def begin(
        self,
        files: RunFiles,
        view: View,
        ending: contextlib.AsyncExitStack,
        *,
        paused: bool = False,
    ) -> tuple[Crew, Config]:
        """Cluster and model side by side, then the actors; each undone by `ending`. `paused`:
        nothing is rolled out yet."""
        view.phase("connecting to Ray")
        connecting = asyncio.create_task(asyncio.to_thread(connect, self._config))
        ending.push_async_callback(_leave, connecting, view)
        model_path, packed_tokenizer = await asyncio.to_thread(self._prepare, files.base_model)
        cluster = await asyncio.shield(connecting)
        if warning := stop_warning():
            view.warn(warning)
        config = resolve(self._config, device=cluster.device)
        # Once more, now that the device is known.
        check(config, held_out_given=bool(self._held_out))
        await asyncio.to_thread(files.save_config, config)
        files.open_trackers(config)
        needed = plan(config, device=cluster.device)
        seats = await asyncio.to_thread(adopt, needed) or await reserve(needed)
        ending.push_async_callback(asyncio.to_thread, seats.release)
        view.phase(await asyncio.to_thread(staging_memory, config, model_path))
        crew = Crew(
            config,
            self.task,
            model_path=model_path,
            packed_tokenizer=packed_tokenizer,
            run_dir=files.directory,
            seats=seats,
            resumed=self._resumed,
        )
        if self._resumed is not None:
            await asyncio.to_thread(crew.checkpointing.store.forget_after, self._resumed.step)
            view.phase(f"going on from {self._resumed.directory}")
        ending.push_async_callback(keep_trace, crew, files.directory)
        ending.push_async_exit(crew)
        sights = Sights(config, files.directory)
        ending.push_async_exit(sights)
        await sights.show(crew, ray.get_runtime_context().gcs_address)
        view = Views(view, MonitorView(crew))
        has_warmup = config.warmup.steps and self._resumed is None
        warmup = f", {config.warmup.steps} supervised steps" if has_warmup else ""
        where = f" · dashboard {cluster.dashboard_url}" if cluster.dashboard_url else ""
        where += f" · report {sights.report_url}" if sights.report_url else ""
        view.phase(f"starting {config.generation.engines} engines and the trainer{warmup}{where}")
        await crew.start(view.phase, paused=paused)
        return crew, config

    def _prepare(self, directory: Path) -> tuple[str, bytes]:
        """The model's path, and its tokenizer as the workers get it."""
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # it would be drawn across the live view
        model_path = self._make_model(directory)
        return model_path, pack_tokenizer(self._config, model_path)


async def _close_after(files: RunFiles, error: BaseException) -> None:
    """What goes wrong while the files are closed must not hide what went wrong before."""
    try:
        await asyncio.to_thread(files.close, error)
    except Exception as late:  # noqa: BLE001 - told with the error that came first
        error.add_note(f"The run's files could not be closed: {described(late)}")


async def _leave(connecting: asyncio.Task[Cluster], view: View) -> None:
    """A thread that connects can't be cancelled: wait until it has, then undo it."""
    outcome = (await asyncio.gather(connecting, return_exceptions=True))[0]
    if isinstance(outcome, Cluster):
        view.phase("leaving the cluster")
        await asyncio.to_thread(outcome.leave)


def _prompts(given: Iterable[Prompt] | None, spec: str | None, key: str) -> list[Prompt]:
    if given is not None:
        return as_prompts(given, where=key)
    if spec is None:
        raise ConfigError(f"{key}: missing; expected a .jsonl file or file.py:function")
    return load_prompts(spec)


def _reward(given: Reward | None, spec: str | None) -> Reward:
    if given is None and spec is None:
        raise ConfigError("reward.function: missing; expected file.py:function")
    return given if given is not None else load_function(spec)


def checked_reward(reward: Reward) -> Reward:
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
        if (directory / "config.json").is_file():
            return str(directory)  # of the run that is resumed
        directory.mkdir(parents=True)
        factory(directory)
        if not (directory / "config.json").is_file():
            raise ModelError(f"model.factory: {config.model.factory} saved no model")
        return str(directory)

    return make


def _checkpoint(config: Config, resume: str | None) -> Checkpoint | None:
    if resume is None:
        return None
    if resume == LATEST:
        checkpoint = latest_checkpoint(config)
    else:
        checkpoint = open_checkpoint(Path(resume).resolve())
    if checkpoint.manifest.draws != draws_of(config):
        raise ConfigError(
            f"{checkpoint.directory} is of a run with {_shown(checkpoint.manifest.draws)}; "
            f"expected the same, got {_shown(draws_of(config))}"
        )
    return checkpoint


def _shown(draws: Draws) -> str:
    lora = f", with trainer.lora {msgspec.json.encode(draws.lora).decode()}"
    return (
        f"trainer.groups_per_step {draws.groups_per_step}, seed {draws.seed} and data.shuffle "
        f"{str(draws.shuffle).lower()}{lora if draws.lora.rank else ''}"
    )


def _stopped(files: RunFiles, stop: StopSignals, *, steps: int) -> RunResult:
    return RunResult(
        directory=str(files.directory),
        steps=steps,
        ended="stopped",
        exit_code=128 + stop.signal if stop.signal else 0,
    )
