from areal_ray.rewards.pool import Reward, RewardPool

__all__ = ["Reward", "RewardPool"]
