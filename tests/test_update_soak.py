"""Thousands of weight updates in a row: nothing grows."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
from updating import PATIENT, Fleet, Trap, descriptors

from areal_ray.weights.transport import GlooTransport

UPDATES = int(os.environ.get("AREAL_RAY_SOAK_UPDATES", "1000"))
"""Ten thousand take three minutes on two cores: set it for that."""
BLINK = 250
"""Every so many updates an engine is replaced, and all meet in a new group."""
MAX_GROWTH_MIB = 64
"""What the allocator keeps comes and goes by half of this."""


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def held(others: set[tuple[str, str]]) -> tuple[dict[str, int], int]:
    """What is open besides the `others`, and how many objects there are."""
    gc.collect()
    things = gc.get_objects()
    return {
        "groups": sum(type(thing) is GlooTransport for thing in things),
        "file descriptors": len(descriptors() - others),
        "threads": threading.active_count(),
    }, len(things)


@pytest.mark.timeout(600)
async def test_thousands_of_updates_leave_nothing_behind() -> None:
    others = descriptors()
    trap = Trap("nowhere", "before", "raise")
    fleet = Fleet(trap, engines=2, limits=PATIENT, staging="device", release_kv=False)
    await fleet.start()

    async def update(times: int) -> None:
        for number in range(times):
            fleet.trainer.version += 1
            await fleet.updates.update(fleet.trainer.version)
            if number % BLINK == BLINK - 1:
                await fleet.replace("engine-1")

    await update(BLINK)
    before, objects_before = held(others)
    mib_before = resident_mib()
    await update(UPDATES - BLINK)
    after, objects_after = held(others)
    assert after == before
    assert objects_after - objects_before < UPDATES / 4, "an object is left for every few updates"
    assert resident_mib() - mib_before < MAX_GROWTH_MIB
    fleet.trainer.train()
    await fleet.updates.update(fleet.trainer.version)
    assert set(fleet.served().values()) == {fleet.trainer.version}
    await fleet.close()
