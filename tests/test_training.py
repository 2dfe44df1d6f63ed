from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from training_steps import EVERYTHING, group, trainer

from areal_ray.algorithm_config import (
    AlgorithmConfig,
    CriticConfig,
    KlConfig,
)
from areal_ray.algorithms import LossInputs, LossOutputs
from areal_ray.errors import CheckpointError, TrainingError
from areal_ray.training.learner import lr_scale
from areal_ray.training.model import CausalModel
from areal_ray.training.packing import LearnedSequence, pack
from areal_ray.training.spec import StepMetrics
from areal_ray.training.step_data import step_data
from areal_ray.training.token_statistics import token_statistics
from areal_ray.training.trainer import PolicyTrainer
from areal_ray.types import Prompt

RNG = np.random.default_rng(0)


def sequence(length: int, learned: int, first_column: int = 0) -> LearnedSequence:
    return LearnedSequence(
        token_ids=RNG.integers(2, 14, size=length).astype(np.int32),
        learned=np.arange(length) >= length - learned,
        first_column=first_column,
    )


def sequences_of(*sizes: tuple[int, int]) -> list[LearnedSequence]:
    """Of so many tokens and so many learned ones, their columns one after the other."""
    made, first = [], 0
    for length, learned in sizes:
        made.append(sequence(length, learned, first))
        first += learned
    return made


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> CausalModel:
    return CausalModel(str(tiny_model), device=torch.device("cpu"), trust_remote_code=False)


