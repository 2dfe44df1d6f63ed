from __future__ import annotations

import pytest

from areal_ray.error_budget import WINDOW, ErrorBudget, FailureKind
from areal_ray.errors import EngineError, RewardError, TooManyFailures


def budget(*, max_failures: int = 16, max_rate: float = 0.1) -> ErrorBudget:
    return ErrorBudget(max_failures=max_failures, max_rate=max_rate)


def fail(spent: ErrorBudget, times: int = 1) -> None:
    for _ in range(times):
        spent.failed("group 7", EngineError("out of memory"))


def succeed(spent: ErrorBudget, times: int) -> None:
    for _ in range(times):
        spent.succeeded()


def test_a_workflow_that_always_fails_has_spent_it_with_the_17th_group() -> None:
    spent = budget()
    fail(spent, 16)
    with pytest.raises(TooManyFailures, match="^17 of the last 17 groups failed"):
        fail(spent)
    assert spent.total == 17


def test_17_of_256_are_forgiven() -> None:
    spent = budget()
    succeed(spent, 239)
    # 17 / 256 = 6.6 %, less than 10 %.
    fail(spent, 17)
    assert spent.total == 17


def test_26_of_256_are_not() -> None:
    spent = budget()
    succeed(spent, 230)
    # Up to the 25th there are at most 25 / 255 = 9.8 %; 26 / 256 = 10.2 %.
    fail(spent, 25)
    with pytest.raises(TooManyFailures, match="^26 of the last 256 groups failed"):
        fail(spent)


def test_exactly_the_rate_is_forgiven() -> None:
    spent = budget(max_failures=2, max_rate=0.25)
    succeed(spent, 12)
    # 4 / 16 = 0.25; 5 / 17 = 0.29.
    fail(spent, 4)
    with pytest.raises(TooManyFailures, match="^5 of the last 17 groups failed"):
        fail(spent)


def test_exactly_the_number_is_forgiven_whatever_the_rate() -> None:
    spent = budget(max_failures=3, max_rate=0.0)
    fail(spent, 3)
    with pytest.raises(TooManyFailures):
        fail(spent)


def test_without_any_to_spend_the_first_failure_ends_it() -> None:
    spent = budget(max_failures=0, max_rate=0.0)
    succeed(spent, 1000)
    with pytest.raises(TooManyFailures, match="^1 of the last 256 groups failed"):
        fail(spent)


def test_a_run_of_any_length_lives_with_one_failure_in_eleven() -> None:
    spent = budget()
    for _ in range(100):
        # Of any 256 groups 24 at most fail: 9.4 %.
        fail(spent)
        succeed(spent, 10)
    assert spent.total == 100


def test_what_lies_256_groups_back_is_forgotten() -> None:
    assert WINDOW == 256
    spent = budget(max_failures=1, max_rate=0.0)
    fail(spent)
    succeed(spent, 255)
    # With this one, the first is no more among the last 256.
    fail(spent)
    with pytest.raises(TooManyFailures, match="^2 of the last 256 groups failed"):
        fail(spent)


class RemoteError(Exception):
    """As errors of remote calls come: with what happened inside."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("a long remote traceback")
        self.cause = cause


def test_failures_that_are_alike_are_one_line_of_the_table_the_most_frequent_first() -> None:
    spent = budget()
    spent.failed("group 1", RewardError("no number\nbut a dog"))
    spent.failed("group 2", RemoteError(EngineError("engine-0 is gone")))
    spent.failed("group 3", EngineError("engine-1 is gone"))
    assert spent.failures == [
        FailureKind("EngineError", 2, "group 2", "engine-0 is gone"),
        FailureKind("RewardError", 1, "group 1", "no number\nbut a dog"),
    ]


def test_the_verdict_tells_the_rule_the_table_and_the_first_error() -> None:
    spent = budget(max_failures=3, max_rate=0.5)
    first = RemoteError(RewardError("no number\nbut a dog"))
    spent.failed("group 1", first)
    spent.failed("group 2", EngineError(""))
    spent.succeeded()
    spent.failed("an evaluation", EngineError("engine-1 is gone"))
    with pytest.raises(TooManyFailures) as verdict:
        spent.failed("group 5", EngineError("x" * 200))
    assert str(verdict.value).splitlines() == [
        "4 of the last 5 groups failed, more than rollout.max_failed_groups (3) and "
        "rollout.max_failure_rate (0.5) allow.",
        "      3 x EngineError  since group 2: ",
        "      1 x RewardError  since group 1: no number",
        "The first: RewardError: no number",
        "but a dog",
    ]
    assert verdict.value.__cause__ is first


def test_a_long_message_is_cut_in_the_table_and_a_long_table_too() -> None:
    spent = budget(max_failures=13, max_rate=0.0)
    for number in range(13):
        kind = type(f"Error{number:02}", (Exception,), {})
        spent.failed(f"group {number}", kind("x" * 200))
    with pytest.raises(TooManyFailures) as verdict:
        spent.failed("group 13", RuntimeError("y" * 200))
    _, *table, last = str(verdict.value).splitlines()
    # Twelve of fourteen kinds, and 100 of 200 characters.
    assert table == [
        f"      1 x Error{number:02}  since group {number}: {'x' * 100}" for number in range(12)
    ]
    assert last == f"The first: Error00: {'x' * 200}"
