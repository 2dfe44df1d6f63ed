from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from areal_ray.errors import PluginError
from areal_ray.types import Prompt, Trajectory, TrajectoryGroup
from areal_ray.workflows import load_filter
from areal_ray.workflows.filters import everything, unequal_rewards


def group(*rewards: float) -> TrajectoryGroup:
    one = np.ones(1, dtype=np.int32)
    return TrajectoryGroup(
        group_id=0,
        prompt=Prompt(text="2+2="),
        trajectories=[
            Trajectory(
                prompt_ids=one,
                response_ids=one,
                response_mask=one.astype(np.bool_),
                logprobs=-one.astype(np.float32),
                versions=one,
                reward=reward,
                finish_reason="stop",
                text="4",
            )
            for reward in rewards
        ],
    )


@pytest.mark.parametrize(
    ("rewards", "keeps"),
    [
        ((1.0, 1.0, 1.0), False),
        ((0.0, 0.0), False),
        # A zero is a zero.
        ((0.0, -0.0), False),
        ((1.0,), False),
        ((1.0, 1.0, 0.0), True),
        ((0.5, 0.25), True),
        ((-1.0, 1.0), True),
    ],
)
def test_a_group_is_worth_it_if_its_rewards_are_not_all_equal(
    rewards: tuple[float, ...], keeps: bool
) -> None:
    assert unequal_rewards(group(*rewards)) is keeps
    assert everything(group(*rewards)) is True


def test_rules_are_found_by_their_names() -> None:
    assert load_filter("everything") is everything
    assert load_filter("unequal_rewards") is unequal_rewards


def test_ones_own_rule_is_found_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "rules.py"
    path.write_text("def not_hopeless(group):\n    return group.summary().mean_reward > 0.25\n")
    keep = load_filter(f"{path}:not_hopeless")
    assert keep(group(1.0, 0.0))
    assert not keep(group(0.25, 0.25))


def test_a_rule_may_take_more_than_a_group_if_that_has_defaults(tmp_path: Path) -> None:
    path = tmp_path / "lenient_rules.py"
    path.write_text(
        "def above(group, limit=0.5):\n    return group.summary().mean_reward > limit\n"
    )
    assert load_filter(f"{path}:above")(group(1.0))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "unequal",
            "rollout.filter: expected one of everything, unequal_rewards, or file.py:function, "
            "got unequal$",
        ),
        ("", "rollout.filter: expected one of"),
        ("missing.py:rule", "no such file"),
        ("no_such_package:rule", "can't be imported"),
        ("math:no_such", "math has no `no_such`"),
        ("math:pi", "`pi` is a float, not a function"),
        ("math:", "expected file.py:function"),
        ("random:random", "rollout.filter: random:random must take a group: too many positional"),
        ("operator:eq", "rollout.filter: operator:eq must take a group: missing a required"),
    ],
)
def test_a_rule_that_leads_nowhere_or_takes_no_group_is_refused(spec: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load_filter(spec)


def test_a_rule_that_must_be_awaited_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "awaited_rules.py"
    path.write_text("async def none(group):\n    return False\n")
    with pytest.raises(PluginError, match="must answer at once: it is a coroutine function"):
        load_filter(f"{path}:none")
