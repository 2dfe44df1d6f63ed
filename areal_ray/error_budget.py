"""How many rollouts may fail before the run ends, and what is said then.

A run of days meets a few bad prompts and timeouts: those are counted, tried again and forgiven.
A workflow that always raises is not: it must end the run within seconds, with the first
traceback, before it has eaten the data set. So the budget is spent when, among the last
`WINDOW` groups, more than `max_failures` failed *and* they are more than `max_rate` of them.

Example: max_failures 16, max_rate 0.1. The first 17 groups all fail: spent. 17 of the last 256
fail: 6.6 %, forgiven. 26 of the last 256: 10.2 %, spent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from areal_ray.errors import TooManyFailures, described, root_cause

WINDOW = 256
KINDS_SHOWN = 12


class FailureKind(msgspec.Struct, frozen=True):
    """One line of the table of failures: errors that are alike."""

    error: str
    count: int
    first_group: str
    message: str


@dataclass
class _Kind:
    first_group: str
    message: str
    count: int = 0


class ErrorBudget:
    def __init__(self, *, max_failures: int, max_rate: float) -> None:
        self._max_failures = max_failures
        self._max_rate = max_rate
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._kinds: dict[str, _Kind] = {}
        self._first: Exception | None = None
        self.total = 0

    @property
    def failures(self) -> list[FailureKind]:
        kinds = sorted(self._kinds.items(), key=lambda item: -item[1].count)
        return [FailureKind(name, k.count, k.first_group, k.message) for name, k in kinds]

    def succeeded(self) -> None:
        self._recent.append(False)

    def failed(self, group: str, error: Exception) -> None:
        """Count it; raises `TooManyFailures` when there is nothing left to spend."""
        self.total += 1
        self._recent.append(True)
        self._first = self._first or error
        cause = root_cause(error)
        name = type(cause).__name__
        kind = self._kinds.setdefault(name, _Kind(group, str(cause).strip()))
        kind.count += 1
        recent = sum(self._recent)
        if recent > self._max_failures and recent > self._max_rate * len(self._recent):
            raise TooManyFailures(self._verdict(recent)) from self._first

    def _verdict(self, recent: int) -> str:
        assert self._first is not None
        lines = [
            f"{recent} of the last {len(self._recent)} groups failed, more than "
            f"rollout.max_failed_groups ({self._max_failures}) and rollout.max_failure_rate "
            f"({self._max_rate:g}) allow.",
            *self._table(),
            f"The first: {described(self._first)}",
        ]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        shown = self.failures[:KINDS_SHOWN]
        width = max(len(kind.error) for kind in shown)
        return [
            f"  {kind.count:>5} x {kind.error:{width}}  since {kind.first_group}: "
            f"{kind.message.splitlines()[0][:100] if kind.message else ''}"
            for kind in shown
        ]
