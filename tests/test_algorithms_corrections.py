from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch
from algorithm_steps import STEPS, flat, members, quickly, reordered, rows, step, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.algorithm_config import CorrectionConfig
from areal_ray.algorithms import CORRECTIONS, REDUCTIONS, StepBatch
from areal_ray.algorithms.corrections import Corrected, correct, diagnose
from areal_ray.config import AlgorithmConfig
from areal_ray.errors import TrainingError

OPTIONS = CorrectionConfig(token_max=1.5, icepop_low=0.8, icepop_high=1.3)


def mismatched(*sequences: list[float]) -> StepBatch:
    """A step whose tokens have these ratios, proximal over behaviour."""
    batch = step([(0, 1.0, len(ratios)) for ratios in sequences])
    return replace(batch, proximal_logprobs=batch.behaviour_logprobs + flat(sequences).log())


def corrected(batch: StepBatch, *names: str, options: CorrectionConfig = OPTIONS) -> Corrected:
    return correct(batch, [CORRECTIONS[name] for name in names], options)


def test_token_tis_truncates_each_ratio() -> None:
    result = corrected(mismatched([0.5, 1.0], [4.0]), "token_tis")
    assert result.weights.tolist() == pytest.approx([0.5, 1.0, 1.5])
    assert result.truncated.tolist() == [False, False, True]
    assert result.keep.all()


def test_sequence_tis_truncates_the_product() -> None:
    # 1/2 * 3 = 1.5 for the first sequence; 4 * 2 = 8 for the second, truncated at 2.
    result = corrected(mismatched([0.5, 3.0], [4.0, 2.0]), "sequence_tis")
    assert result.weights.tolist() == pytest.approx([1.5, 1.5, 2.0, 2.0])
    assert result.truncated.tolist() == [False, False, True, True]


def test_icepop_weighs_inside_its_band_and_rejects_outside() -> None:
    result = corrected(mismatched([0.7, 0.9], [1.2, 1.4]), "icepop")
    assert result.keep.tolist() == [False, True, True, False]
    assert result.weights[result.keep].tolist() == pytest.approx([0.9, 1.2])


def test_geometric_rejection_looks_at_the_mean_and_not_at_the_length() -> None:
    # Geometric means 1.05 (kept, though the product of 20 is 2.65), and 1.2 (rejected).
    batch = mismatched([1.05] * 20, [1.2, 1.2])
    result = corrected(batch, "geometric_rejection")
    assert result.keep.tolist() == [True] * 20 + [False] * 2
    assert result.weights.tolist() == [1.0] * 22


def test_sequence_rejection_looks_at_the_product() -> None:
    # 1.05^20 = 2.65 is above 2; 1.2 * 1.2 = 1.44 is not.
    result = corrected(mismatched([1.05] * 20, [1.2, 1.2]), "sequence_rejection")
    assert result.keep.tolist() == [False] * 20 + [True] * 2


def test_corrections_are_applied_in_their_order() -> None:
    # The token with ratio 4 spoils the geometric mean (4^(1/4) = 1.41), unless icepop takes it
    # away first (then the mean is 1).
    batch = mismatched([1.0, 1.0, 1.0, 4.0])
    first = corrected(batch, "icepop", "geometric_rejection")
    assert first.keep.tolist() == [True, True, True, False]
    assert not corrected(batch, "geometric_rejection", "icepop").keep.any()


def test_without_corrections_everything_is_kept_and_weighs_one() -> None:
    result = corrected(replace(mismatched([3.0]), proximal_logprobs=None))
    assert (result.weights.item(), result.keep.item(), result.truncated.item()) == (1, True, False)


def test_a_correction_without_a_proximal_pass_is_refused() -> None:
    with pytest.raises(TrainingError, match="needs proximal_logprobs"):
        corrected(replace(mismatched([3.0]), proximal_logprobs=None), "token_tis")


