"""From what the actors tell of a training step to its record."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from areal_ray.observability.records import StepRecord
from areal_ray.types import WeightVersion

if TYPE_CHECKING:
    from areal_ray.actors.checkpoint_engine import UpdateReport
    from areal_ray.actors.rollout_controller import RolloutStatus
    from areal_ray.actors.trainer import TrainReport
    from areal_ray.actors.trajectory_queue import QueueStatus


class StepRecorder:
    """Remembers when the step before was recorded, and how many tokens there were by then."""

    def __init__(self, *, spent_s: float = 0.0, tokens: int = 0) -> None:
        """`spent_s`, `tokens`: of the run that is resumed."""
        self._began = time.monotonic() - spent_s
        self._recorded = time.monotonic()
        self._tokens_recorded = tokens

    @property
    def seconds(self) -> float:
        """Since training began."""
        return time.monotonic() - self._began

    def skip_time(self) -> None:
        """Nothing was generated since the last step, on purpose: let that not count."""
        self._recorded = time.monotonic()

    def record(
        self,
        report: TrainReport,
        update: UpdateReport | None,
        rollout: RolloutStatus,
        waiting: QueueStatus,
        *,
        served: WeightVersion,
    ) -> StepRecord:
        loops = rollout.loops | {"queue": waiting.loop, "trainer": report.loop}
        if update is not None:
            loops["manager"] = update.loop
        now = time.monotonic()
        generated = rollout.generated_tokens - self._tokens_recorded
        record = StepRecord(
            at=time.time(),
            step=report.step,
            version=served,
            seconds=now - self._began,
            reward=report.mean_reward,
            response_tokens=report.mean_response_tokens,
            tokens_per_s=generated / (now - self._recorded),
            staleness_mean=report.mean_staleness,
            staleness_max=report.max_staleness,
            staleness_tokens=report.staleness_tokens,
            staleness_samples=report.staleness_samples,
            queue_groups=waiting.waiting_groups,
            queue_bytes=waiting.held_bytes,
            groups_failed=rollout.ledger.failed,
            groups_expired=rollout.ledger.expired,
            groups_filtered=rollout.ledger.filtered,
            engines=sum(engine.state == "serving" for engine in rollout.engines),
            loop_lag_p99_ms={who: round(loop.p99_ms, 2) for who, loop in loops.items()},
            waited_s=report.waited_s,
            train_s=report.metrics.seconds,
            staged_s=None if update is None else update.outcome.staged_s,
            commit_s=None if update is None else update.outcome.committed_s,
            pause_s=None if update is None else update.outcome.longest_pause_s,
            update_attempts=None if update is None else update.outcome.attempts,
            loss=report.metrics.loss,
            grad_norm=report.metrics.grad_norm,
            lr=report.metrics.lr,
            clipped=report.metrics.clipped,
            kl_to_behaviour=report.metrics.kl_to_behaviour,
            kl_to_reference=report.metrics.kl_to_reference,
            entropy=report.metrics.entropy,
            value_loss=report.metrics.value_loss,
            mismatch=report.metrics.mismatch,
        )
        self._recorded, self._tokens_recorded = now, rollout.generated_tokens
        return record
