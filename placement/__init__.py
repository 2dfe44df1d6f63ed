"""From a config to bundles, and from bundles to a reserved part of the cluster."""

from areal_ray.placement.cluster import Cluster, connect, device_of, join
from areal_ray.placement.plan import Bundle, PlacementPlan, Seat, engine_plan, plan
from areal_ray.placement.reservation import Reservation, Slot, adopt, reserve

__all__ = [
    "Bundle",
    "Cluster",
    "PlacementPlan",
    "Reservation",
    "Seat",
    "Slot",
    "adopt",
    "connect",
    "device_of",
    "engine_plan",
    "join",
    "plan",
    "reserve",
]
