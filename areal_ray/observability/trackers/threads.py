"""A thread for each tracker, so that none holds up the run or another tracker.

    log -> waiting -> in the tracker's hands -> written

`log` only puts a record into a queue, from any thread, and each thread's records stay in their
order. Clients of tracking services block: for a connection, for a retry, for ever behind a
firewall that swallows packets. Here that costs the run nothing but a limited wait at its end, and
that wait is of all trackers together.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Iterable

import msgspec

from areal_ray import logs
from areal_ray.errors import described
from areal_ray.observability.records import Record
from areal_ray.observability.tracking import NamedTracker, TrackedRun

CLOSE_TIMEOUT_S = 20.0

MAX_WAITING = 10_000
"""Records of a tracker that is stuck or far behind; later ones are left to metrics.jsonl."""


class _End(msgspec.Struct, frozen=True):
    error: BaseException | None


class TrackerThread:
    def __init__(self, named: NamedTracker, run: TrackedRun) -> None:
        self.name = named.name
        self._tracker = named.tracker
        self._run = run
        self._waiting: queue.SimpleQueue[Record | _End] = queue.SimpleQueue()
        self._handing_over = threading.Lock()
        self._given = 0
        self._written = 0
        self._is_left_out = False
        # A daemon: the process must be able to end while a tracker is stuck.
        self._thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        if self._is_left_out:
            return
        with self._handing_over:
            self._given += 1
            if self._waiting.qsize() < MAX_WAITING:
                self._waiting.put(record)

    def end(self, error: BaseException | None) -> None:
        """Close it once all that waits is written; see `tell_unwritten`."""
        self._waiting.put(_End(error))

    def tell_unwritten(self, deadline: float) -> None:
        """Wait for the end until `deadline`, by the monotonic clock; say what is missing then."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._is_left_out:
            return
        unwritten = self._given - self._written
        if self._thread.is_alive():
            self._is_left_out = True
            logs.warning(
                "the tracker {} could not be closed in time: {} records were not written to it. "
                "metrics.jsonl has everything",
                self.name,
                unwritten,
            )
        elif unwritten:
            logs.warning(
                "the tracker {} was more than {} records behind: {} were not written to it. "
                "metrics.jsonl has everything",
                self.name,
                MAX_WAITING,
                unwritten,
            )

    def _work(self) -> None:
        try:
            self._tracker.open(self._run)
            while not isinstance(item := self._waiting.get(), _End):
                self._tracker.log(item)
                self._written += 1
            self._tracker.close(item.error)
        except BaseException as error:  # noqa: BLE001 - told; whatever it is, it is the tracker's
            if self._is_left_out:
                return  # told already that it was not closed in time
            self._is_left_out = True
            logs.warning(
                "the tracker {} failed and is left out from now on: {}. metrics.jsonl has "
                "everything",
                self.name,
                described(error),
            )
            logs.debug("{}", "".join(traceback.format_exception(error)))


def tell_all_unwritten(threads: Iterable[TrackerThread]) -> None:
    """Wait for the end of all of them, no longer than for one. Blocks: call it off the loop."""
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    for thread in threads:
        thread.tell_unwritten(deadline)
