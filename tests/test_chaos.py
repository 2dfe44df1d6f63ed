"""A seeded storm of faults over a thousand groups: at the end, every one is accounted for."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter, deque
from pathlib import Path

import pytest
from rehearsing import RehearsedCrew, pid_of, run, simulated

from areal_ray.generation.faults import Die, FailRequest, FailStep, Slow, SpoilResult, Wedge
from areal_ray.tasks import guarded

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(600)]

ENGINES, WORKERS, BATCH = 4, 2, 32
STRIKE_TIMEOUT_S = 3.0
GROUPS = 1200

# How often each fault comes. Those that end a process take seconds to mend.
STORM = {
    "fail a request": 24,
    "spoil a result": 20,
    "leave a completion out": 20,
    "slow": 16,
    "engine dies": 8,
    "engine process killed": 8,
    "engine wedges": 4,
    "commit fails": 4,
    "worker killed": 4,
    "queue killed": 2,
    "controller killed": 2,
}
INJECTED = {
    "fail a request": FailRequest(),
    "spoil a result": SpoilResult(how="nan_logprob"),
    "leave a completion out": SpoilResult(how="missing_completion"),
    "slow": Slow(factor=0.2, duration_s=1.0),
    "engine dies": Die(),
    "engine wedges": Wedge(),
    "commit fails": FailStep(step="swap", how="raise", when="after"),
}


class Storm:
    def __init__(self, rehearsal: RehearsedCrew, seed: int) -> None:
        self._rehearsal = rehearsal
        self._rng = random.Random(seed)
        self._to_come = deque(
            self._rng.sample([*STORM], k=sum(STORM.values()), counts=[*STORM.values()])
        )
        self.struck: Counter[str] = Counter()

    async def rage(self) -> None:
        while self._to_come:
            await asyncio.sleep(self._rng.uniform(0.02, 0.3))
            fault = self._to_come.popleft()
            try:
                await asyncio.wait_for(self._strike(fault), STRIKE_TIMEOUT_S)
            except Exception:  # noqa: BLE001 - whoever was meant is down already: another time
                self._to_come.append(fault)
            else:
                self.struck[fault] += 1

    async def _strike(self, fault: str) -> None:
        crew = self._rehearsal.crew
        engine = f"engine-{self._rng.randrange(ENGINES)}"
        worker = f"worker-{self._rng.randrange(WORKERS)}"
        if fault in INJECTED:
            await self._rehearsal.inject(engine, INJECTED[fault])
            return
        victim = {
            "engine process killed": crew.engines[engine],
            "worker killed": self._rehearsal.workers[worker],
            "queue killed": crew.queue,
            "controller killed": crew.controller,
        }[fault]
        os.kill(await pid_of(victim), signal.SIGKILL)


async def check_conservation(rehearsal: RehearsedCrew) -> None:
    """At every moment that can be seen from outside."""
    while True:
        counts = await rehearsal.counts()
        ended = counts.accepted + counts.filtered + counts.failed + counts.expired
        assert counts.submitted == counts.running + ended, counts
        assert counts.accepted + counts.running <= (2 + counts.version + 1) * BATCH, counts
        await asyncio.sleep(0.02)


def test_through_a_storm_of_faults_every_group_is_accounted_for(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def scenario() -> Counter[str]:
        async with RehearsedCrew(
            tiny_model,
            tmp_path,
            engine=simulated(tokens_per_s=150.0, mean_tokens=12.0),
            generation={
                "engines": ENGINES,
                "max_new_tokens": 40,
                "suspect_after_s": 1,
                "dead_after_s": 3,
            },
            rollout={
                "samples": 4,
                "workers": WORKERS,
                "max_staleness": 2,
                "max_failed_groups": 10**6,
                "order": "window",
            },
            trainer={"groups_per_step": BATCH},
        ) as rehearsal:
            storm = Storm(rehearsal, seed=2026)
            raging = asyncio.ensure_future(storm.rage())

            async def work() -> None:
                while len(rehearsal.trained) < GROUPS or not raging.done():
                    await rehearsal.step()

            await guarded(work(), check_conservation(rehearsal))
            await raging
            await rehearsal.check_that_all_is_well(may_fail=True)
            counts = await rehearsal.counts()
            assert counts.failed > 0
            assert counts.submitted >= GROUPS
            return storm.struck

    assert run(scenario(), timeout_s=500) == STORM
