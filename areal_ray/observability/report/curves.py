"""Curves over steps that stay short however long the run: metrics.jsonl, read as it grows.

A run may be 100,000 steps long, and a screen is 1,500 pixels wide. `Curve` holds at most `limit`
points, each of `width` steps; when there would be more, neighbours are joined and `width` doubles.
A point keeps the lowest, the mean and the highest of its steps, so that no spike is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

MAX_POINTS = 1500
MAX_LAG_POINTS = 160
MAX_LAG_ACTORS = 256
"""The worst."""
AGES = 9
"""Tokens 0, 1 ... 7 versions old, and older ones together."""


class StepLine(msgspec.Struct, frozen=True, tag="step", tag_field="kind"):
    """What a report reads of a `StepRecord`. A number that was none (a loss that went to NaN) is
    null in JSON, and a run that ended so is one to report on."""

    step: int
    version: int
    seconds: float
    reward: float | None
    response_tokens: float | None
    tokens_per_s: float | None
    staleness_mean: float | None
    staleness_max: float | None
    queue_groups: float | None
    groups_failed: int
    groups_expired: int
    groups_filtered: int
    engines: float | None
    waited_s: float | None
    train_s: float | None
    staged_s: float | None
    pause_s: float | None
    loss: float | None
    grad_norm: float | None
    lr: float | None
    clipped: float | None
    kl_to_behaviour: float | None
    loop_lag_p99_ms: dict[str, float | None] = {}
    entropy: float | None = None
    kl_to_reference: float | None = None
    at: float = 0.0
    staleness_tokens: list[int] = []
    commit_s: float | None = None
    update_attempts: int | None = None


class EvaluationLine(msgspec.Struct, frozen=True, tag="evaluation", tag_field="kind"):
    step: int
    version: int
    prompts: int
    reward: float | None


COLUMNS = (
    "reward",
    "response_tokens",
    "tokens_per_s",
    "staleness_mean",
    "staleness_max",
    "queue_groups",
    "engines",
    "waited_s",
    "train_s",
    "staged_s",
    "commit_s",
    "pause_s",
    "update_attempts",
    "loss",
    "grad_norm",
    "lr",
    "clipped",
    "kl_to_behaviour",
    "kl_to_reference",
    "entropy",
)


class _Point:
    __slots__ = ("counts", "first", "highs", "last", "lows", "sums")

    def __init__(self, step: int, values: Sequence[float | None]) -> None:
        self.first = self.last = step
        self.counts = [0 if value is None else 1 for value in values]
        self.sums = [0.0 if value is None else value for value in values]
        self.lows = list(values)
        self.highs = list(values)

    def take(self, other: _Point) -> None:
        self.last = other.last
        for column, count in enumerate(other.counts):
            if not count:
                continue
            low, high = other.lows[column], other.highs[column]
            if self.counts[column]:
                low, high = min(low, self.lows[column]), max(high, self.highs[column])
            self.lows[column], self.highs[column] = low, high
            self.counts[column] += count
            self.sums[column] += other.sums[column]


class Column(msgspec.Struct, frozen=True):
    """One value for each point; None where no step had one. `low` and `high` are left out where
    every point is one step."""

    mean: list[float | None]
    low: list[float | None] = []
    high: list[float | None] = []


class Curve:
    """
    Example: a limit of 2, and steps 1, 2, 3 with the values 5, 7, 3. Step 3 would be a third point:
    steps 1 and 2 become one of width 2 (low 5, mean 6, high 7), step 3 begins the next.
    """

    def __init__(self, limit: int = MAX_POINTS) -> None:
        self._limit = limit
        self._points: list[_Point] = []
        self.width = 1

    def add(self, step: int, values: Sequence[float | None]) -> None:
        """A step that was taken again replaces what came after it."""
        while self._points and self._points[-1].first >= step:
            self._points.pop()
        self._join(_Point(step, values))
        while len(self._points) > self._limit:
            self.width *= 2
            points, self._points = self._points, []
            for point in points:
                self._join(point)

    def steps(self) -> list[int]:
        """The last of each point."""
        return [point.last for point in self._points]

    def column(self, index: int) -> Column:
        points = self._points
        means = [
            _rounded(p.sums[index] / p.counts[index]) if p.counts[index] else None for p in points
        ]
        if self.width == 1:
            return Column(means)
        return Column(
            means,
            low=[_rounded(p.lows[index]) for p in points],
            high=[_rounded(p.highs[index]) for p in points],
        )

    def highest(self, index: int) -> list[float | None]:
        """Of each point, not rounded."""
        return [point.highs[index] for point in self._points]

    def _join(self, point: _Point) -> None:
        if self._points and self._place(self._points[-1]) == self._place(point):
            self._points[-1].take(point)
        else:
            self._points.append(point)

    def _place(self, point: _Point) -> int:
        return (point.first - 1) // self.width


class LagCurve(msgspec.Struct, frozen=True):
    who: str
    last_ms: float | None
    worst_ms: float
    steps: list[int]
    p99_ms: list[float]
    """The worst of each point's steps."""


