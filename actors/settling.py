"""What becomes of a group that has ended: in the book, at the queue, and in the error budget."""

from __future__ import annotations

from collections.abc import Callable

from areal_ray import logs
from areal_ray.actors.queue_line import QueueLine
from areal_ray.error_budget import ErrorBudget
from areal_ray.errors import FilteredOut, GroupTimedOut, described
from areal_ray.rollout_book import RolloutBook, Ticket
from areal_ray.tasks import Ended
from areal_ray.types import GroupOutcome


class Settling:
    def __init__(
        self,
        book: RolloutBook,
        line: QueueLine,
        budget: ErrorBudget,
        *,
        max_filtered_in_a_row: int,
        tell: Callable[[str], None],
    ) -> None:
        """`tell` hears of each group that fails."""
        self._book = book
        self._line = line
        self._budget = budget
        self._max_filtered_in_a_row = max_filtered_in_a_row
        self._tell = tell
        self._filtered_in_a_row = 0

    def settle(self, ticket: Ticket, ended: Ended[GroupOutcome]) -> None:
        """Raises what ends the run: too many failures, or a filter that lets nothing through."""
        try:
            outcome = ended.result()
        except Exception as error:  # noqa: BLE001 - kept, and raised when there are too many
            self._settle_failure(ticket, error)
            return
        self._budget.succeeded()
        if not self._book.is_running(ticket.group_id):
            return  # the queue was first to tell: it has even expired there
        tokens = 0 if outcome.summary is None else outcome.summary.generated_tokens
        if outcome.kind == "filtered":
            self._settle_filtered(ticket.group_id, tokens)
            return
        self._filtered_in_a_row = 0
        self._book.end(ticket.group_id, "accepted", tokens=tokens)
        if outcome.queue != self._line.incarnation:
            # It was the last thing that a queue took before it died.
            self._book.expire(ticket.group_id)
            self._line.drop(ticket.group_id)

    def _settle_failure(self, ticket: Ticket, error: Exception) -> None:
        group_id, told = ticket.group_id, f"group {ticket.group_id} failed: {described(error)}"
        logs.warning("{}", told)
        self._tell(told)
        if not self._book.is_running(group_id):
            return  # what failed was only the word of it: the queue has had it
        timed_out = isinstance(error, GroupTimedOut)
        if not self._book.end(group_id, "timed out" if timed_out else "failed"):
            logs.warning("a prompt failed too often and is given up: {}", ticket.prompt)
        self._line.drop(group_id)
        self._budget.failed(f"group {group_id}", error)

    def _settle_filtered(self, group_id: int, tokens: int) -> None:
        self._book.end(group_id, "filtered", tokens=tokens)
        self._line.drop(group_id)
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row > self._max_filtered_in_a_row:
            raise FilteredOut(
                f"rollout.filter let none of {self._filtered_in_a_row} groups in a row through "
                "(rollout.max_filtered_in_a_row): there is nothing to train on"
            )
