"""The loop of a run, over a crew that is played: what it does when a save or the trainer fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from areal_ray.actors.rollout_controller import Evaluation
from areal_ray.config import Config
from areal_ray.config_file import from_mapping
from areal_ray.errors import CheckpointError, QueueClosed, TrainerLost
from areal_ray.session import Session
from areal_ray.staleness import LedgerCounts
from areal_ray.training.spec import StepMetrics
from areal_ray.types import Prompt

LOOP = SimpleNamespace(p99_ms=0.0)


def config(**changes: object) -> Config:
    base = {"name": "a", "model": {"path": "m"}, "steps": 6, "checkpoint": {"every": 2}}
    return from_mapping(base | changes)


class PlayedCrew:
    """Notes what it is asked for; `failing` steps lose the trainer, once each."""

    def __init__(self, failing: list[int] = [], unwritable: list[int] = []) -> None:  # noqa: B006
        self.asked: list[str] = []
        self._failing = list(failing)
        self._unwritable = list(unwritable)
        self.checkpointing = SimpleNamespace(take_snapshot=self.take_snapshot, write=self.write)
        self.writing = asyncio.Event()
        self.writing.set()
        self.evaluating = asyncio.Event()
        self.served = 0

    async def train_step(self, step: int, version: int) -> SimpleNamespace:
        self.asked.append(f"step {step} at {version}")
        if step in self._failing:
            self._failing.remove(step)
            raise TrainerLost("the trainer was lost")
        metrics = StepMetrics(
            loss=0.0, grad_norm=0.0, lr=0.0, tokens=1, clipped=0.0, kl_to_behaviour=0.0, seconds=0.0
        )
        return SimpleNamespace(
            step=step,
            mean_reward=0.0,
            mean_response_tokens=1.0,
            mean_staleness=0.0,
            max_staleness=0,
            staleness_tokens=[1],
            staleness_samples=[1],
            waited_s=0.0,
            metrics=metrics,
            group_ids=[],
            loop=LOOP,
        )

    async def update_weights(self, version: int) -> SimpleNamespace:
        self.asked.append(f"version {version}")
        self.served = version
        outcome = SimpleNamespace(
            version=version, staged_s=0.0, committed_s=0.0, longest_pause_s=0.0, attempts=1
        )
        return SimpleNamespace(outcome=outcome, loop=LOOP)

    async def note_version(self, version: int) -> None:
        self.asked.append(f"noted version {version}")

    async def recover_trainer(self, version: int) -> SimpleNamespace:
        self.asked.append(f"recovery to version {version}")
        self.served = version
        return SimpleNamespace(step=2)

    async def take_snapshot(self, step: int) -> SimpleNamespace:
        self.asked.append(f"snapshot {step}")
        return SimpleNamespace(step=step)

    async def write(self, cut: SimpleNamespace) -> None:
        await self.writing.wait()
        if cut.step in self._unwritable:
            raise CheckpointError("no space left on device")
        self.asked.append(f"written {cut.step}")

    async def evaluate(self, prompts: list[Prompt]) -> Evaluation:
        version = self.served
        self.asked.append(f"evaluation of {version}")
        await self.evaluating.wait()
        return Evaluation(version=version, prompts=len(prompts), mean_reward=0.0)

    async def trained(self, group_ids: list[int]) -> None:
        pass

    async def status(self) -> tuple[SimpleNamespace, SimpleNamespace]:
        counts = LedgerCounts()
        rollout = SimpleNamespace(ledger=counts, generated_tokens=0, engines=[], loops={})
        return rollout, SimpleNamespace(waiting_groups=0, held_bytes=0, loop=LOOP)


class PlayedView:
    def __init__(self) -> None:
        self.said: list[str] = []

    def warn(self, text: str) -> None:
        self.phase(text)

    def phase(self, text: str) -> None:
        self.said.append(text)

    def step(self, record: object) -> None:
        pass

    def evaluation(self, record: object) -> None:
        pass


def session(
    crew: PlayedCrew, *, held_out: list[Prompt] | None = None, **changes: object
) -> tuple[Session, PlayedView]:
    view = PlayedView()
    files = SimpleNamespace(record=lambda record: None)
    stop = SimpleNamespace(requested=asyncio.Event())
    return Session(config(**changes), crew, files, view, held_out or [], stop), view


async def settled() -> None:
    """Everything that can go on without something from outside has."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_checkpoints_are_taken_at_the_start_and_after_every_so_many_steps() -> None:
    crew = PlayedCrew()
    made, _ = session(crew)
    assert await made._learn() == "all steps done"
    await made._until_saved()
    assert [one for one in crew.asked if "snapshot" in one] == [
        f"snapshot {step}" for step in (0, 2, 4, 6)
    ]
    assert [one for one in crew.asked if "written" in one] == [
        f"written {step}" for step in (0, 2, 4, 6)
    ]


async def test_training_goes_on_while_one_is_written_and_the_next_waits_for_it() -> None:
    crew = PlayedCrew()
    crew.writing.clear()
    made, _ = session(crew)
    learning = asyncio.ensure_future(made._learn())
    await settled()
    # Up to the second snapshot, for which the first must be written.
    assert crew.asked[-1] == "version 2"
    assert not learning.done()
    crew.writing.set()
    await learning


async def test_one_that_can_not_be_written_is_told_and_the_run_goes_on() -> None:
    crew = PlayedCrew(unwritable=[2])
    made, view = session(crew)
    assert await made._learn() == "all steps done"
    await made._until_saved()
    (told,) = view.said
    assert told == (
        "the checkpoint of step 2 was not written: CheckpointError: no space left on device"
    )
    assert crew.asked[-1] == "written 6"


