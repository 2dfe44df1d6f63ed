"""What a run needs, as bundles of seats: an actor takes one seat. Pure arithmetic.

Each rank of the trainer and each engine has a bundle of its own; colocated, the trainer sits in the
first engine's and uses its GPUs (one actor alone is given them by Ray; the other is told which they
are). On CPUs an engine asks for half a core, since engines and trainer share what there is; the
control plane (controller, queue, workers, manager) computes little and asks for nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from areal_ray.config import Config

Role = Literal["trainer", "engine"]
Device = Literal["cpu", "cuda"]


class Seat(msgspec.Struct, frozen=True):
    role: Role
    cpus: float
    gpus: int = 0


class Bundle(msgspec.Struct, frozen=True):
    """Seats on one node."""

    seats: tuple[Seat, ...]

    @property
    def cpus(self) -> float:
        return sum(seat.cpus for seat in self.seats)

    @property
    def gpus(self) -> int:
        return sum(seat.gpus for seat in self.seats)

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

    def seats(self, role: Role) -> list[tuple[int, Seat]]:
        """Each with the number of its bundle."""
        return [
            (index, seat)
            for index, bundle in enumerate(self.bundles)
            for seat in bundle.seats
            if seat.role == role
        ]


def plan(config: Config, *, device: Device) -> PlacementPlan:
    engines = engine_plan(config, device=device).bundles * config.generation.engines
    if config.generation.colocated:
        trainer = Seat(role="trainer", cpus=1)
        shared = Bundle(seats=(*engines[0].seats, trainer))
        return PlacementPlan(bundles=(shared, *engines[1:]))
    rank = Seat(role="trainer", cpus=1, gpus=1 if device == "cuda" else 0)
    return PlacementPlan(bundles=(Bundle(seats=(rank,)),) * config.trainer.ranks + engines)


def engine_plan(config: Config, *, device: Device) -> PlacementPlan:
    """One engine alone: what a pool needs to grow by one."""
    if device == "cuda":
        engine = Seat(role="engine", cpus=1, gpus=config.generation.tensor_parallel)
    else:
        engine = Seat(role="engine", cpus=0.5)
    return PlacementPlan(bundles=(Bundle(seats=(engine,)),))
