"""Advantages: from the rewards of a batch to how much better than its group each sample was.

An advantage takes `rewards` and `group_ids`, both one per sample in any order, and gives one
number per sample. A group of one has nothing to compare with: its advantage is zero.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from areal_ray.algorithms.registry import Registry

EPSILON = 1e-6


class Advantage(Protocol):
    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor: ...


ADVANTAGES: Registry[Advantage] = Registry("algorithm.advantage")


@ADVANTAGES.register("grpo")
def grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(r - mean) / (std + eps) within the group. DeepSeekMath (arXiv:2402.03300), section 4.1.2.

    The standard deviation is the unbiased one (n - 1).
    """
    _, index, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    centred = rewards - _group_mean(rewards, index, counts)
    squares = torch.zeros_like(counts, dtype=rewards.dtype).index_add_(0, index, centred**2)
    std = (squares / (counts - 1).clamp(min=1)).sqrt()[index]
    return centred / (std + EPSILON)


@ADVANTAGES.register("dr_grpo")
def dr_grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """r - mean within the group. Understanding R1-Zero-Like Training (arXiv:2503.20783), eq. 3."""
    _, index, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return rewards - _group_mean(rewards, index, counts)


def _group_mean(values: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    sums = torch.zeros_like(counts, dtype=values.dtype).index_add_(0, index, values)
    return (sums / counts)[index]
