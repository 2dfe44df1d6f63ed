"""A failure at every step of a weight update, of every kind.

The table is generated: each call of the protocol, each step inside an engine, each message of the
transfer; before it has an effect and after; raising, hanging, dying, and the update being
cancelled right there; alone, and, for what undoes, while another failure is undone. Whatever
happens, each engine then serves one known version or is out, none is paused or without its KV
cache, nothing leaks, and the next update succeeds.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from typing import NamedTuple, get_args

import pytest
from updating import Fleet, How, Trap, When, descriptors

from areal_ray.errors import WeightUpdateError
from areal_ray.generation.faults import FailStep, Step
from areal_ray.weights.staging import Landing, StreamStaging
from areal_ray.weights.transaction import Engine, Limits, Trainer
from areal_ray.weights.transport import GlooTransport
from areal_ray.weights.update import StagingMode

IMPATIENT = Limits(timeout_s=1.0, busy_timeout_s=1.0, restore_timeout_s=1.0, max_failures=2)
AT_ONCE = 16
BROADCASTS = 3
"""Two buckets and their checksums."""


def calls_of(protocol: type) -> list[str]:
    return [name for name, value in vars(protocol).items() if callable(value) and name[0] != "_"]


TRANSFER = ["join", *(f"broadcast {n + 1}" for n in range(BROADCASTS)), "acknowledge"]
POINTS = [
    *(f"trainer.{name}" for name in [*calls_of(Trainer), *TRANSFER]),
    *(f"engine-1.{name}" for name in [*calls_of(Engine), *get_args(Step), *TRANSFER]),
]
ON_THE_WAY_BACK = [
    "trainer.call_off",
    *(f"engine-1.{name}" for name in ("discard", "drop", "restore_kv", "resume")),
]
IN_PLACE_ONLY = {"engine-1.release_kv", "engine-1.restore_kv"}


class Case(NamedTuple):
    point: str
    when: When
    how: How
    besides: str
    """Something else that fails, so that the point lies on the way back."""


def cases(how: How) -> list[Case]:
    alone = itertools.product(POINTS, get_args(When), ["nothing"])
    undoing = itertools.product(ON_THE_WAY_BACK, get_args(When), ["engine-0 can't receive"])
    return [Case(point, when, how, besides) for point, when, besides in (*alone, *undoing)]


async def suffer(case: Case, staging: StagingMode) -> bool:
    """Returns whether the fault struck: not every point lies on every way."""
    trap = Trap(case.point, case.when, case.how)
    trap.has_struck = True  # not yet
    fleet = Fleet(trap, engines=2, limits=IMPATIENT, staging=staging, release_kv=staging == "none")
    await fleet.start()
    trap.has_struck = False
    if case.besides != "nothing":
        fault = FailStep(step="receive", how="raise", when="after")
        fleet.engines["engine-0"].engine.inject(fault)
    if case.point.endswith("join"):
        fleet.updates._group_of = ()  # so that there is somebody to join

    old, new = fleet.trainer.version, fleet.trainer.version + 1
    fleet.trainer.train()
    updating = asyncio.ensure_future(fleet.updates.update(new))
    loop = asyncio.get_running_loop()
    trap.cancel = lambda: loop.call_soon_threadsafe(updating.cancel)
    (outcome,) = await asyncio.gather(updating, return_exceptions=True)
    if isinstance(outcome, BaseException):
        assert isinstance(outcome, (WeightUpdateError, asyncio.CancelledError)), repr(outcome)
    has_struck, trap.has_struck = trap.has_struck, True

    served = set(fleet.served().values())
    assert len(served) <= 1, served
    assert served <= {old, new}, served

    trap.release()
    fleet.be_patient()
    fleet.engines["engine-0"].engine._plan._waiting.clear()
    fleet.trainer.restart_if_dead()
    # What is lost, or dead without anybody knowing yet, is replaced as the pool would.
    for name, engine in fleet.engines.items():
        if name not in fleet.updates.members or engine.engine.is_dead:
            await fleet.replace(name)
    fleet.trainer.train()
    outcome = await fleet.updates.update(new + 1)
    assert outcome.engines == 2, outcome
    assert fleet.served() == {"engine-0": new + 1, "engine-1": new + 1}
    await fleet.close()
    return has_struck


def resources(others: set[tuple[str, str]]) -> dict[str, int]:
    gc.collect()
    alive = [type(thing) for thing in gc.get_objects()]
    return {
        "groups": alive.count(GlooTransport),
        "staging copies": alive.count(StreamStaging) + alive.count(Landing),
        "receiving threads": sum(t.name == "weight-staging" for t in threading.enumerate()),
        "file descriptors": len(descriptors() - others),
    }


async def resources_settled(
    others: set[tuple[str, str]], file_descriptors: int | None = None
) -> dict[str, int]:
    """What is left when what was closed is gone: nothing, besides so many file descriptors."""
    for _ in range(100):
        left = resources(others)
        opened = left["file descriptors"]
        most = opened if file_descriptors is None else file_descriptors
        if sum(left.values()) == opened <= most:
            break
        await asyncio.sleep(0.05)
    return left


@pytest.mark.parametrize("staging", ["device", "none"])
@pytest.mark.parametrize("how", get_args(How))
async def test_a_failure_at_any_step_leaves_a_fleet_that_is_whole(
    how: How, staging: StagingMode
) -> None:
    others = descriptors()
    await suffer(Case("nowhere", "before", how, "nothing"), staging)
    before = await resources_settled(others)
    turns = asyncio.Semaphore(AT_ONCE)
    struck: set[str] = set()

    async def one(case: Case) -> None:
        async with turns:
            try:
                if await asyncio.wait_for(suffer(case, staging), 60):
                    struck.add(case.point)
            except Exception as error:
                error.add_note(f"{case}, staging {staging}")
                raise

    outcomes = await asyncio.gather(*map(one, cases(how)), return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if failures:
        raise BaseExceptionGroup(f"{len(failures)} of {len(outcomes)} cases", failures)
    assert set(POINTS) - struck == (IN_PLACE_ONLY if staging == "device" else set())
    assert await resources_settled(others, before["file descriptors"]) == before
