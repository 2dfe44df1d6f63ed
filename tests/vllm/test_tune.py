"""The example of a sweep, with real engines: four trials, interrupted, taken up again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from areal_ray.checkpoints import open_checkpoint
from areal_ray.observability.curve import read_metrics
from areal_ray.observability.records import StepRecord
from tests.vllm.training import EXAMPLES, wait_until_empty

STEPS = 6
QUICK = (
    f"steps={STEPS}",
    "checkpoint.every=2",
    "checkpoint.keep=9",
    "warmup.steps=300",
    "trainer.groups_per_step=32",
    "evaluation.every=0",
    "evaluation.prompts=8",
)


class Sweep:
    """`python tune_sweep.py` in a process of its own."""

    def __init__(self, directory: Path, environment: dict[str, str], *arguments: str) -> None:
        self._log = directory / "said.txt"
        with self._log.open("ab") as said:
            self._process = subprocess.Popen(
                [sys.executable, EXAMPLES / "tune_sweep.py", *arguments],
                cwd=directory,
                env=environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)

    def wait_for_a_checkpoint(self, sweep: Path) -> Path:
        deadline = time.monotonic() + 120
        while not (found := sorted(sweep.glob("SweepTrial_*/checkpoint_*/manifest.json"))):
            assert self._process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)
        return found[0].parent

    def interrupt(self) -> None:
        os.kill(self._process.pid, signal.SIGINT)


def test_a_sweep_of_four_trials_is_interrupted_taken_up_again_and_stops_the_poor_ones_early(
    marked_processes, tmp_path: Path
) -> None:
    files = tmp_path / "runs" / "arithmetic-sweep"
    first = Sweep(tmp_path, marked_processes.environment, *QUICK)
    reported = first.wait_for_a_checkpoint(files)
    assert open_checkpoint(reported).step == 2
    first.interrupt()
    assert first.wait(timeout_s=60) == 130, first.output
    assert f"interrupted; to go on: --resume {files}" in first.output
    assert wait_until_empty(marked_processes.alive) == {}

    again = Sweep(tmp_path, marked_processes.environment, *QUICK, "--resume", str(files))
    assert again.wait(timeout_s=480) == 0, again.output
    last_table = again.output[again.output.rindex("the sweep") :]
    assert last_table.count("stopped early") + last_table.count("all steps done") == 4
    assert "stopped early" in last_table
    assert "best: trainer.lr=" in last_table
    assert wait_until_empty(marked_processes.alive) == {}

    runs = sorted((tmp_path / "runs").glob("arithmetic-*_0000?"))
    assert len(runs) == 4
    for run in runs:
        steps = [
            record.step
            for record in read_metrics(run / "metrics.jsonl")
            if isinstance(record, StepRecord)
        ]
        # Also of the one that was interrupted, which went on from what it had saved.
        assert steps == list(range(1, len(steps) + 1))
        # Not one step further than Tune let it go.
        assert len(steps) in (4, STEPS)
        assert (run / "model").exists() == (len(steps) == STEPS)
    for trial in sorted(files.glob("SweepTrial_*")):
        assert len((trial / "result.json").read_text().splitlines()) >= 4
