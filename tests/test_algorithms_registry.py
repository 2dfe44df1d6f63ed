from __future__ import annotations

import pytest

from areal_ray.algorithms import ADVANTAGES, POLICY_LOSSES, AdvantageTraits, LossTraits
from areal_ray.algorithms.registry import Registry
from areal_ray.errors import ConfigError


def test_an_unknown_algorithm_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as refused:
        _ = ADVANTAGES["grppo"]
    known = ", ".join(ADVANTAGES)
    assert str(refused.value) == (
        f'algorithm.advantage: expected one of {known}, got "grppo"; did you mean `grpo`?'
    )
    with pytest.raises(ConfigError, match="did you mean `grpo`"):
        ADVANTAGES.traits("grppo")


def test_a_name_can_be_registered_once() -> None:
    with pytest.raises(ValueError, match="`ppo` is registered already"):
        POLICY_LOSSES.register("ppo")(lambda inputs: inputs)


def test_a_function_has_the_traits_it_was_registered_with_or_the_defaults() -> None:
    registry: Registry = Registry("some.key", default_traits=LossTraits())
    registry.register("plain")(lambda inputs: inputs)
    registry.register("needy", LossTraits(needs_entropy=True))(lambda inputs: inputs)
    assert registry.traits("plain") == LossTraits()
    assert registry.traits("needy").needs_entropy
    assert ADVANTAGES.traits("gae") == AdvantageTraits(needs_values=True)
