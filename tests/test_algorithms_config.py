from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from areal_ray import algorithm_config
from areal_ray.algorithms import ADVANTAGES, CORRECTIONS, POLICY_LOSSES, Algorithm
from areal_ray.config import check, resolve
from areal_ray.config_file import from_mapping, load, to_yaml
from areal_ray.errors import ConfigError


def config(algorithm: dict, rollout: dict | None = None) -> msgspec.Struct:
    raw = {"name": "test", "model": {"path": "some/model"}, "algorithm": algorithm}
    return from_mapping(raw | ({"rollout": rollout} if rollout else {}))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"advantage": "gae"}, "`gae` needs `algorithm.critic.enabled: true`"),
        ({"critic": {"enabled": True}}, "`grpo` reads no values; expected `advantage: gae`"),
        (
            {"advantage": "reinforce_plus_plus", "whiten": "batch"},
            "algorithm.whiten: `reinforce_plus_plus` whitens over the batch already",
        ),
        ({"advantage": "maxrl", "overlong": {"buffer_tokens": 8}}, "must not be negative"),
        (
            {"advantage": "maxrl", "kl": {"coefficient": 0.1, "place": "reward"}},
            "must not be negative",
        ),
        ({"loss": "decoupled_ppo"}, "algorithm.proximal: expected recompute or interpolate"),
        ({"loss": "dppo", "proximal": "recompute"}, "`dppo` measures against the policy that"),
        (
            {"correction": {"apply": ["token_tis"]}},
            "algorithm.correction.apply: needs `algorithm.proximal: recompute`",
        ),
        (
            {"proximal": "recompute", "correction": {"apply": ["icepop", "icepop"]}},
            "`icepop` is given 2 times",
        ),
        (
            {"proximal": "recompute", "correction": {"apply": ["token_tis", "icepop"]}},
            "token_tis, icepop would each weigh by the same ratio",
        ),
        (
            {
                "loss": "decoupled_ppo",
                "proximal": "recompute",
                "correction": {"apply": ["sequence_tis"]},
            },
            "`sequence_tis` would weigh twice, as `decoupled_ppo` holds the ratio",
        ),
        (
            {"correction": {"icepop_low": 5}},
            "algorithm.correction.icepop_low: expected less than "
            "algorithm.correction.icepop_high (5), got 5",
        ),
        (
            {"covariance": {"low": 6}},
            "algorithm.covariance.low: expected less than algorithm.covariance.high (5), got 6",
        ),
        (
            {"kl": {"coefficient": 0.1, "estimator": "k1"}},
            "algorithm.kl.estimator: `k1` can't be a term of the loss",
        ),
        (
            {"overlong": {"buffer_tokens": 513}},
            "algorithm.overlong.buffer_tokens: expected at most 512, the longest answer, got 513",
        ),
    ],
)
def test_an_algorithm_that_cannot_work_is_refused(algorithm: dict, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(config(algorithm))
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("algorithm", "rollout", "message"),
    [
        ({"advantage": "rloo"}, {"samples": 1}, "`rloo` compares the samples of a prompt"),
        (
            {"advantage": "reinforce", "whiten": "group"},
            {"samples": 1},
            "algorithm.whiten: `group` needs `rollout.samples` >= 2",
        ),
        (
            {"proximal": "interpolate"},
            {"max_staleness": 0},
            "algorithm.proximal: `interpolate` estimates from the age of tokens",
        ),
    ],
)
def test_an_algorithm_that_the_rollout_makes_pointless_is_refused(
    algorithm: dict, rollout: dict, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check(config(algorithm, rollout))
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"advantage": "gae", "critic": {"enabled": True}, "whiten": "batch"},
        {"loss": "decoupled_ppo", "proximal": "interpolate"},
        {
            "loss": "decoupled_ppo",
            "proximal": "recompute",
            "correction": {"apply": ["geometric_rejection"]},
        },
        {"proximal": "recompute", "correction": {"apply": ["token_tis", "sequence_rejection"]}},
        {"loss": "dppo", "dppo": {"divergence": "kl", "threshold": 0.05}},
        {"loss": "gspo", "reduction": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
        {"kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"}},
        {"advantage": "dr_grpo", "reduction": "sequence_mean_token_sum_norm"},
        {"overlong": {"buffer_tokens": 128}, "dual_clip": 3.0},
    ],
)
def test_a_known_recipe_is_accepted_and_can_be_looked_up(algorithm: dict) -> None:
    good = config(algorithm)
    check(good)
    assert Algorithm.of(resolve(good, device="cpu").algorithm).config.norm_tokens == 512


def test_what_is_left_open_follows_from_the_rest() -> None:
    derived = resolve(config({"gae_lambda": 0.9}), device="cpu").algorithm
    assert (derived.norm_tokens, derived.overlong.max_tokens) == (512, 512)
    assert derived.critic.gae_lambda == 0.9
    given = {"norm_tokens": 7, "overlong": {"max_tokens": 8}, "critic": {"gae_lambda": 0}}
    kept = resolve(config(given), device="cpu").algorithm
    assert (kept.norm_tokens, kept.overlong.max_tokens, kept.critic.gae_lambda) == (7, 8, 0)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"kl": {"estimator": "low_varianse"}},
            "algorithm.kl.estimator: expected one of k1, k2, k3, low_variance, "
            'got the text "low_varianse"; did you mean `low_variance`?',
        ),
        ({"dual_clip": 1}, "algorithm.dual_clip: expected a number > 1 or null, got 1"),
        ({"gamma": 1.1}, "algorithm.gamma: expected a number >= 0 and <= 1, got 1.1"),
    ],
)
def test_a_bad_value_is_refused_with_its_path(algorithm: dict, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(algorithm)
    assert str(refused.value) == message


def test_a_list_of_corrections_survives_being_written_and_read(tmp_path: Path) -> None:
    names = ["icepop", "geometric_rejection"]
    written = config({"proximal": "recompute", "correction": {"apply": names}})
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(written))
    assert load(path) == written
    assert load(path, ["algorithm.correction.apply=[token_tis]"]).algorithm.correction.apply == (
        "token_tis",
    )


def test_what_the_config_knows_of_built_in_names_is_what_they_declare() -> None:
    compares = {name for name in ADVANTAGES if ADVANTAGES.traits(name).compares}
    assert compares == algorithm_config.COMPARING_ADVANTAGES
    needs_no_values = {name for name in ADVANTAGES if not ADVANTAGES.traits(name).needs_values}
    assert needs_no_values == algorithm_config.CRITICLESS_ADVANTAGES
    assert set(ADVANTAGES) >= algorithm_config.WHITENED_ADVANTAGES
    weighs = {name for name in CORRECTIONS if CORRECTIONS.traits(name).weighs}
    assert weighs == algorithm_config.WEIGHING_CORRECTIONS
    weighed = {name for name in POLICY_LOSSES if POLICY_LOSSES.traits(name).weighs}
    assert weighed == algorithm_config.WEIGHED_LOSSES


def test_the_config_does_not_import_torch() -> None:
    code = "import sys, areal_ray.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
