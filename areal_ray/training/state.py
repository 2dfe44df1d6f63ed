"""All that a trainer is: copied at one moment, written at leisure, and taken up again.

The copy is the only part that holds training up. What is written is by parameter names, not by
ranks, so that another number of them can take it up. Every function blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils import _pytree as pytree

from areal_ray.errors import CheckpointError, described
from areal_ray.training.ranks import Ranks


@dataclass(frozen=True)
class Part:
    """A model, and what trains it, if anything does."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    names: frozenset[str] | None = None
    """Of the module's tensors that belong to it. None: all of them."""


@dataclass(frozen=True)
class Snapshot:
    """In host memory, and nobody else's."""

    tensors: dict[str, object]


def snapshot(parts: Mapping[str, Part], *, steps: int) -> Snapshot:
    copied = pytree.tree_map_only(
        Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), _tensors_of(parts)
    )
    return Snapshot({**copied, "steps": steps, "random": torch.get_rng_state()})


def write(taken: Snapshot, directory: Path, ranks: Ranks) -> None:
    """Each rank its part. Another thread may go on with what the ranks do."""
    try:
        dcp.save(
            taken.tensors,
            checkpoint_id=directory,
            process_group=ranks.writers,
            no_dist=ranks.size == 1,
        )
    except (OSError, dcp.api.CheckpointException) as error:
        raise CheckpointError(f"{directory} can't be written: {_cause(error)}") from error


def restore(parts: Mapping[str, Part], directory: Path, ranks: Ranks) -> int:
    """Returns how many steps had been taken."""
    try:
        written = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
        names = {key.partition(".")[0] for key in written}
        there = {
            name: part if f"{name} optimizer" in names else replace(part, optimizer=None)
            for name, part in parts.items()
        }
        tensors = {
            **_tensors_of(there, begun_or_not=True),
            "steps": 0,
            "random": torch.get_rng_state(),
        }
        dcp.load(
            tensors,
            checkpoint_id=directory,
            process_group=ranks.writers,
            no_dist=ranks.size == 1,
        )
    except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
        raise CheckpointError(f"{directory} does not fit this model: {_cause(error)}") from error
    for name, part in there.items():
        options = StateDictOptions(strict=part.names is None)
        set_model_state_dict(part.module, tensors[f"{name} model"], options=options)
        if part.optimizer is not None:
            set_optimizer_state_dict(
                part.module, part.optimizer, optim_state_dict=tensors[f"{name} optimizer"]
            )
    torch.set_rng_state(tensors["random"])
    return tensors["steps"]


def _cause(error: BaseException) -> str:
    """In one line: torch tells the traceback of each rank."""
    if isinstance(error, dcp.api.CheckpointException):
        return "; ".join(described(failure) for failure, _ in error.failures.values())
    return described(error)


def _tensors_of(parts: Mapping[str, Part], *, begun_or_not: bool = False) -> dict[str, object]:
    """An optimizer that has not begun has no state; asked for it, torch would take a first step."""
    tensors: dict[str, object] = {}
    for name, part in parts.items():
        tensors[f"{name} model"] = {
            key: value
            for key, value in get_model_state_dict(part.module).items()
            if part.names is None or key in part.names
        }
        if part.optimizer is not None and (part.optimizer.state or begun_or_not):
            tensors[f"{name} optimizer"] = get_optimizer_state_dict(part.module, part.optimizer)
    return tensors