class Lags:
    """The event loops' lags. There may be hundreds of actors at each of 100,000 steps, so a point
    keeps nothing but the worst lag of each."""

    def __init__(self, limit: int = MAX_LAG_POINTS) -> None:
        self._limit = limit
        self._width = 1
        self._points: list[tuple[int, dict[str, float]]] = []
        """The last step of each, and the lags by actor."""
        self._last: dict[str, float | None] = {}

    def add(self, step: int, lags_ms: dict[str, float | None]) -> None:
        known = {who: lag for who, lag in lags_ms.items() if lag is not None}
        self._join(step, known)
        self._last.update(lags_ms)
        while len(self._points) > self._limit:
            self._width *= 2
            points, self._points = self._points, []
            for last, lags in points:
                self._join(last, lags)

    def curves(self) -> list[LagCurve]:
        """The worst first."""
        found = []
        for who, last_ms in self._last.items():
            lags = [(step, lags[who]) for step, lags in self._points if who in lags]
            steps, p99_ms = [step for step, _ in lags], [round(lag, 2) for _, lag in lags]
            found.append(LagCurve(who, last_ms, max(p99_ms, default=0.0), steps, p99_ms))
        return sorted(found, key=lambda curve: -curve.worst_ms)[:MAX_LAG_ACTORS]

    def _join(self, step: int, lags_ms: dict[str, float]) -> None:
        last = [(one - 1) // self._width for one, _ in self._points[-1:]]
        if last != [(step - 1) // self._width]:
            self._points.append((step, lags_ms))
            return
        worst = self._points.pop()[1]
        for who, lag in lags_ms.items():
            if lag > worst.get(who, -1.0):
                worst[who] = lag
        self._points.append((step, worst))


class StepCurves(msgspec.Struct, frozen=True):
    width: int
    """Steps a point."""
    steps: list[int]
    at: list[float | None]
    """When they were written down."""
    columns: dict[str, Column]
    """By the name of the `StepRecord`'s field."""
    staleness_tokens: list[list[float | None]]
    """For each age in versions, the mean number of such tokens in a step; the last: or older."""


class Evaluations(msgspec.Struct, frozen=True):
    steps: list[int]
    rewards: list[float | None]
    first: EvaluationLine | None
    last: EvaluationLine | None


class Metrics:
    """All of metrics.jsonl, in bounded memory."""

    def __init__(self) -> None:
        self._curve = Curve()
        self._evaluations = Curve()
        self._lags = Lags()
        self.first_evaluation: EvaluationLine | None = None
        self.last_evaluation: EvaluationLine | None = None
        self.last_step: StepLine | None = None
        self.steps = 0
        """Recorded here: a run that goes on from another's checkpoint begins later."""
        self.generated_tokens = 0.0
        self.retried_updates = 0

    def take(self, line: StepLine | EvaluationLine) -> None:
        if isinstance(line, EvaluationLine):
            self._evaluations.add(line.step, [line.reward])
            self.first_evaluation = self.first_evaluation or line
            self.last_evaluation = line
            return
        ages = line.staleness_tokens
        known = [*ages[: AGES - 1], sum(ages[AGES - 1 :])] if ages else []
        known += [0 if ages else None] * (AGES - len(known))
        values = [getattr(line, name) for name in COLUMNS]
        self._curve.add(line.step, [*values, *known, line.at or None])
        since_s = line.seconds - (self.last_step.seconds if self.last_step else 0.0)
        self.generated_tokens += (line.tokens_per_s or 0.0) * max(since_s, 0.0)
        self.retried_updates += (line.update_attempts or 1) > 1
        self.steps += 1
        self.last_step = line
        self._lags.add(line.step, line.loop_lag_p99_ms)

    def curves(self) -> StepCurves:
        columns = {name: self._curve.column(index) for index, name in enumerate(COLUMNS)}
        return StepCurves(
            width=self._curve.width,
            steps=self._curve.steps(),
            at=self._curve.highest(len(COLUMNS) + AGES),
            columns={name: one for name, one in columns.items() if any_known(one.mean)},
            staleness_tokens=self._ages(),
        )

    def evaluations(self) -> Evaluations:
        return Evaluations(
            steps=self._evaluations.steps(),
            rewards=self._evaluations.column(0).mean,
            first=self.first_evaluation,
            last=self.last_evaluation,
        )

    def lags(self) -> list[LagCurve]:
        return self._lags.curves()

    def _ages(self) -> list[list[float | None]]:
        ages = [self._curve.column(len(COLUMNS) + age).mean for age in range(AGES)]
        while ages and not any(ages[-1]):
            ages.pop()
        return ages


def any_known(values: Sequence[float | None]) -> bool:
    return any(value is not None for value in values)


def _rounded(value: float | None) -> float | None:
    """Five digits are enough for a picture, and a third of the bytes."""
    return None if value is None else float(f"{value:.5g}")
