"""How a run ended: `ended.json` in its directory. One that was killed has none."""

from __future__ import annotations

from pathlib import Path

import msgspec

ENDED = "ended.json"


class RunEnd(msgspec.Struct, frozen=True):
    how: str
    """`goal reached`, `all steps done`, `stopped` or `failed`."""
    at: float
    """In seconds since the epoch."""
    cause: str = ""
    """Of a failure."""


def write_end(directory: Path, end: RunEnd) -> None:
    (directory / ENDED).write_bytes(msgspec.json.encode(end))


def forget_end(directory: Path) -> None:
    """It goes on."""
    (directory / ENDED).unlink(missing_ok=True)


def read_end(directory: Path) -> RunEnd | None:
    """None if it goes on, or was killed."""
    try:
        return msgspec.json.decode((directory / ENDED).read_bytes(), type=RunEnd)
    except (OSError, msgspec.MsgspecError):
        return None