def slow_correction(
    name: str, batch: StepBatch, keep: list[list[bool]]
) -> tuple[list[list[float]], list[list[bool]]]:
    """Weights and what is kept, with `keep` from before."""
    proximal, behaviour = (
        rows(batch, batch.proximal_logprobs),
        rows(batch, batch.behaviour_logprobs),
    )
    weights, kept = [], []
    for new, old, before in zip(proximal, behaviour, keep, strict=True):
        logs = [a - b for a, b in zip(new, old, strict=True)]
        ratios = [math.exp(x) for x in logs]
        counted = [x for x, k in zip(logs, before, strict=True) if k]
        product = math.exp(sum(counted))
        mean = math.exp(statistics.fmean(counted)) if counted else 1.0
        weight, inside = [1.0] * len(ratios), [True] * len(ratios)
        match name:
            case "token_tis":
                weight = [min(r, OPTIONS.token_max) for r in ratios]
            case "sequence_tis":
                weight = [min(product, OPTIONS.sequence_max)] * len(ratios)
            case "icepop":
                weight = ratios
                inside = [OPTIONS.icepop_low <= r <= OPTIONS.icepop_high for r in ratios]
            case "geometric_rejection":
                good = OPTIONS.geometric_low <= mean <= OPTIONS.geometric_high
                inside = [good] * len(ratios)
            case "sequence_rejection":
                good = OPTIONS.sequence_low <= product <= OPTIONS.sequence_high
                inside = [good] * len(ratios)
        weights.append(weight)
        kept.append([a and b for a, b in zip(inside, before, strict=True)])
    return weights, kept


@quickly
@given(batch=STEPS, names=st.lists(st.sampled_from(list(CORRECTIONS)), max_size=3, unique=True))
def test_corrections_agree_with_their_definitions_in_a_loop(
    batch: StepBatch, names: list[str]
) -> None:
    keep = [[True] * int(length) for length in batch.lengths]
    total = torch.ones(batch.tokens, dtype=torch.float64)
    for name in names:
        weights, keep = slow_correction(name, batch, keep)
        total *= flat(weights)
    result = corrected(batch, *names)
    assert result.keep.tolist() == [k for row in keep for k in row]
    torch.testing.assert_close(result.weights, total)


@quickly
@given(batch=STEPS, data=st.data())
def test_sequences_in_another_order_are_corrected_and_weighed_alike(
    batch: StepBatch, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(batch.sequences)))
    other, at = reordered(batch, order), tokens_of(batch, order)
    for name in CORRECTIONS:
        before, after = corrected(batch, name), corrected(other, name)
        assert torch.equal(before.keep[at], after.keep), name
        assert torch.allclose(before.weights[at], after.weights), name
    keep = corrected(batch, "icepop").keep
    for name, reduction in ((name, REDUCTIONS[name]) for name in REDUCTIONS):
        options = AlgorithmConfig(norm_tokens=8)
        mine = reduction(other, keep[at], options)
        assert torch.allclose(reduction(batch, keep, options)[at], mine), name


def test_diagnostics_of_a_step_worked_by_hand() -> None:
    # Ratios 1/2, 2 | 4. KL(engine || trainer): k1 is the mean of log 2, -log 2, -log 4 =
    # -2/3 log 2; k3 that of r - 1 - log r: (-1/2 + log 2 + 1 - log 2 + 3 - log 4) / 3.
    batch = mismatched([0.5, 2.0], [4.0])
    result = corrected(batch, "token_tis", "sequence_rejection")
    # Truncated at 1.5: the second and the third. Products 1 and 4: the second sequence goes.
    # Weights 1/2, 3/2, 0: (2)^2 / (3 * (1/4 + 9/4)) = 4 / 7.5.
    found = diagnose(batch, result)
    assert found.kl_k1 == pytest.approx(-2 / 3 * math.log(2))
    assert found.kl_k3 == pytest.approx((3.5 - math.log(4)) / 3)
    assert found.max_ratio == pytest.approx(4.0)
    assert found.truncated == pytest.approx(2 / 3)
    assert found.rejected == pytest.approx(1 / 3)
    assert found.rejected_sequences == pytest.approx(1 / 2)
    assert found.effective_sample_size == pytest.approx(4 / 7.5)


