"""A run that is held after each step."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from played_runs import FATAL_SEED, PlayedRun
from test_session import PlayedCrew, session

from areal_ray.checkpoints import open_checkpoint
from areal_ray.config import Config
from areal_ray.config_file import from_mapping
from areal_ray.errors import CheckpointError
from areal_ray.held_run import HeldRun
from areal_ray.session import Session
from areal_ray.stopping import StopRequested
from areal_ray.types import Prompt


def config(directory: Path, **changes: object) -> Config:
    base = {"name": "a", "runs_dir": str(directory), "steps": 4, "checkpoint": {"every": 0}}
    return from_mapping(base | changes)


def test_it_takes_a_step_whenever_it_is_told_to(tmp_path: Path) -> None:
    run = PlayedRun(config(tmp_path))
    held = HeldRun(run)
    for step in (1, 2, 3):
        assert held.advance()
        assert held.session.last_step.step == step
        assert not run.has_ended
    # The last one is not waited for: the run ends by itself.
    assert not held.advance()
    assert held.session.last_step.step == 4
    assert run.has_ended
    held.stop()


def test_it_ends_where_it_is_held(tmp_path: Path) -> None:
    run = PlayedRun(config(tmp_path))
    held = HeldRun(run)
    held.advance()
    held.stop()
    assert run.has_ended
    assert held.session.steps == 1


def test_one_that_never_began_has_nothing_to_end(tmp_path: Path) -> None:
    HeldRun(PlayedRun(config(tmp_path))).stop()


def test_it_is_saved_at_the_step_that_it_has_reached(tmp_path: Path) -> None:
    held = HeldRun(PlayedRun(config(tmp_path)))
    held.advance()
    held.advance()
    assert open_checkpoint(held.save()).step == 2
    held.stop()


def test_after_its_end_what_it_has_saved_itself_is_there(tmp_path: Path) -> None:
    held = HeldRun(PlayedRun(config(tmp_path, steps=2, checkpoint={"every": 2})))
    held.advance()
    assert not held.advance()
    assert open_checkpoint(held.save()).step == 2


def test_a_checkpoint_of_an_earlier_step_is_not_taken_for_this_one(tmp_path: Path) -> None:
    held = HeldRun(PlayedRun(config(tmp_path, steps=3, checkpoint={"every": 2})))
    while held.advance():
        pass
    shutil.rmtree(held.save())
    with pytest.raises(CheckpointError, match="holds none of step 3"):
        held.save()


def test_what_makes_it_fail_is_raised_where_it_is_waited_for(tmp_path: Path) -> None:
    held = HeldRun(PlayedRun(config(tmp_path, seed=FATAL_SEED)))
    held.advance()
    held.advance()
    with pytest.raises(RuntimeError, match="the third step was fatal"):
        held.advance()
    held.stop()


class FailsWhileHeld(PlayedRun):
    async def train(self, *, overseer: HeldRun) -> None:
        training = asyncio.create_task(super().train(overseer=overseer))
        while overseer._reached.empty():
            await asyncio.sleep(0)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        raise RuntimeError("the control plane is gone")


def test_one_that_fails_while_it_is_held_tells_so_next_time(tmp_path: Path) -> None:
    held = HeldRun(FailsWhileHeld(config(tmp_path)))
    held.advance()
    with pytest.raises(RuntimeError, match="the control plane is gone"):
        held.advance()


class Noting:
    """An overseer who lets a run take `steps` steps."""

    def __init__(self, steps: int = 100) -> None:
        self._steps = steps
        self.seen: list[int] = []

    def began(self, session: Session) -> None:
        pass

    async def after_step(self, session: Session) -> None:
        self.seen.append(session.last_step.step)
        if len(self.seen) == self._steps:
            raise StopRequested


async def test_an_overseer_sees_each_step_but_the_last() -> None:
    made, _ = session(PlayedCrew(), steps=4)
    made._overseer = overseer = Noting()
    assert await made._learn() == "all steps done"
    assert overseer.seen == [1, 2, 3]


async def test_an_overseer_ends_a_run_there_and_then() -> None:
    crew = PlayedCrew()
    made, _ = session(crew, steps=4)
    made._overseer = Noting(steps=2)
    with pytest.raises(StopRequested):
        await made._learn()
    assert "step 3 at 2" not in crew.asked


async def test_what_is_saved_on_demand_is_of_a_version_that_is_served() -> None:
    crew = PlayedCrew()
    made, _ = session(crew, held_out=[Prompt(text="a", answer="b")], checkpoint={"every": 0})
    made._begin_evaluation()
    await made._step()
    assert crew.served == 0, "the engines stay at the version that is evaluated"
    saving = asyncio.create_task(made.save())
    await asyncio.sleep(0)
    assert "snapshot 1" not in crew.asked
    crew.evaluating.set()
    await saving
    assert crew.asked[-3:] == ["version 1", "snapshot 1", "written 1"]
    assert made.is_saved


async def test_a_save_on_demand_that_fails_is_told() -> None:
    made, _ = session(PlayedCrew(unwritable=[1]), checkpoint={"every": 0})
    await made._step()
    with pytest.raises(CheckpointError, match="step 1 could not be written"):
        await made.save()
