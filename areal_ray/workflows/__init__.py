from areal_ray.workflows.base import RolloutContext, Workflow, checked, load_workflow
from areal_ray.workflows.single_turn import single_turn

__all__ = ["RolloutContext", "Workflow", "checked", "load_workflow", "single_turn"]
