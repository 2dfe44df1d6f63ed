"""The journal of a rollout book: a file with a snapshot and the events since.

One JSON document a line. Draws are written before their groups are dispatched, so no group is
ever on its way that the journal does not know; whatever else was lost with a killed process can
be learnt again from the queue. After `EVENTS_PER_SNAPSHOT` events the file is written anew, under
another name, and renamed: at every moment one whole journal exists. It survives the process,
not the machine: nothing is synced to the disk.

All methods block: call them off the event loop, one at a time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from areal_ray.errors import JournalError
from areal_ray.rollout_book import BookState, Event

EVENTS_PER_SNAPSHOT = 100_000


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder()
        self._events_written = 0

    @property
    def wants_snapshot(self) -> bool:
        return self._events_written >= EVENTS_PER_SNAPSHOT

    def read(self) -> tuple[BookState, list[Event]] | None:
        """The snapshot and the events after it; None if there is no journal yet."""
        try:
            lines = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return None
        lines.pop()  # what follows the last newline: nothing, or a line cut short by a kill
        try:
            state = msgspec.json.decode(lines[0], type=BookState)
            decoder = msgspec.json.Decoder(Event)
            events = [decoder.decode(line) for line in lines[1:]]
        except (msgspec.MsgspecError, IndexError) as error:
            raise JournalError(f"{self._path} is no journal of this version: {error}") from error
        return state, events

    def begin(self, state: BookState) -> None:
        """Start the file anew, with `state` as all that has happened before."""
        new = self._path.with_suffix(".new")
        new.write_bytes(self._encoder.encode(state) + b"\n")
        os.replace(new, self._path)
        self._events_written = 0

    def append(self, events: Sequence[Event]) -> None:
        with self._path.open("ab") as file:
            file.write(self._encoder.encode_lines(events))
        self._events_written += len(events)
