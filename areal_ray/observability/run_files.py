"""The files of one run, in `<runs_dir>/<name>/`, or `<name>-2/` and so on if that is taken:

config.yaml     the configuration as resolved
metrics.jsonl   a record for each step and each evaluation
rollouts.jsonl  every sample that was trained on (the trainer writes it)
rollout.journal what has become of each group (the controller writes it, and goes on from it)
checkpoints/    what a run can go on from
timeline.jsonl  who did what when (the monitor writes it)
trace.json      the run's end across all actors
model/          the exported model
report.html     all of it to look at
reward.png      the reward curve
live.json       where the run can be reached, while it goes on
ended.json      how it ended
wandb.id, mlflow.id   what the run is called there, if it is tracked there
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from areal_ray.checkpoints import CHECKPOINTS, MANIFEST, Checkpoint, CheckpointStore
from areal_ray.config import Config
from areal_ray.config_file import to_yaml
from areal_ray.errors import CheckpointError, ConfigError
from areal_ray.observability.curve import draw_curve, read_metrics
from areal_ray.observability.ending import forget_end
from areal_ray.observability.jsonl import JsonlWriter, keep_until
from areal_ray.observability.records import Record
from areal_ray.observability.trackers import TrackerThread, tell_all_unwritten
from areal_ray.observability.tracking import NamedTracker, TrackedRun

CONFIG = "config.yaml"


class RunFiles:
    def __init__(
        self,
        config: Config,
        resumed: Checkpoint | None = None,
        trackers: Sequence[NamedTracker] = (),
    ) -> None:
        """Make a directory of the run's own: a name that is taken gets a number. A run that is
        resumed from a checkpoint of its own goes on in its directory, where all that came after
        it is taken back."""
        own = None if resumed is None else _run_of(resumed, config)
        if own is not None:
            self.directory = own
            for path in (self.metrics_path, own / "rollouts.jsonl"):
                keep_until(path, resumed.step)
            forget_end(own)
        else:
            wanted = config.run_dir.resolve()
            try:
                self.directory = _first_free(wanted)
            except OSError as error:
                raise ConfigError(f"runs_dir: {wanted} can't be made: {error.strerror}") from error
        self._resumed_step = None if own is None else resumed.step
        self._metrics: JsonlWriter[Record] = JsonlWriter(self.metrics_path)
        self._trackers = trackers
        self._tracked_by: list[TrackerThread] = []

    @property
    def metrics_path(self) -> Path:
        return self.directory / "metrics.jsonl"

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def base_model(self) -> Path:
        """Where a model factory saves the model that the run begins with."""
        return self.directory / "base_model"

    def records(self) -> list[Record]:
        """All that a run which is resumed has written down before."""
        return read_metrics(self.metrics_path)

    def open_trackers(self, config: Config) -> None:
        """`config`: as resolved. Before the first record."""
        run = TrackedRun(self.directory.name, self.directory, config, self._resumed_step)
        self._tracked_by = [TrackerThread(named, run) for named in self._trackers]

    def record(self, record: Record) -> None:
        """From any task or thread: it only hands the record over."""
        self._metrics.write(record)
        for tracker in self._tracked_by:
            tracker.log(record)

    def save_config(self, config: Config) -> None:
        (self.directory / CONFIG).write_text(to_yaml(config), encoding="utf-8")

    def close(self, error: BaseException | None = None) -> None:
        """Write all that is left, and draw the curve. `error`: what ended the run before its end.
        Blocks: call it off the event loop."""
        for tracker in self._tracked_by:
            tracker.end(error)
        try:
            self._metrics.close()
            if self.metrics_path.stat().st_size:
                picture = self.directory / "reward.png"
                draw_curve(self.metrics_path, picture, title=self.directory.name)
        finally:
            tell_all_unwritten(self._tracked_by)


def latest_checkpoint(config: Config) -> Checkpoint:
    """The one that was written last, of all runs of this name."""
    found = []
    for directory in _runs_of(config):
        with contextlib.suppress(CheckpointError):
            found.append(CheckpointStore(directory / CHECKPOINTS, keep=1).latest())
    if not found:
        raise CheckpointError(
            f"no run in {config.run_dir.resolve()}, or in a numbered directory beside it, holds a "
            "whole checkpoint"
        )
    return max(found, key=lambda one: (one.directory / MANIFEST).stat().st_mtime_ns)


def take_over(directory: Path, config: Config) -> Checkpoint:
    """A copy of a checkpoint that lies elsewhere, as if the last run of this name had written it:
    so that it goes on from there in its own directory, whatever it had done."""
    runs = _runs_of(config) or [config.run_dir.resolve()]
    last = max(runs, key=lambda run: (len(run.name), run.name))
    return CheckpointStore(last / CHECKPOINTS, keep=config.checkpoint.keep).take_over(directory)


def _run_of(checkpoint: Checkpoint, config: Config) -> Path | None:
    """The directory of the run of this name that it is of, if it is of one."""
    where = checkpoint.directory.resolve()
    return next((run for run in _runs_of(config) if where.is_relative_to(run)), None)


def _runs_of(config: Config) -> list[Path]:
    """The directories that runs of this name have had. One whose name just ends in a number, as
    the second of this name does, tells so in its config."""
    wanted = config.run_dir.resolve()
    numbered = re.compile(re.escape(wanted.name) + r"-\d+")
    beside = wanted.parent.iterdir() if wanted.parent.is_dir() else ()
    return [
        directory
        for directory in sorted(beside)
        if (directory == wanted and _name_in(directory) in (config.name, None))
        or (numbered.fullmatch(directory.name) and _name_in(directory) == config.name)
    ]


def _name_in(directory: Path) -> str | None:
    try:
        return msgspec.yaml.decode((directory / CONFIG).read_bytes(), type=_Named).name
    except (OSError, msgspec.MsgspecError):
        return None


class _Named(msgspec.Struct):
    name: str


def _first_free(wanted: Path) -> Path:
    number = 1
    while True:
        candidate = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return candidate
