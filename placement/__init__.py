"""From a config to bundles, and from bundles to a reserved part of the cluster."""

from areal_ray.placement.cluster import Cluster, connect
from areal_ray.placement.plan import Bundle, PlacementPlan, plan
from areal_ray.placement.reservation import Reservation, reserve

__all__ = [
    "Bundle",
    "Cluster",
    "PlacementPlan",
    "Reservation",
    "connect",
    "plan",
    "reserve",
]
