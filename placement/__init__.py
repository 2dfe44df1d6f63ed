"""From a config to bundles, and from bundles to a reserved part of the cluster."""

from areal_ray.placement.cluster import Cluster, connect
from areal_ray.placement.plan import Bundle, PlacementPlan, Seat, engine_plan, plan
from areal_ray.placement.reservation import Reservation, Slot, reserve

__all__ = [
    "Bundle",
    "Cluster",
    "PlacementPlan",
    "Reservation",
    "Seat",
    "Slot",
    "connect",
    "engine_plan",
    "plan",
    "reserve",
]