def test_a_step_on_policy_is_all_left_and_one_wholly_rejected_is_not() -> None:
    batch = mismatched([1.0, 1.0], [1.0])
    found = diagnose(batch, corrected(batch, "token_tis"))
    assert (found.effective_sample_size, found.rejected, found.kl_k3) == (1.0, 0.0, 0.0)
    off = mismatched([9.0, 9.0])
    found = diagnose(off, corrected(off, "geometric_rejection"))
    assert (found.effective_sample_size, found.rejected_sequences) == (0.0, 1.0)
    blind = replace(batch, proximal_logprobs=None)
    assert diagnose(blind, corrected(blind)) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Sequences of 2, 0, 2 and 1 tokens, the first of the last group; one token is rejected:
        # 1, 1 | | 1, x | 1. Four tokens are left.
        ("token_mean", [1 / 4, 1 / 4, 1 / 4, 0, 1 / 4]),
        # Three sequences are left, of 2, 1 and 1 tokens.
        ("sequence_mean", [1 / 6, 1 / 6, 1 / 3, 0, 1 / 3]),
        ("sequence_mean_token_sum", [1 / 3, 1 / 3, 1 / 3, 0, 1 / 3]),
        ("sequence_mean_token_sum_norm", [1 / 30, 1 / 30, 1 / 30, 0, 1 / 30]),
        # Two groups: the first with 3 tokens left, the second with 1.
        ("prompt_mean", [1 / 6, 1 / 6, 1 / 6, 0, 1 / 2]),
    ],
)
def test_rejected_tokens_weigh_nothing_and_are_not_counted(
    name: str, expected: list[float]
) -> None:
    batch = step([(0, 1.0, 2), (0, 1.0, 0), (0, 1.0, 2), (1, 1.0, 1)])
    keep = torch.tensor([True, True, True, False, True])
    weights = REDUCTIONS[name](batch, keep, AlgorithmConfig(norm_tokens=10))
    assert weights.tolist() == pytest.approx(expected)


def slow_reduction(name: str, batch: StepBatch, keep: list[list[bool]], norm: int) -> list[float]:
    left = [sum(row) for row in keep]
    sequences = sum(1 for count in left if count)
    in_group = {g: sum(left[i] for i in ids) for g, ids in members(batch).items()}
    groups = sum(1 for count in in_group.values() if count)
    weights = []
    for sequence, row in enumerate(keep):
        for kept in row:
            if not kept:
                weights.append(0.0)
                continue
            denominator = {
                "token_mean": sum(left),
                "sequence_mean": sequences * left[sequence],
                "sequence_mean_token_sum": sequences,
                "sequence_mean_token_sum_norm": sequences * norm,
                "prompt_mean": groups * in_group[int(batch.group_ids[sequence])],
            }[name]
            weights.append(1 / denominator)
    return weights


@quickly
@given(batch=STEPS, seed=st.integers(0, 1000))
def test_reductions_agree_with_their_definitions_in_a_loop(batch: StepBatch, seed: int) -> None:
    keep = torch.rand(batch.tokens, generator=torch.Generator().manual_seed(seed)) > 0.4
    lists = [[bool(k) for k in row] for row in rows(batch, keep)]
    for name in REDUCTIONS:
        expected = slow_reduction(name, batch, lists, norm=7)
        mine = REDUCTIONS[name](batch, keep, AlgorithmConfig(norm_tokens=7))
        assert mine.tolist() == pytest.approx(expected), name


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "prompt_mean"])
def test_means_have_weights_that_add_up_to_one(name: str) -> None:
    batch = step([(0, 1.0, 3), (1, 0.0, 1), (0, 0.0, 4)])
    keep = torch.tensor([True, False, True, True, True, True, True, False])
    assert REDUCTIONS[name](batch, keep, AlgorithmConfig()).sum().item() == pytest.approx(1.0)


def test_a_step_of_which_nothing_is_left_has_no_loss() -> None:
    batch = step([(0, 1.0, 3)])
    nothing = torch.zeros(3, dtype=torch.bool)
    for name in REDUCTIONS:
        weights = REDUCTIONS[name](batch, nothing, AlgorithmConfig(norm_tokens=7))
        assert weights.tolist() == [0.0] * 3, name


def test_a_constant_length_that_was_never_derived_is_refused() -> None:
    batch = step([(0, 1.0, 3)])
    with pytest.raises(TrainingError, match="norm_tokens is derived"):
        REDUCTIONS["sequence_mean_token_sum_norm"](
            batch, torch.ones(3, dtype=torch.bool), AlgorithmConfig()
        )
