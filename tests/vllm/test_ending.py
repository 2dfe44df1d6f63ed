"""However a run ends: the exit code tells, the last screen says why, no process stays behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.vllm.conftest import wait_until_empty

QUICK = (
    "warmup.steps=0",
    "goal=null",
    "evaluation.every=0",
    "evaluation.prompts=8",
    "generation.engines=1",
    "steps=100000",
)


def test_one_ctrl_c_saves_the_model_and_leaves_nothing_behind(
    train, marked_processes, tmp_path: Path
) -> None:
    training = train(*QUICK)
    training.read_until("step 3/")
    assert any("VLLM" in command for command in marked_processes.alive().values())
    # A local cluster and all that runs in it listen on loopback only: 127.0.0.1, plain or in v6.
    assert marked_processes.listening() <= {"0100007F", "0000000000000000FFFF00000100007F"}
    # As a terminal does: to the whole foreground group.
    os.killpg(training.pid, signal.SIGINT)
    assert training.wait() == 128 + signal.SIGINT, training.output
    assert "areal-ray: stopped after" in training.output
    assert (tmp_path / "runs" / "arithmetic" / "model" / "model.safetensors").is_file()
    assert (tmp_path / "runs" / "arithmetic" / "reward.png").is_file()
    assert wait_until_empty(marked_processes.alive) == {}


def test_two_ctrl_c_stop_at_once_and_leave_nothing_behind(
    train, marked_processes, tmp_path: Path
) -> None:
    training = train(*QUICK)
    training.read_until("step 3/")
    # With the trainer stopped in its tracks the clean way would take many minutes.
    (trainer,) = marked_processes.named("ray::TrainerActor")
    os.kill(trainer, signal.SIGSTOP)
    os.kill(training.pid, signal.SIGINT)
    training.read_until("stopping")
    os.kill(training.pid, signal.SIGINT)
    assert training.wait(timeout_s=30.0) == 128 + signal.SIGINT, training.output
    assert training.output.rstrip().endswith("areal-ray: stopped at once")
    assert not (tmp_path / "runs" / "arithmetic" / "model").exists()
    assert wait_until_empty(marked_processes.alive) == {}


def test_ctrl_c_while_everything_starts_ends_it(train, marked_processes) -> None:
    training = train(*QUICK)
    training.read_until("starting 1 engines")
    time.sleep(5.0)  # into the middle of the engine's start
    os.kill(training.pid, signal.SIGINT)
    assert training.wait(timeout_s=60.0) == 128 + signal.SIGINT, training.output
    assert wait_until_empty(marked_processes.alive) == {}


def test_without_checkpoints_a_killed_trainer_ends_the_run_with_its_name(
    train, marked_processes
) -> None:
    training = train(*QUICK, "checkpoint.every=0")
    training.read_until("step 3/")
    (pid,) = marked_processes.named("ray::TrainerActor")
    os.kill(pid, signal.SIGKILL)
    assert training.wait(timeout_s=90.0) == 1, training.output
    last = training.output[training.output.rindex("areal-ray: the run failed: ") :]
    assert "trainer" in last
    assert wait_until_empty(marked_processes.alive) == {}
