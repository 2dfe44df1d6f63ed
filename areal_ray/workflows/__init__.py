from areal_ray.workflows.base import RolloutContext, Workflow, checked, load_workflow
from areal_ray.workflows.filters import GroupFilter, load_filter
from areal_ray.workflows.single_turn import single_turn

__all__ = [
    "GroupFilter",
    "RolloutContext",
    "Workflow",
    "checked",
    "load_filter",
    "load_workflow",
    "single_turn",
]
