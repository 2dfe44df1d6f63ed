"""What a run writes down: a record for each step and evaluation in metrics.jsonl, and one for each
sample in rollouts.jsonl."""

from __future__ import annotations

import msgspec

from areal_ray.training.spec import MismatchDiagnostics
from areal_ray.types import WeightVersion


class StepRecord(msgspec.Struct, frozen=True, tag="step", tag_field="kind"):
    """One optimizer step with the weight update that followed it, if the engines could take it."""

    step: int
    version: WeightVersion
    """That they serve then."""
    seconds: float
    """Since training began."""
    reward: float
    response_tokens: float
    tokens_per_s: float
    """Generated since the step before, by all engines together."""
    staleness_mean: float
    staleness_max: int
    queue_groups: int
    groups_failed: int
    groups_expired: int
    groups_filtered: int
    engines: int
    """How many serve."""
    loop_lag_p99_ms: dict[str, float]
    """How late the event loop of each actor runs, over the last ten minutes."""
    waited_s: float
    train_s: float
    staged_s: float | None
    pause_s: float | None
    """How long generation stood still for the new weights, on the slowest engine. None: the engines
    stayed at their version."""
    loss: float
    grad_norm: float
    lr: float
    clipped: float
    kl_to_behaviour: float
    kl_to_reference: float | None = None
    entropy: float | None = None
    value_loss: float | None = None
    mismatch: MismatchDiagnostics | None = None
    at: float = 0.0
    """When it was written down, in seconds since the epoch."""
    staleness_tokens: list[int] = []
    """How many tokens of the step were 0, 1, 2 ... versions old."""
    staleness_samples: list[int] = []
    """The same for samples, by their oldest token."""
    queue_bytes: int = 0
    commit_s: float | None = None
    """From the first engine's commit to the last's, pauses included."""
    update_attempts: int | None = None

    def _repr_html_(self) -> str:
        from areal_ray.observability.html import records_html

        return records_html([self])


class EvaluationRecord(msgspec.Struct, frozen=True, tag="evaluation", tag_field="kind"):
    """The mean reward of greedy answers to the held-out prompts."""

    step: int
    version: WeightVersion
    seconds: float
    prompts: int
    reward: float
    at: float = 0.0

    def _repr_html_(self) -> str:
        from areal_ray.observability.html import records_html

        return records_html([self])


class RolloutRecord(msgspec.Struct, frozen=True):
    """A line of rollouts.jsonl: one sample that was trained on."""

    step: int
    group: int
    prompt: str
    answer: str | None
    text: str
    reward: float
    finish_reason: str
    prompt_tokens: list[int]
    tokens: list[int]
    versions: list[int]


Record = StepRecord | EvaluationRecord
