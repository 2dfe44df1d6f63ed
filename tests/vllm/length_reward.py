"""A reward that differs between the samples of any model, also of one that knows nothing yet."""

from __future__ import annotations

from areal_ray import Completion, Prompt


def closeness(prompt: Prompt, completion: Completion) -> float:
    """To an answer of three characters."""
    return -abs(len(completion.text) - 3)
