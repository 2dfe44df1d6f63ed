"""Which engine a spec means."""

from __future__ import annotations

from areal_ray.generation.engine import Engine, EngineSpec
from areal_ray.generation.simulated import SimulatedEngine, SimulatedSpec


def make_engine(spec: EngineSpec | SimulatedSpec, *, address: str) -> Engine:
    """`address`: of this node, the only one that the engine may listen on."""
    if isinstance(spec, SimulatedSpec):
        return SimulatedEngine(spec)
    from areal_ray.generation.vllm import VllmEngine

    return VllmEngine(spec, address=address)
