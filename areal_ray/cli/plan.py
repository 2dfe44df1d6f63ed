"""`areal-ray plan`: what would run where, and what follows from a config, with nothing started."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Literal

import msgspec

from areal_ray.cli.command import add_config, command, config_of
from areal_ray.errors import ConfigError

if TYPE_CHECKING:
    from areal_ray.config import Config
    from areal_ray.placement.fit import Node
    from areal_ray.placement.overview import Overview
    from areal_ray.planning.figures import Chapter

EXIT_CODES = {
    0: "it would fit",
    1: "it would not fit on these nodes",
    2: "refused: a bad command line or config",
}


class Plan(msgspec.Struct, frozen=True):
    """All of it, as `--json` prints it."""

    name: str
    placement: Overview
    chapters: list[Chapter]


def add(commands: argparse._SubParsersAction) -> None:
    plan = command(
        commands,
        "plan",
        _run,
        summary="tell what would run where, without starting anything",
        description=(
            "Tell what a run would need and do: actors and where they go, memory, staleness, "
            "checkpoints; each number with how it came about. Nothing is started and nothing "
            "downloaded; no GPU is needed. Refuses what `train` refuses.\n\n"
            "Without --gpus, --nodes and --gpus-per-node the plan is for this machine."
        ),
        examples=[
            "areal-ray plan examples/arithmetic.yaml",
            "areal-ray plan my.yaml trainer.ranks=4 --nodes 2 --gpus-per-node 8",
            "areal-ray plan my.yaml --gpus 8 --json",
        ],
        exit_codes=EXIT_CODES,
    )
    add_config(plan)
    plan.add_argument("--gpus", metavar="N", type=_count, help="GPUs in all")
    plan.add_argument("--nodes", metavar="N", type=_count, help="nodes, all alike (default: 1)")
    plan.add_argument("--gpus-per-node", metavar="N", type=_count, help="GPUs of each node")
    plan.add_argument("--json", action="store_true", help="print JSON, for programs")


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(f"expected a number >= 0, got {count}")
    return count


def _run(options: argparse.Namespace) -> int:
    from areal_ray.placement.overview import overview
    from areal_ray.planning.flow import flow
    from areal_ray.planning.memory import MemoryPlan
    from areal_ray.planning.model_size import model_size
    from areal_ray.run import Run

    config = config_of(options)
    nodes = _nodes(options)
    run = Run(config)  # which refuses what can't work, and starts nothing
    config = _resolved(config, nodes)
    placed = overview(config, nodes)
    chapters = [
        *MemoryPlan(config, model_size(config)).chapters,
        *flow(config, prompts=len(run.prompts), held_out=len(run.held_out)),
    ]
    if options.json:
        told = Plan(config.name, placed, chapters)
        print(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())
    else:
        from areal_ray.cli.plan_view import show

        show(config, placed, chapters)
    return 0 if placed.fits else 1


def _nodes(options: argparse.Namespace) -> list[Node]:
    """Those that the options speak of, or this machine. Raises `ConfigError`."""
    from areal_ray.placement.fit import Node

    gpus, count, per_node = options.gpus, options.nodes, options.gpus_per_node
    if gpus is None and per_node is None and count is None:
        import torch

        return [Node(gpus=torch.cuda.device_count())]
    if count == 0:
        raise ConfigError("--nodes: expected a number >= 1, got 0")
    if per_node is None:
        per_node, rest = divmod(gpus or 0, count or 1)
        if rest:
            raise ConfigError(f"--gpus: {gpus} can't be shared out evenly on {count} nodes")
    elif gpus is not None:
        count = count or max(1, -(-gpus // max(1, per_node)))
        if count * per_node != gpus:
            raise ConfigError(
                f"--gpus: expected {count} nodes × {per_node} GPUs = {count * per_node}, got {gpus}"
            )
    return [Node(gpus=per_node)] * (count or 1)


def _resolved(config: Config, nodes: list[Node]) -> Config:
    from areal_ray.config import check, resolve

    device: Literal["cpu", "cuda"]
    if config.device == "auto":
        device = "cuda" if any(node.gpus for node in nodes) else "cpu"
    else:
        device = config.device
    config = resolve(config, device=device)
    check(config)
    return config