async def test_one_that_is_refused_is_told_and_the_run_goes_on() -> None:
    crew = PlayedCrew()
    made, view = session(crew)
    take = crew.checkpointing.take_snapshot

    async def refusing(step: int) -> SimpleNamespace:
        if step == 2:
            raise CheckpointError("the one before is still being written")
        return await take(step)

    crew.checkpointing.take_snapshot = refusing
    assert await made._learn() == "all steps done"
    await made._until_saved()
    assert [one for one in crew.asked if "written" in one] == [
        "written 0",
        "written 4",
        "written 6",
    ]
    (told,) = view.said
    assert told.startswith("the checkpoint of step 2 was not written: CheckpointError: the one")


EVALUATED = {"held_out": [Prompt(text="1+1=")], "checkpoint": {"every": 0}, "steps": 20}


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_the_trainer_goes_ahead_of_an_evaluation_as_far_as_staleness_lets_it(
    max_staleness: int,
) -> None:
    """Version 0 is evaluated: what the engines generate meanwhile is of version 0."""
    crew = PlayedCrew()
    made, _ = session(crew, **EVALUATED, rollout={"max_staleness": max_staleness})
    learning = asyncio.ensure_future(made._learn())
    await settled()
    steps = [f"step {step + 1} at {step}" for step in range(max_staleness + 1)]
    assert [one for one in crew.asked if "evaluation" not in one] == steps
    crew.evaluating.set()
    await learning
    behind = len(steps)
    assert crew.asked[behind + 1] == f"version {behind}"
    # From then on the engines keep up.
    assert [one for one in crew.asked if "version" in one] == [
        f"version {version}" for version in range(behind, 21)
    ]


async def test_what_is_evaluated_next_is_served_first() -> None:
    crew = PlayedCrew()
    made, _ = session(
        crew,
        **EVALUATED,
        evaluation={"every": 2},
        data={"held_out": "given"},
        rollout={"max_staleness": 5},
    )
    learning = asyncio.ensure_future(made._learn())
    await settled()
    # Step 2 is the next that is evaluated: its weights wait for the evaluation of version 0.
    assert sorted(crew.asked) == ["evaluation of 0", "step 1 at 0", "step 2 at 1"]
    crew.evaluating.set()
    await learning
    await settled()
    evaluated = [one for one in crew.asked if "evaluation" in one]
    assert evaluated == [f"evaluation of {version}" for version in range(0, 22, 2)]


async def test_a_run_that_is_stopped_while_the_trainer_is_ahead_catches_up() -> None:
    """Not the engines, which are about to be closed, and might not: only what is known."""
    crew = PlayedCrew()
    made, _ = session(crew, **EVALUATED, rollout={"max_staleness": 5})
    step = crew.train_step

    async def stopped_in_the_fourth(number: int, version: int) -> SimpleNamespace:
        if number == 4:
            raise QueueClosed("the queue is closed")
        return await step(number, version)

    crew.train_step = stopped_in_the_fourth
    crew.trainer = SimpleNamespace(finish=SimpleNamespace(remote=lambda _: settled()))
    made._files.model = "model"
    assert await made._learn() == "stopped"
    assert crew.served == 0
    await made.finish("stopped")
    assert "noted version 3" in crew.asked
    assert crew.served == 0


async def test_a_recovery_does_not_wait_for_an_evaluation_which_is_begun_anew() -> None:
    crew = PlayedCrew(failing=[2])
    changes = EVALUATED | {"checkpoint": {"every": 100}}
    made, _ = session(crew, **changes, rollout={"max_staleness": 5})
    learning = asyncio.ensure_future(made._learn())
    await settled()
    # The weights of the checkpoint become version 2, and that is what is evaluated.
    assert "recovery to version 2" in crew.asked
    assert [one for one in crew.asked if "evaluation" in one][-1] == "evaluation of 2"
    crew.evaluating.set()
    await learning


async def test_a_lost_trainer_is_recovered_and_costs_a_version() -> None:
    crew = PlayedCrew(failing=[4])
    made, view = session(crew)
    assert await made._learn() == "all steps done"
    lost = crew.asked.index("step 4 at 3")
    assert [one for one in crew.asked[lost:] if "written" not in one][:4] == [
        "step 4 at 3",
        "recovery to version 4",
        "step 4 at 4",
        "version 5",
    ]
    assert made.steps == 6
    assert "the trainer goes on from step 2" in view.said


async def test_a_trainer_that_dies_while_it_is_recovered_is_recovered_again() -> None:
    crew = PlayedCrew(failing=[4])
    recover, deaths = crew.recover_trainer, [TrainerLost("again"), TrainerLost("and again")]

    async def dying(version: int) -> SimpleNamespace:
        if deaths:
            raise deaths.pop()
        return await recover(version)

    crew.recover_trainer = dying
    made, _ = session(crew)
    assert await made._learn() == "all steps done"
    assert "step 4 at 4" in crew.asked


async def test_the_last_checkpoint_is_tried_again_if_it_could_not_be_written() -> None:
    crew = PlayedCrew(unwritable=[6])
    made, _ = session(crew)
    await made._learn()
    await made._until_saved()
    crew._unwritable.clear()
    await made._checkpoint()
    await made._until_saved()
    assert crew.asked[-1] == "written 6"


async def test_a_trainer_that_is_lost_too_often_ends_the_run() -> None:
    crew = PlayedCrew(failing=[1, 1, 2])
    made, _ = session(crew, trainer={"max_restarts": 2})
    with pytest.raises(TrainerLost):
        await made._learn()


async def test_without_checkpoints_a_lost_trainer_ends_the_run() -> None:
    crew = PlayedCrew(failing=[1])
    made, _ = session(crew, checkpoint={"every": 0})
    with pytest.raises(TrainerLost):
        await made._learn()
    assert crew.asked == ["step 1 at 0"]
