"""MLflow, at MLFLOW_TRACKING_URI or where MLflow itself puts runs without one (a database in the
working directory)."""

from __future__ import annotations

import importlib
from urllib.parse import urlsplit

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from areal_ray.errors import described
from areal_ray.observability.records import Record
from areal_ray.observability.trackers.identity import keep_id, kept_id
from areal_ray.observability.tracking import (
    RunStatus,
    TrackedRun,
    hyperparameters,
    run_status,
    scalars,
    written_at,
)

STATUSES: dict[RunStatus, str] = {"finished": "FINISHED", "killed": "KILLED", "failed": "FAILED"}

DATABASES = ("sqlite", "mysql", "postgresql", "mssql")

PARAMS_IN_A_CALL = 100
"""MLflow takes no more."""

TAG_LENGTH = 5000


class MlflowTracker:
    """By a client of its own: what a user does with `mlflow.start_run` in the same process is
    left alone."""

    def __init__(self) -> None:
        if urlsplit(mlflow.get_tracking_uri()).scheme.partition("+")[0] in DATABASES:
            # What mlflow-skinny leaves out. Now, not in the thread: it takes a second, and an event
            # loop beside it does not get the interpreter for parts of that.
            importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
            importlib.import_module("alembic.command")

    def open(self, run: TrackedRun) -> None:
        self._client = MlflowClient()
        kept = kept_id(run, "mlflow")
        if kept is None:
            experiment_id = self._experiment(run.config.observability.project)
            tags = {"areal_ray.directory": str(run.directory)}
            self._run_id = self._client.create_run(
                experiment_id, run_name=run.name, tags=tags
            ).info.run_id
            keep_id(run, "mlflow", self._run_id)
        else:
            self._run_id = kept
            self._client.update_run(kept, status="RUNNING")
        self._log_config(run)

    def log(self, record: Record) -> None:
        at_ms = round(written_at(record) * 1000)
        metrics = [
            Metric(name, value, at_ms, record.step) for name, value in scalars(record).items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, error: BaseException | None) -> None:
        if error is not None:
            self._client.set_tag(self._run_id, "ended by", described(error)[:TAG_LENGTH])
        self._client.set_terminated(self._run_id, STATUSES[run_status(error)])

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        try:
            return self._client.create_experiment(name)
        except MlflowException:
            # Another run may have made it just now.
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return found.experiment_id

    def _log_config(self, run: TrackedRun) -> None:
        """A param can't be changed: what a run is resumed with and did not have goes to a tag."""
        known = self._client.get_run(self._run_id).data.params
        values = {key: str(value) for key, value in hyperparameters(run.config).items()}
        params = [Param(key, value) for key, value in values.items() if key not in known]
        for first in range(0, len(params), PARAMS_IN_A_CALL):
            self._client.log_batch(self._run_id, params=params[first : first + PARAMS_IN_A_CALL])
        changed = [
            RunTag(f"resumed.{key}", value[:TAG_LENGTH])
            for key, value in values.items()
            if known.get(key, value) != value
        ]
        if changed:
            self._client.log_batch(self._run_id, tags=changed)
