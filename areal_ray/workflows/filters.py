"""Which groups are worth training on: the user's rule, asked before a group goes to the queue.

A group whose rewards are all equal has an advantage of zero for every token: training on it
changes nothing. With `rollout.filter: unequal_rewards` such groups are filtered, and others take
their place (dynamic sampling).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from areal_ray.errors import PluginError
from areal_ray.plugins import load_function
from areal_ray.types import TrajectoryGroup

GroupFilter = Callable[[TrajectoryGroup], bool]
"""True keeps the group."""


def unequal_rewards(group: TrajectoryGroup) -> bool:
    return len({trajectory.reward for trajectory in group.trajectories}) > 1


def everything(group: TrajectoryGroup) -> bool:
    return True


def load_filter(spec: str) -> GroupFilter:
    """A rule by its name, or the user's own as `file.py:function`."""
    built_in: dict[str, GroupFilter] = {
        "everything": everything,
        "unequal_rewards": unequal_rewards,
    }
    if spec in built_in:
        return built_in[spec]
    if ":" not in spec:
        names = ", ".join(built_in)
        raise PluginError(
            f"rollout.filter: expected one of {names}, or file.py:function, got {spec}"
        )
    function = load_function(spec)
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise PluginError(f"rollout.filter: {spec} must take a group: {error}") from error
    if inspect.iscoroutinefunction(function):
        # What it returns is true, whatever it would come to: every group would be kept.
        raise PluginError(f"rollout.filter: {spec} must answer at once: it is a coroutine function")
    return function
