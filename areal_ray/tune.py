"""Sweeps with Ray Tune: any key of the config as a search space, each trial a run of its own.

    tuner = areal_ray.tune.tuner(
        config,
        {"trainer.lr": tune.loguniform(1e-5, 1e-3), "rollout.max_staleness": tune.choice([0, 2])},
        tune_config=tune.TuneConfig(
            metric="reward", mode="max", num_samples=8, scheduler=ASHAScheduler()
        ),
    )
    results = tuner.fit()

`tuner` gives Tune's own Tuner, and all of Tune goes with it. Tune reserves what a trial's run
needs, and the trial is held after each step until Tune has seen its numbers (those of
metrics.jsonl, and the last evaluation as `held_out_reward`): so a scheduler can stop it just there,
or have it saved, and population-based training can let it go on from another's checkpoint. Rollout
goes on meanwhile. What checkpoints a run writes (`checkpoint.every`) are Tune's too: a trial that
failed, or a sweep that was interrupted, goes on from them. A trial that is stopped early ends at
once: it exports no model, and saves no more than Tune asks for.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from ray import tune
from ray.tune.result import DONE, SHOULD_CHECKPOINT
from ray.tune.search.sample import Categorical, Domain, Function

from areal_ray.config import Config
from areal_ray.config_file import with_paths_from, with_values
from areal_ray.errors import ConfigError
from areal_ray.held_run import HeldRun, Trains
from areal_ray.observability.run_files import take_over
from areal_ray.observability.tracking import scalars
from areal_ray.placement import connect, device_of, plan
from areal_ray.plugins import pack, unpack
from areal_ray.rewards import Reward
from areal_ray.run import Run
from areal_ray.session import Session
from areal_ray.types import Prompt
from areal_ray.workflows import Workflow

Space = Mapping[str, object]
"""Keys of the config by their path, `trainer.lr`, each with a value or one of Tune's domains."""

OF_EACH_TRIAL = ("name", "runs_dir")
"""Keys that can't be searched: a trial's run is called `<name>-<trial id>`."""


def tuner(
    config: Config,
    space: Space,
    *,
    tune_config: tune.TuneConfig,
    run_config: tune.RunConfig | None = None,
    prompts: Iterable[Prompt] | None = None,
    held_out: Iterable[Prompt] | None = None,
    reward: Reward | None = None,
    workflow: Workflow | None = None,
) -> tune.Tuner:
    """A Tuner whose trials train `config` with what is drawn from `space`.

    Joins the cluster, or starts a local one that can hold the largest trial and ends with this
    process. Everything that can be checked beforehand is. Without a `run_config` of your own the
    sweep's files are in `<runs_dir>/<name>-sweep`, where `restore` finds them.
    """
    task = _Task.of(prompts, held_out, reward, workflow)
    config = _anchored(config)
    _prepare(config, space, task)
    return tune.Tuner(
        _trainable(config, task),
        param_space=dict(space),
        tune_config=tune_config,
        run_config=run_config or _run_config(config),
    )


def restore(
    path: str | Path,
    config: Config,
    space: Space,
    *,
    prompts: Iterable[Prompt] | None = None,
    held_out: Iterable[Prompt] | None = None,
    reward: Reward | None = None,
    workflow: Workflow | None = None,
    resume_errored: bool = False,
) -> tune.Tuner:
    """The sweep in `path`, to be taken up again with all else as it was: trials that had not ended
    go on from their checkpoints, those that failed too if `resume_errored`."""
    task = _Task.of(prompts, held_out, reward, workflow)
    config = _anchored(config)
    _prepare(config, space, task)
    return tune.Tuner.restore(
        str(Path(path).resolve()), _trainable(config, task), resume_errored=resume_errored
    )


def trainable(
    config: Config,
    *,
    prompts: Iterable[Prompt] | None = None,
    held_out: Iterable[Prompt] | None = None,
    reward: Reward | None = None,
    workflow: Workflow | None = None,
) -> type[tune.Trainable]:
    """What `tuner` lets Tune try, with the resources that each trial needs: for a Tuner that you
    make yourself, after `ray.init`."""
    return _trainable(_anchored(config), _Task.of(prompts, held_out, reward, workflow))


class MakeRun(Protocol):
    def __call__(self, config: Config, resume: str | None) -> Trains: ...


class SweepTrial(tune.Trainable):
    """One trial, in a process of its own, with its run in a thread beside."""

    def setup(self, config: dict[str, object], base: Config, make_run: MakeRun) -> None:
        self._base = base
        self._make_run = make_run
        self._resume: str | None = None
        self._run: HeldRun | None = None

    def step(self) -> dict[str, float | str | bool]:
        if self._run is None:
            self._run = HeldRun(self._make_run(self._run_config, self._resume))
        goes_on = self._run.advance()
        session = self._run.session
        return numbers(session) | {DONE: not goes_on, SHOULD_CHECKPOINT: session.is_saved}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        if self._run is None:
            raise RuntimeError("a trial that has taken no step can't be saved")
        saved = self._run.save()
        shutil.copytree(saved, checkpoint_dir, copy_function=_link_or_copy, dirs_exist_ok=True)

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Of this trial, or of another that did better: it goes on as this one's either way."""
        self._resume = str(take_over(Path(checkpoint_dir), self._run_config).directory)

    def cleanup(self) -> None:
        if self._run is not None:
            self._run.stop()

    @property
    def _run_config(self) -> Config:
        return trial_config(self._base, self.config, self.trial_id)

    def __repr__(self) -> str:
        return f"SweepTrial[{self.trial_id} step {self.training_iteration}]"


