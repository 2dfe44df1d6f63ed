"""A real run that is struck again and again, recovers each time, and ends by Ctrl-C.

It takes minutes, so that there is one: tests look at what it did and what it left.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from areal_ray.checkpoints import CheckpointStore
from tests.conftest import MarkedProcesses
from tests.vllm.training import Training, step_records, wait_until_empty

WAIT_TIMEOUT_S = 240.0
"""For a start or a recovery: how long they take depends on what else the machine does."""
FAST_CARE = (
    "generation.probe_every_s=0.5",
    "generation.suspect_after_s=3",
    "generation.dead_after_s=8",
    "generation.progress_every_s=0.2",
)
LEARNING = ("warmup.steps=700", "trainer.lr=2e-4")
"""Half the demo's imitation, and twice its rate, which is noisier: a lower goal comes sooner."""


@dataclass(frozen=True)
class StruckRun:
    directory: Path
    output: str
    exit_code: int
    listened_on: set[str]
    """The addresses, while it ran."""
    left_behind: dict[int, str]
    """Processes, a while after its end."""

    @property
    def recoveries(self) -> int:
        """Of the trainer."""
        return self.output.count("the trainer goes on from step")

    @property
    def versions_ahead(self) -> int:
        """How many versions more than steps there were in the end: each recovery takes one, and so
        does a step that died with the trainer before its weights were sent, and is taken again."""
        last = CheckpointStore(self.directory / "checkpoints", keep=1).latest().manifest
        return last.version - last.step

    def steps(self) -> list[dict]:
        return step_records(self.directory)


class Watched:
    """A run whose metrics are read while it goes on."""

    def __init__(self, training: Training, run_dir: Path, marked: MarkedProcesses) -> None:
        self._training = training
        self._run_dir = run_dir
        self._marked = marked

    def until(self, condition: Callable[[list[dict]], object], what: str) -> None:
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while not condition(step_records(self._run_dir)):
            assert self._training.is_running, self._training.output
            said = f"{what}: {step_records(self._run_dir)[-3:]}"
            assert time.monotonic() < deadline, said
            time.sleep(0.05)

    def strike(self, victims: dict[int, signal.Signals]) -> None:
        """Returns once the victims are gone, all engines serve, and steps are taken."""
        before = len(step_records(self._run_dir))
        for victim, how in victims.items():
            os.kill(victim, how)
        self.until(
            lambda steps: len(steps) >= before + 3 and steps[-1]["engines"] == 2, "both engines"
        )
        self.until(lambda _: not self._marked.alive().keys() & victims, "the victims' end")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def strike_a_run(directory: Path, marked: MarkedProcesses) -> StruckRun:
    training = Training(
        directory,
        marked.environment,
        "steps=100000",
        *LEARNING,
        "goal=null",
        "evaluation.every=10",
        "evaluation.prompts=100",
        "rollout.workers=2",
        "checkpoint.every=3",
        "trainer.ranks=2",
        *FAST_CARE,
    )
    run = Watched(training, training.run_dir, marked)
    run.until(lambda steps: len(steps) >= 3, "the first steps")
    # The process of one engine, the actor of the other, and a worker: for a while nobody serves.
    core, worker, actor = (
        marked.named(kind)[0]
        for kind in ("VLLM::EngineCore", "ray::RolloutWorker", "ray::GenerationActor")
    )
    if actor == parent_of(core):
        actor = marked.named("ray::GenerationActor")[1]
    run.strike(dict.fromkeys((core, worker, actor), signal.SIGKILL))
    # One engine is wedged, and comes back while the trainer does.
    (first_rank,) = marked.named("ray::TrainerActor")
    run.strike({marked.named("VLLM::EngineCore")[0]: signal.SIGSTOP, first_rank: signal.SIGKILL})
    (other_rank,) = marked.named("ray::TrainerRank")
    run.strike({other_rank: signal.SIGKILL})
    listened_on = marked.listening()
    # As a terminal does: to the whole foreground group.
    os.killpg(training.pid, signal.SIGINT)
    return StruckRun(
        directory=training.run_dir,
        exit_code=training.wait(),
        output=training.output,
        listened_on=listened_on,
        left_behind=wait_until_empty(marked.alive),
    )