def test_every_sequence_is_packed_once_within_the_budget() -> None:
    sequences = sequences_of(*((int(length), 2) for length in RNG.integers(3, 20, size=50)))
    batches = list(pack(sequences, budget_tokens=64))
    assert len(batches) > 1
    assert all(batch.input_ids.numel() <= 64 for batch in batches)
    assert sorted(c for batch in batches for c in batch.columns.tolist()) == list(range(100))
    for batch in batches:
        for target, column in zip(batch.targets.tolist(), batch.columns.tolist(), strict=True):
            assert target == sequences[column // 2].token_ids[-2 + column % 2]


def test_a_sequence_longer_than_the_budget_has_a_micro_batch_of_its_own() -> None:
    batches = list(pack([sequence(10, 2), sequence(3, 1)], budget_tokens=4))
    assert [tuple(batch.input_ids.shape) for batch in batches] == [(1, 10), (1, 3)]


def test_packing_wastes_little() -> None:
    sequences = [sequence(int(length), 1) for length in RNG.integers(2, 40, size=400)]
    batches = list(pack(sequences, budget_tokens=1024))
    useful = sum(len(s.token_ids) for s in sequences)
    assert useful / sum(batch.input_ids.numel() for batch in batches) > 0.9


@pytest.mark.parametrize("one_row", [False, True])
def test_a_packed_sequence_has_the_logprobs_it_has_alone(model: CausalModel, one_row: bool) -> None:
    sequences = sequences_of(*((length, length // 2) for length in (11, 7, 4, 9, 3, 5)))
    (together,) = pack(sequences, budget_tokens=1000, one_row=one_row)
    # 39 tokens: in one row, or in rows of 11: 11, 9, 7 + 4, 5 + 3.
    assert tuple(together.input_ids.shape) == ((1, 39) if one_row else (4, 11))
    packed = model.logprobs(together, temperature=0.7)
    for one in sequences:
        logits = model.module(torch.tensor(one.token_ids[None], dtype=torch.long)).logits[0] / 0.7
        targets = torch.tensor(one.token_ids, dtype=torch.long)[1:, None]
        alone = logits[:-1].log_softmax(-1).gather(-1, targets).squeeze(-1)[one.learned[1:]]
        columns = one.first_column + torch.arange(int(one.learned.sum()))
        mine = packed[torch.isin(together.columns, columns)]
        torch.testing.assert_close(mine, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
def test_token_statistics_have_the_values_and_gradients_of_the_plain_way(
    with_bias: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles of two tokens, the last of them with one."""
    monkeypatch.setattr("areal_ray.training.token_statistics.TILE_ELEMENTS", 2 * 11)
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 11, bias=with_bias)
    hidden = torch.randn(7, 4, requires_grad=True)
    targets = torch.randint(11, (7,))
    weights = torch.randn(2, 7)

    def plain() -> tuple[torch.Tensor, torch.Tensor]:
        logp = (head(hidden) / temperature).log_softmax(-1)
        return logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)

    def tiled() -> tuple[torch.Tensor, torch.Tensor]:
        return token_statistics(hidden, head, targets, temperature=temperature, with_entropy=True)

    results = []
    for way in (plain, tiled):
        logprobs, entropies = way()
        loss = (weights[0] * logprobs + weights[1] * entropies).sum()
        gradients = torch.autograd.grad(loss, [hidden, *head.parameters()])
        results.append([logprobs.detach(), entropies.detach(), *gradients])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_without_entropy_nothing_is_said_of_it_and_a_frozen_head_gets_no_gradient() -> None:
    head = torch.nn.Linear(4, 11, bias=False).requires_grad_(False)
    hidden = torch.randn(3, 4, requires_grad=True)
    logprobs, entropies = token_statistics(
        hidden, head, torch.tensor([1, 2, 3]), temperature=1.0, with_entropy=False
    )
    assert entropies is None
    logprobs.sum().backward()
    assert head.weight.grad is None
    expected = torch.autograd.grad(
        head(hidden).log_softmax(-1)[range(3), [1, 2, 3]].sum(), [hidden]
    )[0]
    torch.testing.assert_close(hidden.grad, expected)


def test_a_step_does_not_depend_on_its_split_into_micro_batches(tiny_model: Path) -> None:
    groups = [group(i, [1.0, 0.0, 0.0, 1.0, 0.0]) for i in range(6)]
    whole, split = trainer(tiny_model), trainer(tiny_model, micro_batch_tokens=24)
    first, second = whole.train_on(groups, 0), split.train_on(groups, 0)
    assert first.loss == pytest.approx(second.loss, abs=1e-6)
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-4)
    assert (first.tokens, first.clipped) == (second.tokens, second.clipped)


def parameters(learner: PolicyTrainer) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in learner._tensors()]


def test_with_every_pass_there_is_a_step_does_not_depend_on_its_split(tiny_model: Path) -> None:
    groups = [group(i, [1.0, 0.0, 0.0, 1.0, 0.0]) for i in range(6)]
    whole = trainer(tiny_model, algorithm=EVERYTHING, epochs=2, mini_batches=3, lr=1e-3)
    split = trainer(
        tiny_model,
        algorithm=EVERYTHING,
        epochs=2,
        mini_batches=3,
        lr=1e-3,
        micro_batch_tokens=24,
    )
    first, second = whole.train_on(groups, 3), split.train_on(groups, 3)
    for name in ("loss", "grad_norm", "entropy", "value_loss", "kl_to_reference"):
        assert getattr(first, name) == pytest.approx(getattr(second, name), rel=1e-3, abs=1e-6), (
            name
        )
    for name in first.mismatch.__struct_fields__:
        mine, theirs = getattr(first.mismatch, name), getattr(second.mismatch, name)
        assert mine == pytest.approx(theirs, rel=1e-4), name
    assert first.value_loss > 0
    assert first.entropy == pytest.approx(np.log(14), abs=0.3)  # of 14 tokens, hardly learnt


def test_the_parts_of_a_batch_have_its_gradient_as_their_mean(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a step in between, as if the learning rate were zero."""
    groups = [group(i, [1.0, 0.0, 0.0, 1.0]) for i in range(6)]
    gradients: dict[int, list[torch.Tensor]] = {}
    for parts in (1, 4):
        learner = trainer(tiny_model, mini_batches=parts)
        gradients[parts] = []

        def note(scale: float, parts: int = parts, learner: PolicyTrainer = learner) -> float:
            weight = learner.model.module.lm_head.weight
            gradients[parts].append(weight.grad.clone())
            weight.grad = None
            return 0.0

        monkeypatch.setattr(learner._policy, "step", note)
        learner.train_on(groups, 0)
    assert len(gradients[4]) == 4
    mean = torch.stack(gradients[4]).mean(0)
    torch.testing.assert_close(mean, gradients[1][0], atol=1e-6, rtol=1e-4)


def test_the_reference_is_the_policy_that_reinforcement_learning_begins_with(
    tiny_model: Path,
) -> None:
    learner = trainer(tiny_model, algorithm=AlgorithmConfig(kl=KlConfig(coefficient=0.1)))
    learner.warm_up([Prompt(text="17+25=", answer="24")], steps=3, batch=4, lr=1e-2)
    groups = [group(i, [1.0, 0.0]) for i in range(4)]
    assert learner.train_on(groups, 0).kl_to_reference == pytest.approx(0.0, abs=1e-7)
    assert learner.train_on(groups, 1).kl_to_reference > 1e-5


def test_a_critic_learns_what_answers_are_worth(tiny_model: Path) -> None:
    learner = trainer(
        tiny_model,
        algorithm=AlgorithmConfig(
            advantage="gae",
            gae_lambda=1.0,
            critic=CriticConfig(enabled=True, lr=1e-2, clip=None),
        ),
    )
    groups = [group(i, [1.0, 1.0]) for i in range(4)]
    losses = [learner.train_on(groups, step).value_loss for step in range(12)]
    assert losses[0] == pytest.approx(0.5)  # (0 - 1)^2 / 2
    assert losses[-1] < 0.1


def test_gradient_checkpointing_changes_no_gradient(tiny_model: Path) -> None:
    groups = [group(i, [1.0, 0.0, 1.0]) for i in range(3)]
    plain, saving = trainer(tiny_model), trainer(tiny_model, gradient_checkpointing=True)
    assert saving.model.module.is_gradient_checkpointing
    plain.train_on(groups, 0)
    saving.train_on(groups, 0)
    for one, other in zip(parameters(plain), parameters(saving), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_compiled_layers_change_no_gradient(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced and differentiated as on a GPU, without the minute that making kernels takes."""
    compile_layers = torch.compile
    compiled = []

    def traced(function, *, dynamic: bool):
        compiled.append(function)
        return compile_layers(function, dynamic=dynamic, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", traced)
    groups = [group(i, [1.0, 0.0, 0.0, 1.0]) for i in range(4)]
    outcomes = []
    for changes in ({}, {"compile": True}, {"compile": True, "gradient_checkpointing": True}):
        learner = trainer(tiny_model, micro_batch_tokens=24, **changes)
        outcomes.append(learner.train_on(groups, 0))
    assert len(compiled) == 2 * len(learner.model.layers) > 0
    for outcome in outcomes[1:]:
        assert outcome.loss == pytest.approx(outcomes[0].loss, abs=1e-6)
        assert outcome.grad_norm == pytest.approx(outcomes[0].grad_norm, rel=1e-4)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # Two steps up, then eight: level, or down to a tenth.
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.8875, 0.55, 0.1]),
        # 0.1 + 0.9 * (1 + cos(pi / 8)) / 2, then half-way, then the end.
        ("cosine", [0.5, 1.0, 0.1 + 0.9 * 0.9619398, 0.55, 0.1]),
    ],
)
def test_the_learning_rate_follows_its_schedule(schedule, expected: list[float]) -> None:
    scales = [lr_scale(schedule, step, warmup=2, total=10, floor=0.1) for step in (1, 2, 3, 6, 10)]
    assert scales == pytest.approx(expected)


def test_a_step_makes_rewarded_answers_likelier(tiny_model: Path) -> None:
    rewarded = group(0, [1.0, 0.0])
    learner = trainer(tiny_model)
    data = step_data([rewarded], 0)
    batch = next(pack(data.sequences, budget_tokens=1000))

    def logprob_by_advantage() -> dict[bool, float]:
        with torch.no_grad():
            logprobs = learner.model.logprobs(batch, temperature=1.0)
        good = data.batch.rewards[data.batch.sequence_ids[batch.columns]] > 0
        return {True: logprobs[good].mean().item(), False: logprobs[~good].mean().item()}

    before = logprob_by_advantage()
    learner.train_on([rewarded], 0)
    after = logprob_by_advantage()
    assert after[True] > before[True]
    assert after[False] < before[False]


def test_tokens_that_no_model_made_are_not_learned(tiny_model: Path) -> None:
    one = group(0, [1.0, 0.0])
    masked = one.trajectories[0]
    masked.response_mask[:] = False
    learner = trainer(tiny_model)
    others = sum(int(t.response_mask.sum()) for t in one.trajectories[1:])
    assert learner.train_on([one], 0).tokens == others


def test_a_loss_of_the_users_own_is_the_one_that_is_trained_with(tiny_model: Path) -> None:
    def constant(inputs: LossInputs) -> LossOutputs:
        return LossOutputs(
            per_token=0 * inputs.logprobs + 3.0,
            clipped=torch.zeros_like(inputs.logprobs, dtype=torch.bool),
        )

    assert trainer(tiny_model, constant).train_on([group(0, [1.0, 0.0])], 0).loss == pytest.approx(
        3.0
    )


def test_a_gradient_that_is_not_finite_is_not_stepped_on(tiny_model: Path) -> None:
    def broken(inputs: LossInputs) -> LossOutputs:
        return LossOutputs(
            per_token=inputs.logprobs * float("nan"),
            clipped=torch.zeros_like(inputs.logprobs, dtype=torch.bool),
        )

    learner = trainer(tiny_model, broken)
    before = [tensor.clone() for _, tensor in learner.model.named_parameters()]
    with pytest.raises(TrainingError, match="the gradient is not finite"):
        learner.train_on([group(0, [1.0, 0.0])], 0)
    after = [tensor for _, tensor in learner.model.named_parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_an_export_in_bfloat16_says_so_and_holds_it(tiny_model: Path, tmp_path: Path) -> None:
    learner = trainer(tiny_model)
    learner.model.save(tmp_path / "out", torch.bfloat16)
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    name, mine = learner.model.named_parameters()[0]
    assert torch.equal(dict(again.named_parameters())[name], mine.to(torch.bfloat16))


def test_the_supervised_phase_teaches_the_answers(tiny_model: Path) -> None:
    learner = trainer(tiny_model)
    lesson = [Prompt(text="17+25=", answer="24"), Prompt(text="11+11=", answer="22")]
    assert learner.warm_up(lesson, steps=60, batch=8, lr=1e-2) < 0.05


def test_an_exported_model_is_the_trained_one(tiny_model: Path, tmp_path: Path) -> None:
    learner = trainer(tiny_model)
    learner.train_on([group(0, [1.0, 0.0])], 0)
    learner.export(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    again = CausalModel(str(tmp_path / "out"), device=torch.device("cpu"), trust_remote_code=False)
    for (name, mine), (_, theirs) in zip(
        learner.model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("algorithm", [AlgorithmConfig(), EVERYTHING], ids=["plain", "everything"])
def test_a_trainer_taken_up_again_goes_on_as_if_it_had_not_stopped(
    tiny_model: Path, tmp_path: Path, algorithm: AlgorithmConfig
) -> None:
    groups = [group(i, [1.0, 0.0, 1.0]) for i in range(4)]
    first = trainer(tiny_model, algorithm=algorithm, mini_batches=2, lr_warmup_steps=5)
    first.train_on(groups, 0)
    taken = first.snapshot()
    uninterrupted = [first.train_on(groups, version) for version in (1, 2)]
    # What was copied is of the moment, whatever came after.
    first.write(taken, tmp_path / "trainer")

    second = trainer(tiny_model, algorithm=algorithm, mini_batches=2, lr_warmup_steps=5)
    second.restore(tmp_path / "trainer")
    resumed = [second.train_on(groups, version) for version in (1, 2)]
    for one, other in zip(uninterrupted, resumed, strict=True):
        assert replace_seconds(one) == replace_seconds(other)
    for one, other in zip(parameters(first), parameters(second), strict=True):
        assert torch.equal(one, other)


def test_a_snapshot_before_the_first_step_changes_nothing_and_can_be_taken_up(
    tiny_model: Path, tmp_path: Path
) -> None:
    groups = [group(i, [1.0, 0.0, 1.0]) for i in range(4)]
    plain, copied, resumed = (trainer(tiny_model, algorithm=EVERYTHING) for _ in range(3))
    copied.warm_up([Prompt(text="17+25=", answer="24")], steps=2, batch=4, lr=1e-2)
    plain.warm_up([Prompt(text="17+25=", answer="24")], steps=2, batch=4, lr=1e-2)
    copied.write(copied.snapshot(), tmp_path / "trainer")
    resumed.restore(tmp_path / "trainer")
    for learner in (plain, copied, resumed):
        learner.train_on(groups, 0)
    for one, other, third in zip(*map(parameters, (plain, copied, resumed)), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


def replace_seconds(metrics: StepMetrics) -> StepMetrics:
    return msgspec.structs.replace(metrics, seconds=0.0)


def test_a_checkpoint_of_another_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    learner = trainer(tiny_model)
    learner.write(learner.snapshot(), tmp_path / "trainer")
    other = trainer(tiny_model, algorithm=EVERYTHING)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        other.restore(tmp_path / "trainer")


def test_a_place_that_can_not_be_written_to_is_told(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    learner = trainer(tiny_model)
    with pytest.raises(CheckpointError, match="file/trainer can't be written: .*Not a directory"):
        learner.write(learner.snapshot(), tmp_path / "file" / "trainer")
