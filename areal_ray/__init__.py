"""areal_ray: Ray-native asynchronous reinforcement learning of language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_ray.config import Config
    from areal_ray.config_file import load as load_config
    from areal_ray.run import Run, RunResult, train
    from areal_ray.types import Completion, Message, Prompt, Trajectory
    from areal_ray.workbench import Workbench
    from areal_ray.workflows import RolloutContext, single_turn

_HOMES = {
    "Completion": "areal_ray.types",
    "Config": "areal_ray.config",
    "Message": "areal_ray.types",
    "Prompt": "areal_ray.types",
    "RolloutContext": "areal_ray.workflows",
    "Run": "areal_ray.run",
    "RunResult": "areal_ray.run",
    "Trajectory": "areal_ray.types",
    "Workbench": "areal_ray.workbench",
    "load_config": "areal_ray.config_file:load",
    "single_turn": "areal_ray.workflows",
    "train": "areal_ray.run",
}

__all__ = [
    "Completion",
    "Config",
    "Message",
    "Prompt",
    "RolloutContext",
    "Run",
    "RunResult",
    "Trajectory",
    "Workbench",
    "load_config",
    "single_turn",
    "train",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import on first use: `areal-ray --help` and scoring processes need no torch and no ray."""
    if name not in _HOMES:
        raise AttributeError(f"module 'areal_ray' has no attribute '{name}'")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute or name)
