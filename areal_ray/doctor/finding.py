"""What a check finds, and how checks are run: none can hang the others, or end them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from areal_ray.errors import described

Level = Literal["ok", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True):
    what: str
    level: Level
    found: str
    mend: str = ""
    """What to do about it, if it is not ok."""


class Check(msgspec.Struct, frozen=True):
    what: str
    look: Callable[[], Sequence[Finding]]


def ok(what: str, found: str) -> Finding:
    return Finding(what, "ok", found)


def warning(what: str, found: str, mend: str) -> Finding:
    return Finding(what, "warning", found, mend)


def problem(what: str, found: str, mend: str) -> Finding:
    return Finding(what, "problem", found, mend)


def examine(checks: Sequence[Check], *, timeout_s: float) -> list[Finding]:
    """All at once, and their findings in order. A check that raises, or is not back in time (a
    file system that hangs, a driver), is a finding itself."""
    results: list[list[Finding]] = [[] for _ in checks]
    threads = [
        threading.Thread(target=_look, args=(check, result), name=check.what, daemon=True)
        for check, result in zip(checks, results, strict=True)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    findings: list[Finding] = []
    for check, thread, result in zip(checks, threads, results, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            findings.append(
                problem(
                    check.what,
                    f"no answer within {timeout_s:g} s",
                    "something below hangs: a network file system, a driver, or a cluster",
                )
            )
        else:
            findings += result
    return findings


def _look(check: Check, result: list[Finding]) -> None:
    try:
        result += check.look()
    except Exception as error:  # noqa: BLE001 - told as a finding; the others go on
        told = " ".join(described(error).split())
        result.append(warning(check.what, f"can't be checked: {told}", "look at it by hand"))
