"""The whole lines of a file that grows, a piece at a time.

A line that is not ended yet is left until it is. A file that another has taken the place of, or
that became shorter, is begun anew: a run that is resumed takes back what came after its checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

Item = TypeVar("Item")

PIECE_BYTES = 1 << 20


class Lines(msgspec.Struct, frozen=True):
    text: bytes
    """Whole lines, or nothing."""
    begins_anew: bool
    """Whatever was read before is not so any more."""


class Tail:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0
        self._searched = 0
        """Bytes from the offset on that hold no end of a line."""
        self.size = 0

    @property
    def unread_bytes(self) -> int:
        return self.size - self._offset - self._searched

    def read(self, piece_bytes: int = PIECE_BYTES) -> Lines:
        """The next lines, of about `piece_bytes`; none if there are no more, or no file."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return self._gone()
        with file:
            now = os.fstat(file.fileno())
            begins_anew = self._inode is not None and (
                now.st_ino != self._inode or now.st_size < self._offset
            )
            if begins_anew:
                self._offset = self._searched = 0
            self._inode, self.size = now.st_ino, now.st_size
            file.seek(self._offset)
            piece = file.read(self._searched + piece_bytes)
        end = piece.rfind(b"\n", self._searched) + 1
        self._searched = 0 if end else len(piece)
        self._offset += end
        return Lines(piece[:end], begins_anew)

    def _gone(self) -> Lines:
        was_there, self._inode = self._inode is not None, None
        self._offset = self._searched = self.size = 0
        return Lines(b"", was_there)


class LineDecoder(Generic[Item]):
    """Decodes lines, and counts those that say nothing: a kill may have cut one short."""

    def __init__(self, of: type[Item]) -> None:
        self._decoder = msgspec.json.Decoder(of)
        self.unreadable = 0

    def decode(self, text: bytes) -> list[Item]:
        try:
            return self._decoder.decode_lines(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return list(self._one_by_one(text))

    def _one_by_one(self, text: bytes) -> Iterator[Item]:
        for line in text.splitlines():
            try:
                yield from self._decoder.decode_lines(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self.unreadable += 1
