"""Every metric of a run, as Prometheus knows it: one table, for those who set them and who draw.

Ray puts `ray_` in front of each name, and tags of its own behind. `areal_ray.actors.ray_metrics`
sets them; `areal-ray dashboard` makes a Grafana dashboard of them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["gauge", "counter", "histogram"]

PREFIX = "areal_ray_"


class Metric(msgspec.Struct, frozen=True):
    name: str
    kind: Kind
    unit: str
    """As Grafana calls it: `short`, `s`, `ms`, `bytes`, `percentunit`."""
    description: str
    tags: tuple[str, ...] = ("run",)
    bounds: tuple[float, ...] = ()
    """Of a histogram's buckets."""

    @property
    def full_name(self) -> str:
        """As Ray is told it."""
        return PREFIX + self.name


ENGINE = ("run", "engine")
ACTOR = ("run", "actor")

REWARD = Metric("reward", "gauge", "short", "Mean reward of the samples of the last step")
HELD_OUT_REWARD = Metric(
    "held_out_reward", "gauge", "short", "Mean reward of greedy answers to the held-out prompts"
)
STEP = Metric("step", "gauge", "short", "Optimizer steps taken")
VERSION = Metric("version", "gauge", "short", "Version that the engines serve")
TRAIN_SECONDS = Metric("train_seconds", "gauge", "s", "Computing of the last optimizer step")
TRAINER_WAITED_SECONDS = Metric(
    "trainer_waited_seconds", "gauge", "s", "How long the trainer waited for its last batch"
)
LOSS = Metric("loss", "gauge", "short", "Loss of the last step")
GRAD_NORM = Metric("grad_norm", "gauge", "short", "Norm of the last step's gradient")
KL_TO_BEHAVIOUR = Metric(
    "kl_to_behaviour", "gauge", "short", "KL between the trainer and who sampled, last step"
)
RESPONSE_TOKENS = Metric("response_tokens", "gauge", "short", "Mean length of an answer, last step")
STALENESS = Metric(
    "staleness_versions",
    "histogram",
    "short",
    "How many versions old each sample's oldest token was when it was trained on",
    bounds=(0.5, 1.5, 2.5, 3.5, 4.5, 6.5, 8.5, 12.5, 16.5),
)
STALENESS_MEAN = Metric(
    "staleness_mean_versions", "gauge", "short", "Mean age in versions of the last step's tokens"
)
UPDATE_PHASE_SECONDS = Metric(
    "weight_update_phase_seconds",
    "gauge",
    "s",
    "The last weight update: staging, commit, and the longest pause of an engine",
    tags=("run", "phase"),
)
GROUPS = Metric(
    "groups",
    "gauge",
    "short",
    "Groups by what became of them: running, accepted, filtered, failed, expired",
    tags=("run", "state"),
)
QUEUE_GROUPS = Metric("queue_groups", "gauge", "short", "Finished groups in the trajectory queue")
QUEUE_BYTES = Metric("queue_bytes", "gauge", "bytes", "Their size in the object store")
GENERATED_TOKENS = Metric(
    "generated_tokens", "counter", "short", "Tokens that an engine has generated", tags=ENGINE
)
REQUESTS = Metric("engine_requests", "gauge", "short", "Requests in flight at an engine", ENGINE)
VERSION_LAG = Metric(
    "engine_version_lag", "gauge", "short", "How many versions an engine is behind", tags=ENGINE
)
ENGINE_STATE = Metric(
    "engine_state",
    "gauge",
    "short",
    "1 for the state an engine is in: starting, syncing, serving, suspect, draining, dead",
    tags=("run", "engine", "state"),
)
ACTIVITY_SECONDS = Metric(
    "activity_seconds",
    "counter",
    "s",
    "How long an engine or the trainer did what: busy, waiting for data, paused ...",
    tags=("run", "actor", "activity"),
)
GPU_IDLE_SECONDS = Metric(
    "gpu_idle_seconds",
    "counter",
    "s",
    "GPUs (on CPUs: engines and trainer) times seconds without work, by cause",
    tags=("run", "actor", "cause"),
)
LOOP_LAG_P99_MS = Metric(
    "event_loop_lag_p99_ms",
    "gauge",
    "ms",
    "99th percentile of how late an actor's event loop runs, over ten minutes",
    tags=ACTOR,
)
EVENTS = Metric(
    "events", "counter", "short", "Losses, recoveries and failures", tags=("run", "who", "level")
)

METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
