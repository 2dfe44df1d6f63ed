"""Runs in processes of their own, as a user starts them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
LENGTH_REWARD = f"{Path(__file__).with_name('length_reward.py')}:closeness"


class Training:
    """`areal-ray train` of the arithmetic example in a process of its own: its runs, and all that
    it says, are in `directory`."""

    def __init__(self, directory: Path, environment: dict[str, str], *arguments: str) -> None:
        self.run_dir = directory / "runs" / "arithmetic"
        self._log = directory / "said.txt"
        example, runs_dir = EXAMPLES / "arithmetic.yaml", f"runs_dir={directory / 'runs'}"
        with self._log.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "areal_ray.cli", "train", example, runs_dir, *arguments],
                env={**environment, "PYTHONFAULTHANDLER": "1"},
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        return self._log.read_text()

    def read_until(self, text: str, timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.is_running, f"ended without {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} in time:\n{self.output}"
            time.sleep(0.05)

    def wait(self, timeout_s: float = 300.0) -> int:
        """Returns the exit code."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            # Python's fault handler then says where each thread is.
            self._process.send_signal(signal.SIGABRT)
            self._process.wait()
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.output}") from None


def wait_until_empty(alive: Callable[[], dict[int, str]], timeout_s: float = 20.0) -> dict:
    """What is still alive after at most `timeout_s`: nothing, if all is well."""
    deadline = time.monotonic() + timeout_s
    while (left := alive()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def step_records(run_dir: Path) -> list[dict]:
    """Whole lines only: the last may be on its way."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists():
        return []
    whole, _, _ = metrics.read_text().rpartition("\n")
    records = [json.loads(line) for line in whole.splitlines()]
    return [record for record in records if record["kind"] == "step"]
