"""Two runs of the same name on one cluster, at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import ray

from areal_ray.actors.crew_members import NAMESPACE
from areal_ray.cli.running import find_monitor
from areal_ray.deadlines import within
from areal_ray.errors import NoRun
from tests.rehearsing import RehearsedCrew


async def test_two_runs_of_one_name_do_not_touch_each_other(
    ray_cluster: None, tiny_model: Path, tmp_path: Path
) -> None:
    directories = [tmp_path / who / "same" for who in ("anna", "bert")]
    for directory in directories:
        directory.mkdir(parents=True)
    first, second = (RehearsedCrew(tiny_model, directory) for directory in directories)

    async def both() -> None:
        async with second:
            async with first:
                await asyncio.gather(first.steps(2), second.steps(3))
                statuses = await asyncio.gather(
                    *(crew.crew.monitor.status.remote() for crew in (first, second))
                )
                assert [status.directory for status in statuses] == list(map(str, directories))
                assert [status.name for status in statuses] == ["same", "same"]
                engines = [
                    actor["namespace"]
                    for actor in ray.util.list_named_actors(all_namespaces=True)
                    if actor["name"] == "same/engine-0"
                ]
                assert len(set(engines)) == 2
                assert all(namespace.startswith(f"{NAMESPACE}same/") for namespace in engines)
                with pytest.raises(NoRun, match="more than one run is meant"):
                    find_monitor("same")
                with pytest.raises(NoRun, match="no run named other is on its way; there: same"):
                    find_monitor("other")
            # The other one ends, and this one goes on.
            await second.steps(2)
            await second.check_that_all_is_well()
            assert find_monitor("same") == find_monitor(None)

    await within(120, both(), who="the test", doing="its work")
