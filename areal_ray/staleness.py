"""The ledger: how many rollout groups may start now. A pure state machine, counted in groups.

A group's life: submitted -> running -> accepted | filtered | failed, and accepted -> expired
when it grew too old in the queue before it was trained on. At every moment

    submitted = running + accepted + filtered + failed + expired

Admission keeps off-policyness bounded. With `version` weight updates committed, the trainer has
consumed a batch for each, but for those that were `skipped`: a trainer that goes on from a
checkpoint has other weights than those that serve, and they take a version of their own. Whatever
is accepted or running beyond that waits for a later step:

    consumed = version - skipped
    capacity = min(max_concurrent - running,
                   (max_staleness + consumed + 1) * batch - (accepted + running))

Example: batch 4, max_staleness 1, version 0. Eight groups may be on their way (4 for this step,
4 for the next, which will then be one version old). When version 1 is committed, four more may
start, or none if it is skipped. With max_staleness 0 only the current step's batch is ever on its
way: that is synchronous training, by the same code.
"""

from __future__ import annotations

import msgspec

from areal_ray.types import WeightVersion


class LedgerCounts(msgspec.Struct, frozen=True):
    version: WeightVersion = 0
    submitted: int = 0
    running: int = 0
    accepted: int = 0
    filtered: int = 0
    failed: int = 0
    expired: int = 0
    skipped: int = 0
    """Versions that consumed no batch."""


class StalenessLedger:
    def __init__(
        self,
        *,
        batch: int,
        max_staleness: int,
        max_concurrent: int,
        counts: LedgerCounts | None = None,
    ) -> None:
        """`counts`: those of a ledger before, from which this one goes on."""
        counts = counts or LedgerCounts()
        self._batch = batch
        self._max_staleness = max_staleness
        self._max_concurrent = max_concurrent
        self._version = counts.version
        self._submitted = counts.submitted
        self._running = counts.running
        self._accepted = counts.accepted
        self._filtered = counts.filtered
        self._failed = counts.failed
        self._expired = counts.expired
        self._skipped = counts.skipped

    @property
    def capacity(self) -> int:
        consumed = self._version - self._skipped
        by_staleness = (self._max_staleness + consumed + 1) * self._batch - (
            self._accepted + self._running
        )
        return max(0, min(self._max_concurrent - self._running, by_staleness))

    @property
    def counts(self) -> LedgerCounts:
        return LedgerCounts(
            version=self._version,
            submitted=self._submitted,
            running=self._running,
            accepted=self._accepted,
            filtered=self._filtered,
            failed=self._failed,
            expired=self._expired,
            skipped=self._skipped,
        )

    def submit(self) -> None:
        if self.capacity < 1:
            raise ValueError("a group was submitted beyond the ledger's capacity")
        self._submitted += 1
        self._running += 1

    def accept(self) -> None:
        self._end_running()
        self._accepted += 1

    def filter(self) -> None:
        self._end_running()
        self._filtered += 1

    def fail(self) -> None:
        self._end_running()
        self._failed += 1

    def expire(self) -> None:
        """An accepted group was too old to train on: its place is free again."""
        if self._accepted < 1:
            raise ValueError("a group expired that was never accepted")
        self._accepted -= 1
        self._expired += 1

    def commit(self, version: WeightVersion, *, skipped: int = 0) -> None:
        """`skipped`: so many versions, of those that have come since the last commit or long
        before, are now known to have consumed nothing."""
        if version < self._version:
            raise ValueError(f"version {version} committed after version {self._version}")
        if not 0 <= skipped <= version - self._skipped:
            raise ValueError(
                f"{skipped} of {version} versions are skipped, and {self._skipped} already were"
            )
        self._version = version
        self._skipped += skipped

    def _end_running(self) -> None:
        if self._running < 1:
            raise ValueError("a group ended that was not running")
        self._running -= 1
