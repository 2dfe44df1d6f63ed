"""Bundles reserved in the cluster as one placement group: all of them or none."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_ray.errors import PlacementError
from areal_ray.placement.plan import PlacementPlan, Role

RESERVE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Slot:
    """Where one actor goes, and what it may use there."""

    num_cpus: float
    num_gpus: int
    scheduling_strategy: PlacementGroupSchedulingStrategy


class Reservation:
    def __init__(
        self, plan: PlacementPlan, group: PlacementGroup, *, is_borrowed: bool = False
    ) -> None:
        self._plan = plan
        self._group = group
        self._is_borrowed = is_borrowed

    def slots(self, role: Role) -> list[Slot]:
        return [
            Slot(
                num_cpus=seat.cpus,
                num_gpus=seat.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            )
            for index, seat in self._plan.seats(role)
        ]

    def release(self) -> None:
        if not self._is_borrowed:
            remove_placement_group(self._group)


def adopt(plan: PlacementPlan) -> Reservation | None:
    """The bundles that this process itself was started in, if they are those of the plan: whoever
    reserved them (Ray Tune for a trial) did it for the run, and gives them back."""
    group = get_current_placement_group()
    if group is None or group.bundle_specs != [bundle.resources for bundle in plan.bundles]:
        return None
    return Reservation(plan, group, is_borrowed=True)


async def reserve(plan: PlacementPlan) -> Reservation:
    """Wait for all bundles of the plan. Gives them back if the wait is given up."""
    group = await asyncio.to_thread(
        placement_group, [bundle.resources for bundle in plan.bundles], strategy="PACK"
    )
    reservation = Reservation(plan, group)
    try:
        if not await asyncio.to_thread(group.wait, RESERVE_TIMEOUT_S):
            raise PlacementError(await asyncio.to_thread(_what_is_missing, plan))
    except BaseException:
        await asyncio.to_thread(reservation.release)
        raise
    return reservation


def _what_is_missing(plan: PlacementPlan) -> str:
    free = ray.available_resources()
    return (
        f"the cluster did not free {plan.cpus:g} CPUs and {plan.gpus} GPUs within "
        f"{RESERVE_TIMEOUT_S:g} s; free now: {free.get('CPU', 0):g} CPUs, "
        f"{free.get('GPU', 0):g} GPUs"
    )
