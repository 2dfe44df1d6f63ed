"""The files of one run, in `<runs_dir>/<name>/`:

config.yaml     the configuration as resolved
metrics.jsonl   a record for each step and each evaluation
rollouts.jsonl  every sample that was trained on (the trainer writes it)
rollout.journal what has become of each group (the controller writes it, and goes on from it)
checkpoints/    what a run can go on from
model/          the exported model
reward.png      the reward curve
"""

from __future__ import annotations

from pathlib import Path

from areal_ray.checkpoints import Checkpoint
from areal_ray.config import Config
from areal_ray.config_file import to_yaml
from areal_ray.errors import ConfigError
from areal_ray.observability.curve import draw_curve, read_metrics
from areal_ray.observability.jsonl import JsonlWriter, keep_until
from areal_ray.observability.records import Record


class RunFiles:
    def __init__(self, config: Config, resumed: Checkpoint | None = None) -> None:
        """Make a directory of the run's own: a name that is taken gets a number. A run that is
        resumed from a checkpoint of its own goes on in its directory, where all that came after
        it is taken back."""
        wanted = config.run_dir.resolve()
        if resumed is not None and resumed.directory.resolve().is_relative_to(wanted):
            self.directory = wanted
            for path in (self.metrics_path, wanted / "rollouts.jsonl"):
                keep_until(path, resumed.step)
        else:
            try:
                self.directory = _first_free(wanted)
            except OSError as error:
                raise ConfigError(f"runs_dir: {wanted} can't be made: {error.strerror}") from error
        self._title = self.directory.name
        self._metrics: JsonlWriter[Record] = JsonlWriter(self.metrics_path)

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

    def record(self, record: Record) -> None:
        self._metrics.write(record)

    def save_config(self, config: Config) -> None:
        (self.directory / "config.yaml").write_text(to_yaml(config), encoding="utf-8")

    def close(self) -> None:
        """Write all that is left, and draw the curve. Blocks: call it off the event loop."""
        self._metrics.close()
        if self.metrics_path.stat().st_size:
            draw_curve(self.metrics_path, self.directory / "reward.png", title=self._title)


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
