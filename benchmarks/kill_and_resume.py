"""Whether a run survives the death of all its processes: killed at random moments, and resumed.

The arithmetic example, asynchronous, with groups trained on in the order in which they were drawn.
Each time a random while after its first new step, every process of it (driver, Ray's own, actors,
engines) is killed -9, and the run resumed, until it has been killed often enough; then it goes on
to its goal. In the end the groups that were trained on must be those of a run that nobody killed:
each once, in the order of drawing, without a gap.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from common import EXAMPLE, say, show

from areal_ray.observability.curve import read_metrics
from areal_ray.observability.records import EvaluationRecord, StepRecord

ARITHMETIC = EXAMPLE.with_suffix(".yaml")
MARKER = "AREAL_RAY_BENCHMARK"
LONGEST_WHILE_S = 8.0


class KilledRun:
    def __init__(self, directory: Path, overrides: list[str]) -> None:
        self._arguments = [str(ARITHMETIC), f"runs_dir={directory}", *overrides]
        self._mark = uuid.uuid4().hex
        self.directory = directory / "arithmetic"

    def begin(self, *, resume: bool) -> subprocess.Popen[bytes]:
        options = ["--resume"] if resume else []
        return subprocess.Popen(
            [sys.executable, "-m", "areal_ray.cli", "train", *self._arguments, *options],
            env={**os.environ, MARKER: self._mark},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def kill(self) -> None:
        """Everything, and again what was just being started."""
        while victims := self._alive():
            for pid in victims:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)

    def records(self, kind: type) -> list:
        path = self.directory / "metrics.jsonl"
        if not path.exists():
            return []
        return [record for record in read_metrics(path) if isinstance(record, kind)]

    def last_step(self) -> int:
        return max((record.step for record in self.records(StepRecord)), default=0)

    def first_checkpoint_is_whole(self) -> bool:
        return any(self.directory.glob("checkpoints/step-*/manifest.json"))

    def trained(self) -> list[list[int]]:
        """The groups of each step, in the order of the steps."""
        by_step: dict[int, set[int]] = {}
        for line in (self.directory / "rollouts.jsonl").read_text().splitlines():
            record = json.loads(line)
            by_step.setdefault(record["step"], set()).add(record["group"])
        return [sorted(by_step[step]) for step in sorted(by_step)]

    def _alive(self) -> list[int]:
        wanted = f"{MARKER}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found.append(int(entry.name))
            except (OSError, ValueError):
                continue
        return found


def kill_and_resume(run: KilledRun, kills: int, chance: random.Random) -> list[tuple[int, int]]:
    """Returns for each kill the last step before it, and the step that the run went on from."""
    history = []
    process = run.begin(resume=False)
    for number in range(kills):
        before = run.last_step()
        while run.last_step() <= before or not run.first_checkpoint_is_whole():
            if process.poll() is not None:
                sys.exit(f"the run ended by itself, with code {process.returncode}")
            time.sleep(0.05)
        time.sleep(chance.uniform(0, LONGEST_WHILE_S))
        run.kill()
        process.wait()
        reached = run.last_step()
        process = run.begin(resume=True)
        while run.last_step() >= reached and process.poll() is None:
            time.sleep(0.05)  # until what came after the checkpoint is taken back
            if run.last_step() > reached:
                break
        history.append((reached, min(reached, run.last_step())))
        say(f"kill {number + 1} after step {reached}, resumed from {history[-1][1]}")
    if process.wait() != 0:
        sys.exit(f"the resumed run failed with code {process.returncode}")
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=None, help="of the moments")
    parser.add_argument("--goal", type=float, default=0.98)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    say(f"the moments are those of --seed {seed}")
    with tempfile.TemporaryDirectory() as directory:
        overrides = [f"goal={options.goal}", "rollout.order=strict", "checkpoint.every=3"]
        run = KilledRun(Path(directory), overrides)
        try:
            history = kill_and_resume(run, options.kills, random.Random(seed))
        finally:
            run.kill()
        steps = run.trained()
        in_order = [group for step in steps for group in step]
        is_whole = in_order == list(range(len(in_order)))
        reward = run.records(EvaluationRecord)[-1].reward
    show(
        ("kill", "last step", "resumed from"),
        [(str(n + 1), str(last), str(again)) for n, (last, again) in enumerate(history)],
        {
            "kills": options.kills,
            "seed": seed,
            "steps": len(steps),
            "groups": len(in_order),
            "each once and in order": is_whole,
            "held-out reward": reward,
            "goal reached": reward >= options.goal,
        },
    )
    if not is_whole or reward < options.goal:
        sys.exit(1)


if __name__ == "__main__":
    main()
