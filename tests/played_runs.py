"""Runs that are played: no model and no actor, but real files and real checkpoints."""

from __future__ import annotations

from pathlib import Path

import msgspec

from areal_ray.checkpoints import BOOK, CHECKPOINTS, CheckpointStore, draws_of, open_checkpoint
from areal_ray.config import Config
from areal_ray.observability.records import EvaluationRecord, StepRecord
from areal_ray.observability.run_files import RunFiles
from areal_ray.oversight import Overseer
from areal_ray.stopping import StopRequested

ORIGIN = "origin"
"""In a checkpoint: who wrote it."""
FATAL_SEED = 13


def step_record(step: int, reward: float) -> StepRecord:
    zeros = {
        name: 0
        for name in StepRecord.__struct_fields__
        if name not in ("step", "reward", "loop_lag_p99_ms")
    }
    record = {"kind": "step", "step": step, "reward": reward, "loop_lag_p99_ms": {"queue": 0.5}}
    lists = {"staleness_tokens": [], "staleness_samples": [], "mismatch": None}
    return msgspec.convert(zeros | record | lists, StepRecord)


class PlayedSession:
    is_evaluated = False

    def __init__(self, config: Config, files: RunFiles, steps: int) -> None:
        self._config = config
        self._store = CheckpointStore(files.directory / CHECKPOINTS, keep=config.checkpoint.keep)
        self.directory = files.directory
        self.steps = steps
        self.evaluations: list[EvaluationRecord] = []
        self.last_step: StepRecord | None = None
        self._saved_step = -1

    @property
    def is_saved(self) -> bool:
        return self._saved_step == self.steps

    async def save(self) -> None:
        partial = self._store.begin(self.steps)
        (partial / BOOK).write_text("{}")
        (partial / ORIGIN).write_text(self._config.name)
        self._store.commit(self.steps, self.steps, draws_of(self._config))
        self._saved_step = self.steps


class PlayedRun:
    """Its reward is its learning rate. With the fatal seed it fails after its third step, unless
    it goes on from a checkpoint."""

    def __init__(self, config: Config, resume: str | None = None) -> None:
        self._config = config
        self._resumed = None if resume is None else open_checkpoint(Path(resume))
        self.has_ended = False

    async def train(self, *, overseer: Overseer | None = None) -> None:
        files = RunFiles(self._config, self._resumed)
        files.save_config(self._config)
        steps = 0 if self._resumed is None else self._resumed.step
        session = PlayedSession(self._config, files, steps)
        overseer.began(session)
        try:
            await self._learn(files, session, overseer)
        except StopRequested:
            pass
        finally:
            self.has_ended = True
            files.close()

    async def _learn(self, files: RunFiles, session: PlayedSession, overseer: Overseer) -> None:
        every = self._config.checkpoint.every
        while session.steps < self._config.steps:
            session.steps += 1
            session.last_step = step_record(session.steps, self._config.trainer.lr)
            files.record(session.last_step)
            if every and session.steps % every == 0:
                await session.save()
            is_fatal = self._config.seed == FATAL_SEED and self._resumed is None
            if is_fatal and session.steps == 3:
                raise RuntimeError("the third step was fatal")
            if session.steps < self._config.steps:
                await overseer.after_step(session)
        if every and not session.is_saved:
            await session.save()
