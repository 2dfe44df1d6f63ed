"""Real vLLM, real signals: whatever dies, the run goes on, is right, and reaches its goal."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.vllm.conftest import Training

WAIT_TIMEOUT_S = 240.0
"""For a start or a recovery: how long they take depends on what else the machine does."""
FAST_CARE = (
    "generation.probe_every_s=0.5",
    "generation.suspect_after_s=3",
    "generation.dead_after_s=8",
    "generation.progress_every_s=0.2",
)


class Watched:
    """A run whose metrics are read while it goes on."""

    def __init__(self, training: Training, run_dir: Path) -> None:
        self._training = training
        self._metrics = run_dir / "metrics.jsonl"

    def records(self, kind: str) -> list[dict]:
        if not self._metrics.exists():
            return []
        lines = self._metrics.read_text().splitlines()
        return [record for line in lines if (record := json.loads(line))["kind"] == kind]

    def steps(self) -> list[dict]:
        return self.records("step")

    def until(self, condition: Callable[[list[dict]], object], what: str) -> None:
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while not condition(self.steps()):
            assert self._training.is_running, self._training.output
            assert time.monotonic() < deadline, f"{what}: {self.steps()[-3:]}"
            time.sleep(0.05)

    def until_recovered(self, after: int) -> None:
        """A step later than `after` saw an engine missing, or it was back at once; now all serve,
        and steps are taken."""
        self.until(
            lambda steps: len(steps) >= after + 3 and steps[-1]["engines"] == 2, "both engines"
        )


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_killed_and_wedged_processes_cost_no_group_and_the_model_still_learns(
    train, marked_processes, tmp_path: Path
) -> None:
    training = train(
        "steps=100000",
        "goal=null",
        "evaluation.every=10",
        "evaluation.prompts=100",
        "rollout.workers=2",
        "checkpoint.every=3",
        *FAST_CARE,
    )
    run_dir = tmp_path / "runs" / "arithmetic"
    run = Watched(training, run_dir)
    run.until(lambda steps: len(steps) >= 3, "the first steps")

    def strike(how: signal.Signals, *victims: int) -> None:
        before = len(run.steps())
        for victim in victims:
            os.kill(victim, how)
        run.until_recovered(before)
        run.until(lambda _: not marked_processes.alive().keys() & victims, "the victims' end")

    # The process of one engine, the actor of the other, and a worker: for a while nobody serves.
    core, worker, actor = (
        marked_processes.named(kind)[0]
        for kind in ("VLLM::EngineCore", "ray::RolloutWorker", "ray::GenerationActor")
    )
    if actor == parent_of(core):
        actor = marked_processes.named("ray::GenerationActor")[1]
    strike(signal.SIGKILL, core, worker, actor)
    strike(signal.SIGSTOP, marked_processes.named("VLLM::EngineCore")[0])
    strike(signal.SIGKILL, *marked_processes.named("ray::TrainerActor"))
    assert "the trainer goes on from step" in training.output

    after = len(run.steps())
    run.until(
        lambda _: any(
            record["step"] >= after and record["reward"] >= 0.6
            for record in run.records("evaluation")
        ),
        "the goal: six answers in ten",
    )
    os.killpg(training.pid, signal.SIGINT)
    assert training.wait() == 128 + signal.SIGINT, training.output
    samples = Counter(
        (record["step"], record["group"])
        for line in (run_dir / "rollouts.jsonl").read_text().splitlines()
        if (record := json.loads(line))
    )
    groups = Counter(group for _, group in samples)
    assert set(groups.values()) == {1}, "a group was trained on twice"
    steps = run.steps()
    learnt = Counter(step for step, _ in samples)
    assert learnt.keys() == {step["step"] for step in steps}
    # A trainer that dies with a batch learnt and its weights not sent takes that step along: it is
    # taken again, with another batch.
    again = [step for step, count in learnt.items() if count != 64]
    assert len(again) <= 1
    assert all(learnt[step] == 2 * 64 for step in again)
    assert set(samples.values()) == {8}
    assert all(step["groups_failed"] == 0 for step in steps)
    assert steps[-1]["engines"] == 2
    # What the deaths cost: some groups grew too old while an engine was missing, no more.
    assert max(step["staleness_max"] for step in steps) <= 2


def test_with_no_engine_left_the_run_ends_within_a_minute_and_says_why(
    train, marked_processes, tmp_path: Path
) -> None:
    training = train(
        "steps=100000",
        "goal=null",
        "warmup.steps=0",
        "evaluation.prompts=8",
        "generation.restart_engines=false",
        *FAST_CARE,
    )
    run = Watched(training, tmp_path / "runs" / "arithmetic")
    run.until(lambda steps: len(steps) >= 2, "the first steps")
    for victim in marked_processes.named("VLLM::EngineCore"):
        os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    assert training.wait(timeout_s=60.0) != 0
    assert time.monotonic() - began < 60.0
    last_lines = training.output.splitlines()[-4:]
    assert any("0 engines are left, fewer than the 1" in line for line in last_lines), last_lines
    assert any("engine-0" in line for line in last_lines)
    assert any("engine-1" in line for line in last_lines)
