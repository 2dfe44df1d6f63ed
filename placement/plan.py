"""What a run needs, as bundles: one for the trainer, one for each engine. Pure arithmetic.

On CPUs an engine asks for half a core, since engines and trainer share what there is; the
control plane (controller, queue, workers, manager) computes little and asks for nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from areal_ray.config import Config

Role = Literal["trainer", "engine"]


class Bundle(msgspec.Struct, frozen=True):
    role: Role
    cpus: float
    gpus: int = 0

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


class PlacementPlan(msgspec.Struct, frozen=True):
    bundles: tuple[Bundle, ...]

    @property
    def cpus(self) -> float:
        return sum(bundle.cpus for bundle in self.bundles)

    @property
    def gpus(self) -> int:
        return sum(bundle.gpus for bundle in self.bundles)

    def indices(self, role: Role) -> list[int]:
        return [index for index, bundle in enumerate(self.bundles) if bundle.role == role]


def plan(config: Config, *, device: Literal["cpu", "cuda"]) -> PlacementPlan:
    trainer = Bundle(role="trainer", cpus=1, gpus=1 if device == "cuda" else 0)
    engines = engine_plan(config, device=device).bundles * config.generation.engines
    return PlacementPlan(bundles=(trainer, *engines))


def engine_plan(config: Config, *, device: Literal["cpu", "cuda"]) -> PlacementPlan:
    """One engine alone: what a pool needs to grow by one."""
    if device == "cuda":
        engine = Bundle(role="engine", cpus=1, gpus=config.generation.tensor_parallel)
    else:
        engine = Bundle(role="engine", cpus=0.5)
    return PlacementPlan(bundles=(engine,))
