from __future__ import annotations

import numpy as np
import pytest

from areal_ray.errors import WorkflowError
from areal_ray.types import Trajectory
from areal_ray.workflows import checked


def trajectory(**changes: object) -> Trajectory:
    fields = {
        "prompt_ids": np.array([3, 4], dtype=np.int32),
        "response_ids": np.array([5, 6, 7], dtype=np.int32),
        "response_mask": np.array([True, False, True]),
        "logprobs": np.array([-1.0, 0.0, -2.0], dtype=np.float32),
        "versions": np.array([4, -1, 5], dtype=np.int32),
        "reward": 1.0,
        "finish_reason": "stop",
        "text": "abc",
    }
    return Trajectory(**(fields | changes))


def test_a_tools_tokens_do_not_count_as_old() -> None:
    assert trajectory().oldest_version == 4
    assert checked([trajectory()])[0].reward == 1.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "must give a list of trajectories, got None"),
        ([], "must give a list of trajectories, got \\[\\]"),
        (["text"], "must give trajectories, got a str"),
        ([trajectory(response_mask=np.zeros(3, dtype=np.bool_))], "no token that the policy made"),
        ([trajectory(logprobs=np.zeros(2, dtype=np.float32))], "as long as response_ids"),
        ([trajectory(prompt_ids=np.array([], dtype=np.int32))], "its prompt is empty"),
        ([trajectory(reward=float("nan"))], "its reward is nan"),
        ([trajectory(logprobs=np.full(3, np.inf, dtype=np.float32))], "a logprob is not finite"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(given: object, message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        checked(given)
