"""Whether a plan's bundles fit on given nodes: pure arithmetic, nobody is asked.

Ray packs bundles on as few nodes as it can, each bundle whole on one node. Here the largest come
first, each to the first node with room for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from areal_ray.placement.plan import Bundle, PlacementPlan


class Node(msgspec.Struct, frozen=True):
    gpus: int
    cpus: float | None = None
    """None: not known, taken for enough."""


class Fit(msgspec.Struct, frozen=True):
    nodes: tuple[int | None, ...]
    """Each bundle's node, by its number. None: there is no room."""

    @property
    def is_whole(self) -> bool:
        return None not in self.nodes

    def on(self, node: int | None) -> list[int]:
        """The bundles that go to this node, or to none."""
        return [bundle for bundle, place in enumerate(self.nodes) if place == node]


def fit(plan: PlacementPlan, nodes: Sequence[Node]) -> Fit:
    free_gpus = [node.gpus for node in nodes]
    free_cpus = [float("inf") if node.cpus is None else node.cpus for node in nodes]
    places: list[int | None] = [None] * len(plan.bundles)
    for index in sorted(range(len(places)), key=lambda index: _size(plan.bundles[index])):
        bundle = plan.bundles[index]
        for number in range(len(nodes)):
            if bundle.gpus <= free_gpus[number] and bundle.cpus <= free_cpus[number]:
                free_gpus[number] -= bundle.gpus
                free_cpus[number] -= bundle.cpus
                places[index] = number
                break
    return Fit(tuple(places))


def _size(bundle: Bundle) -> tuple[float, float]:
    """The largest comes first; among equals, their order stays."""
    return -bundle.gpus, -bundle.cpus
