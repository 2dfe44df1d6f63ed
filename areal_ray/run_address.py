"""Where a run that is on its way can be reached: `live.json` in its directory, for as long."""

from __future__ import annotations

from pathlib import Path

import msgspec

LIVE = "live.json"


class RunAddress(msgspec.Struct, frozen=True):
    ray_address: str
    """Of the cluster that it runs on."""
    monitor: str
    """The name of its monitor, an actor there."""
    namespace: str
    report_url: str = ""
    """Of the live report, on the node of the driver."""


def publish(directory: Path, address: RunAddress) -> None:
    (directory / LIVE).write_bytes(msgspec.json.encode(address))


def withdraw(directory: Path) -> None:
    (directory / LIVE).unlink(missing_ok=True)


def published(directory: Path) -> RunAddress | None:
    """None if no run is on its way there."""
    try:
        return msgspec.json.decode((directory / LIVE).read_bytes(), type=RunAddress)
    except (OSError, msgspec.MsgspecError):
        return None
