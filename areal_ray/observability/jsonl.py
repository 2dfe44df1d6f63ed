"""Append records to a JSON-lines file, off the event loop.

`write` only hands the records to a thread that encodes and appends them, so nothing that is
written holds up who writes it. `close` waits until all of it is in the file. The first error in
the thread is raised by the next `write`, and by `close`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

Item = TypeVar("Item")


class _Step(msgspec.Struct):
    step: int


def keep_until(path: Path, step: int) -> None:
    """Take back the records of later steps, and lines that were cut short by a kill."""
    if not path.exists():
        return
    kept, decoder = path.with_suffix(".kept"), msgspec.json.Decoder(_Step)
    with path.open("rb") as old, kept.open("wb") as new:
        for line in old:
            with contextlib.suppress(msgspec.DecodeError):
                if line.endswith(b"\n") and decoder.decode(line).step <= step:
                    new.write(line)
    os.replace(kept, path)


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


class JsonlWriter(Generic[Item]):
    def __init__(
        self, path: Path, records: Callable[[Item], Iterable[msgspec.Struct]] | None = None
    ) -> None:
        """`records` makes what is written out of an item, in the thread."""
        self._file = path.open("ab")
        if not _ends_a_line(path):
            self._file.write(b"\n")  # behind what a kill cut short
        self._records = records
        self._encoder = msgspec.json.Encoder()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=path.name)
        self._error: Exception | None = None

    def write(self, item: Item) -> None:
        self._raise_error()
        self._thread.submit(self._append, item)

    def close(self) -> None:
        """Blocks until everything is written: call it off the event loop."""
        self._thread.shutdown()
        self._file.close()
        self._raise_error()

    def _append(self, item: Item) -> None:
        try:
            records = [item] if self._records is None else self._records(item)
            self._file.write(self._encoder.encode_lines(records))
            self._file.flush()
        except Exception as error:  # noqa: BLE001 - raised where the writer is used
            self._error = self._error or error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
