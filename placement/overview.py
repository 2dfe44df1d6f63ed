"""Every actor of a run with what it asks Ray for, and where the bundles would go. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from areal_ray.config import Config
from areal_ray.placement.fit import Node, fit
from areal_ray.placement.plan import Device, PlacementPlan, plan


class ActorNeed(msgspec.Struct, frozen=True):
    """One actor, or several alike."""

    actor: str
    """Its class."""
    count: int
    cpus: float
    gpus: int
    """Each."""
    note: str = ""


class NodeLoad(msgspec.Struct, frozen=True):
    node: int | None
    """None: what there is no room for."""
    gpus: int | None
    """That it has; None if nobody said."""
    gpus_used: int
    cpus_used: float
    seats: dict[str, int]
    """How many of each role."""


class Overview(msgspec.Struct, frozen=True):
    device: Device
    cpus: float
    gpus: int
    actors: tuple[ActorNeed, ...]
    nodes: tuple[NodeLoad, ...]
    fits: bool


def overview(config: Config, nodes: Sequence[Node]) -> Overview:
    """`config`: resolved, with its device."""
    needed = plan(config, device=config.device)
    places = fit(needed, nodes)
    numbers: list[int | None] = list(range(len(nodes)))
    if not places.is_whole:
        numbers.append(None)
    return Overview(
        device=config.device,
        cpus=needed.cpus,
        gpus=needed.gpus,
        actors=tuple(_actors(config, needed)),
        nodes=tuple(
            _load(needed, number, None if number is None else nodes[number].gpus, places.on(number))
            for number in numbers
        ),
        fits=places.is_whole,
    )


def _load(
    needed: PlacementPlan, number: int | None, gpus: int | None, bundles: Sequence[int]
) -> NodeLoad:
    seats: dict[str, int] = {}
    for index in bundles:
        for seat in needed.bundles[index].seats:
            seats[seat.role] = seats.get(seat.role, 0) + 1
    return NodeLoad(
        node=number,
        gpus=gpus,
        gpus_used=sum(needed.bundles[index].gpus for index in bundles),
        cpus_used=sum(needed.bundles[index].cpus for index in bundles),
        seats=seats,
    )


def _actors(config: Config, needed: PlacementPlan) -> list[ActorNeed]:
    (_, trainer), *others = needed.seats("trainer")
    engines = needed.seats("engine")
    shares = "on a GPU of the first engine, by turns" if needed.gpus else "by turns with engines"
    actors = [
        ActorNeed(
            "TrainerActor",
            1,
            trainer.cpus,
            trainer.gpus,
            shares if config.generation.colocated else "the first rank of the trainer",
        )
    ]
    if others:
        rank = others[0][1]
        actors.append(ActorNeed("TrainerRank", len(others), rank.cpus, rank.gpus, "the others"))
    engine = engines[0][1]
    actors += [
        ActorNeed("GenerationActor", len(engines), engine.cpus, engine.gpus, "a vLLM engine each"),
        ActorNeed("RolloutWorker", config.rollout.workers, 0, 0, _scoring(config)),
        ActorNeed("RolloutController", 1, 0, 0, "draws prompts, keeps the ledger"),
        ActorNeed("TrajectoryQueue", 1, 0, 0, "finished groups, by reference"),
        ActorNeed("CheckpointEngineManager", 1, 0, 0, "weight updates"),
    ]
    if config.observability.telemetry:
        actors.append(ActorNeed("RunMonitor", 1, 0, 0, "status, timeline, metrics"))
    return actors


def _scoring(config: Config) -> str:
    processes = config.reward.processes
    return f"episodes; {processes} scoring process{'es' if processes > 1 else ''} each"
