"""The Ray job that this process is the entrypoint of, if it was submitted as one."""

from __future__ import annotations

import json
import os

from ray._private import ray_constants
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray.dashboard.modules.job.common import JOB_ID_METADATA_KEY, JobInfoStorageClient
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

RUN_KEY = "areal_ray_run"
"""In the metadata of a job: the name of its run."""
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
DEFAULT_STOP_WAIT_S = 3
"""Ray's: then a job that was told to stop is killed."""


def submission_id() -> str | None:
    """None if this process was not started by `ray job submit`."""
    injected = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}"))
    return injected.get("metadata", {}).get(JOB_ID_METADATA_KEY)


def label_job(run: str) -> None:
    """Let the job's metadata carry the run's name. In a cluster that was joined; blocks.

    Ray's API takes metadata at submission alone, when nobody may know the name yet. Nobody else
    writes the entry while the entrypoint runs.
    """
    job = submission_id()
    if job is None:
        return
    key = JobInfoStorageClient.JOB_DATA_KEY.format(job_id=job).encode()
    entry = _internal_kv_get(key, namespace=ray_constants.KV_NAMESPACE_JOB)
    if entry is None:
        return
    info = json.loads(entry)
    info["metadata"] = {**(info.get("metadata") or {}), RUN_KEY: run}
    _internal_kv_put(
        key, json.dumps(info).encode(), overwrite=True, namespace=ray_constants.KV_NAMESPACE_JOB
    )


def stop_warning() -> str:
    """What to tell somebody whose job could not end well; empty if it could."""
    if submission_id() is None or STOP_WAIT in os.environ:
        return ""
    return (
        f"`ray job stop` will kill this job after {DEFAULT_STOP_WAIT_S} s, with nothing saved but "
        f"its checkpoints: submit it with {STOP_WAIT} in the env_vars of its runtime env to have "
        "it end well"
    )