def trial_config(base: Config, values: Space, trial_id: str) -> Config:
    """Strict: what Tune has drawn must be what the keys expect."""
    config = with_values(base, {key: _plain(value) for key, value in values.items()})
    if not config.checkpoint.every:
        raise ConfigError(
            "checkpoint.every: expected at least 1 in a sweep, got 0: Tune saves every trial's end"
        )
    return msgspec.structs.replace(config, name=f"{base.name}-{trial_id}")


def resources(base: Config, values: Space) -> tune.PlacementGroupFactory:
    """The run's own bundles; the trial's process computes nothing and needs none."""
    try:
        config = trial_config(base, values, trial_id="")
    except ConfigError:
        config = base  # the trial will be refused, and tell
    bundles = plan(config, device=device_of(config)).bundles
    return tune.PlacementGroupFactory([{}, *(bundle.resources for bundle in bundles)])


def numbers(session: Session) -> dict[str, float | str]:
    """What Tune is told of a step."""
    record = session.last_step
    if record is None:
        raise RuntimeError("the run has taken no step")
    told: dict[str, float | str] = {"step": record.step, "run_dir": str(session.directory)}
    told |= dict(scalars(record))
    if session.is_evaluated:
        done = session.evaluations
        told["held_out_reward"] = done[-1].reward if done else float("nan")
    return told


class _Task(msgspec.Struct, frozen=True):
    """What the user brings besides the config, in a form that reaches other processes."""

    prompts: list[Prompt] | None
    held_out: list[Prompt] | None
    packed_reward: bytes | None
    packed_workflow: bytes | None

    @staticmethod
    def of(
        prompts: Iterable[Prompt] | None,
        held_out: Iterable[Prompt] | None,
        reward: Reward | None,
        workflow: Workflow | None,
    ) -> _Task:
        return _Task(
            prompts=None if prompts is None else list(prompts),
            held_out=None if held_out is None else list(held_out),
            packed_reward=None if reward is None else pack(reward),
            packed_workflow=None if workflow is None else pack(workflow),
        )

    def run(self, config: Config, resume: str | None) -> Run:
        return Run(
            config,
            prompts=self.prompts,
            held_out=self.held_out,
            reward=None if self.packed_reward is None else unpack(self.packed_reward),
            workflow=None if self.packed_workflow is None else unpack(self.packed_workflow),
            resume=resume,
        )


def _trainable(config: Config, task: _Task) -> type[tune.Trainable]:
    known = tune.with_parameters(SweepTrial, base=config, make_run=task.run)
    made = tune.with_resources(known, partial(resources, config))
    made.__qualname__ = SweepTrial.__qualname__  # what Ray's dashboard calls the trial's actor
    return made


def _run_config(config: Config) -> tune.RunConfig:
    directory = Path(config.runs_dir)
    number = 1
    name = f"{config.name}-sweep"
    while (directory / name).exists():
        number += 1
        name = f"{config.name}-sweep-{number}"
    return tune.RunConfig(
        name=name,
        storage_path=str(directory),
        checkpoint_config=tune.CheckpointConfig(num_to_keep=config.checkpoint.keep),
    )


def _anchored(config: Config) -> Config:
    """Trials work in directories of their own: files are named from where the sweep was made."""
    config = with_paths_from(config, Path.cwd())
    return msgspec.structs.replace(config, runs_dir=str(Path(config.runs_dir).resolve()))


def _prepare(config: Config, space: Space, task: _Task) -> None:
    """Refuse what can't work before anything starts, then have a cluster for the largest trial."""
    examples = list(_examples(config, space))
    task.run(examples[0], None)  # which loads and checks all that the user brings
    connect(max(examples, key=lambda one: plan(one, device="cpu").cpus))


def _examples(base: Config, space: Space) -> Iterator[Config]:
    """Configs in which all occurs that `space` names; refuses what is wrong in it."""
    problems = [
        f"{key}: can't be searched: each trial has its own" for key in OF_EACH_TRIAL if key in space
    ]
    values = {key: list(_example_values(base, key, value)) for key, value in space.items()}
    for key, some in values.items():
        for value in some:
            try:
                with_values(base, {key: value})
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    first = trial_config(base, {key: some[0] for key, some in values.items()}, trial_id="")
    yield first
    for key, (_, *others) in values.items():
        yield from (trial_config(first, {key: value}, trial_id="") for value in others)


def _example_values(base: Config, key: str, value: object) -> Iterable[object]:
    """All of them, if they are named one by one; one of a range; what the config has, if only a
    function of the user's knows them."""
    match value:
        case {"grid_search": [*choices]} | Categorical(categories=choices):
            return [_plain(choice) for choice in choices]
        case Function():
            return [_current(base, key)]
        case Domain():
            return [_plain(value.sample(random_state=0))]
    return [_plain(value)]


def _current(config: Config, key: str) -> object:
    """None for a key that is unknown: it is refused then."""
    here: object = msgspec.to_builtins(config)
    for name in key.split("."):
        here = here.get(name) if isinstance(here, dict) else None
    return here


def _plain(value: object) -> object:
    """Tune draws some numbers as numpy's."""
    return value.item() if isinstance(value, np.generic) else value


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
