from areal_ray.algorithms.advantages import ADVANTAGES, Advantage
from areal_ray.algorithms.losses import POLICY_LOSSES, LossInputs, LossOutputs, PolicyLoss

__all__ = ["ADVANTAGES", "POLICY_LOSSES", "Advantage", "LossInputs", "LossOutputs", "PolicyLoss"]
