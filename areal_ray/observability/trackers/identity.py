"""The id that a run has with a tracking service, kept in the run's directory: a run that goes on
there goes on in the service too, wherever the directory has been moved to, and one that begins in
a directory of the same name as one that was deleted is another."""

from __future__ import annotations

from areal_ray.observability.tracking import TrackedRun


def kept_id(run: TrackedRun, service: str) -> str | None:
    path = run.directory / f"{service}.id"
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def keep_id(run: TrackedRun, service: str, run_id: str) -> None:
    (run.directory / f"{service}.id").write_text(run_id + "\n", encoding="utf-8")
