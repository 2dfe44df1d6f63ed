from areal_ray.weights.layout import TensorSpec, WeightManifest
from areal_ray.weights.transport import GroupMember, TransferGroup

__all__ = ["GroupMember", "TensorSpec", "TransferGroup", "WeightManifest"]
