"""However a run ends: the exit code tells, the last screen says why, no process stays behind.

One Ctrl-C is in test_chaos.py, where a run that was hard to kill ends by it; a trainer that dies
for good, and a run that is told to stop, are in test_job_submit.py.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.vllm.struck import FAST_CARE
from tests.vllm.training import wait_until_empty

QUICK = (
    "warmup.steps=0",
    "goal=null",
    "evaluation.every=0",
    "evaluation.prompts=8",
    "generation.engines=1",
    "steps=100000",
)


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


def test_with_no_engine_left_the_run_ends_within_a_minute_and_says_why(
    train, marked_processes
) -> None:
    training = train(*QUICK, "generation.engines=2", "generation.restart_engines=false", *FAST_CARE)
    training.read_until("step 2/")
    cores = marked_processes.named("VLLM::EngineCore")
    assert len(cores) == 2
    for victim in cores:
        os.kill(victim, signal.SIGKILL)
    assert training.wait(timeout_s=60.0) == 1, training.output
    last_lines = training.output.splitlines()[-4:]
    assert any("0 engines are left, fewer than the 1" in line for line in last_lines), last_lines
    assert any("engine-0" in line for line in last_lines)
    assert any("engine-1" in line for line in last_lines)
    assert wait_until_empty(marked_processes.alive) == {}
