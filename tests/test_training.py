from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from areal_ray.algorithms import ADVANTAGES, POLICY_LOSSES, LossInputs, LossOutputs, PolicyLoss
from areal_ray.config import AlgorithmConfig, TrainerConfig
from areal_ray.errors import TrainingError
from areal_ray.plugins import pack as pack_function
from areal_ray.training.model import CausalModel
from areal_ray.training.packing import LearnedSequence, pack
from areal_ray.training.spec import TrainerSpec
from areal_ray.training.trainer import PolicyTrainer
from areal_ray.types import Prompt, Trajectory, TrajectoryGroup

RNG = np.random.default_rng(0)


def sequence(length: int, learned: int) -> LearnedSequence:
    return LearnedSequence(
        token_ids=RNG.integers(2, 14, size=length).astype(np.int32),
        learned=np.arange(length) >= length - learned,
        behaviour_logprobs=np.full(learned, -length, dtype=np.float32),
        advantage=float(length),
    )


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> CausalModel:
    return CausalModel(str(tiny_model), device=torch.device("cpu"), trust_remote_code=False)


def test_every_sequence_is_packed_once_within_the_budget() -> None:
    sequences = [sequence(int(length), 2) for length in RNG.integers(3, 20, size=50)]
    batches = list(pack(sequences, budget_tokens=64))
    assert len(batches) > 1
    assert all(batch.input_ids.numel() <= 64 for batch in batches)
    # Each sequence's advantage is its length: all of them are there, for 2 tokens each.
    packed = sorted(a for batch in batches for a in batch.advantages.tolist())
    assert packed == sorted(float(len(s.token_ids)) for s in sequences for _ in range(2))


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
    sequences = [sequence(int(length), int(length) // 2) for length in (11, 7, 4, 9, 3, 5)]
    (together,) = pack(sequences, budget_tokens=1000, one_row=one_row)
    # 39 tokens: in one row, or in rows of 11: 11, 9, 7 + 4, 5 + 3.
    assert tuple(together.input_ids.shape) == ((1, 39) if one_row else (4, 11))
    packed = model.logprobs(together, temperature=0.7)
    for one in sequences:
        length = len(one.token_ids)  # its advantage, by which it is found again
        logits = model.module(torch.tensor(one.token_ids[None], dtype=torch.long)).logits[0] / 0.7
        targets = torch.tensor(one.token_ids, dtype=torch.long)[1:, None]
        alone = logits[:-1].log_softmax(-1).gather(-1, targets).squeeze(-1)[one.learned[1:]]
        mine = packed[together.advantages == length]
        torch.testing.assert_close(mine, alone, atol=1e-5, rtol=0)


def test_logprobs_in_chunks_are_the_same(
    model: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (batch,) = pack([sequence(20, 15), sequence(16, 9)], budget_tokens=1000)

    def value_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
        model.module.zero_grad()
        logprobs = model.logprobs(batch, temperature=1.0)
        logprobs.square().sum().backward()
        return logprobs.detach(), model.module.lm_head.weight.grad.clone()

    whole = value_and_gradient()
    monkeypatch.setattr("areal_ray.training.model.LOGITS_CHUNK_TOKENS", 5)
    torch.testing.assert_close(value_and_gradient(), whole)


def trainer(
    tiny_model: Path, loss: PolicyLoss = POLICY_LOSSES["ppo"], **changes: object
) -> PolicyTrainer:
    return PolicyTrainer(
        TrainerSpec(
            model_path=str(tiny_model),
            trust_remote_code=False,
            device="cpu",
            dtype="float32",
            max_prompt_tokens=8,
            temperature=1.0,
            seed=0,
            trainer=TrainerConfig(lr=1e-2, lr_warmup_steps=0, **changes),
            algorithm=AlgorithmConfig(),
            packed_advantage=pack_function(ADVANTAGES["grpo"]),
            packed_loss=pack_function(loss),
        )
    )


def group(group_id: int, rewards: list[float]) -> TrajectoryGroup:
    rng = np.random.default_rng(group_id)
    trajectories = []
    for reward in rewards:
        count = int(rng.integers(1, 6))
        trajectories.append(
            Trajectory(
                prompt_ids=rng.integers(2, 14, size=6).astype(np.int32),
                response_ids=rng.integers(2, 14, size=count).astype(np.int32),
                response_mask=np.ones(count, dtype=np.bool_),
                logprobs=np.full(count, -2.6, dtype=np.float32),
                versions=np.zeros(count, dtype=np.int32),
                reward=reward,
                finish_reason="stop",
                text="",
            )
        )
    return TrajectoryGroup(group_id=group_id, prompt=Prompt(text="x"), trajectories=trajectories)


def test_a_step_does_not_depend_on_its_split_into_micro_batches(tiny_model: Path) -> None:
    groups = [group(i, [1.0, 0.0, 0.0, 1.0, 0.0]) for i in range(6)]
    whole, split = trainer(tiny_model), trainer(tiny_model, micro_batch_tokens=24)
    first, second = whole.train_on(groups), split.train_on(groups)
    assert first.loss == pytest.approx(second.loss, abs=1e-6)
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-4)
    assert (first.tokens, first.clipped) == (second.tokens, second.clipped)


def test_a_step_makes_rewarded_answers_likelier(tiny_model: Path) -> None:
    rewarded = group(0, [1.0, 0.0])
    learner = trainer(tiny_model)
    batch = next(pack(learner._policy_sequences([rewarded]), budget_tokens=1000))

    def logprob_by_advantage() -> dict[bool, float]:
        with torch.no_grad():
            logprobs = learner.model.logprobs(batch, temperature=1.0)
        good = batch.advantages > 0
        return {True: logprobs[good].mean().item(), False: logprobs[~good].mean().item()}

    before = logprob_by_advantage()
    learner.train_on([rewarded])
    after = logprob_by_advantage()
    assert after[True] > before[True]
    assert after[False] < before[False]


def test_tokens_that_no_model_made_are_not_learned(tiny_model: Path) -> None:
    one = group(0, [1.0, 0.0])
    masked = one.trajectories[0]
    masked.response_mask[:] = False
    learner = trainer(tiny_model)
    others = sum(int(t.response_mask.sum()) for t in one.trajectories[1:])
    assert learner.train_on([one]).tokens == others


def test_a_loss_of_the_users_own_is_the_one_that_is_trained_with(tiny_model: Path) -> None:
    def constant(inputs: LossInputs) -> LossOutputs:
        return LossOutputs(
            per_token=0 * inputs.logprobs + 3.0,
            clipped=torch.zeros_like(inputs.logprobs, dtype=torch.bool),
        )

    assert trainer(tiny_model, constant).train_on([group(0, [1.0, 0.0])]).loss == 3.0


def test_a_gradient_that_is_not_finite_is_not_stepped_on(tiny_model: Path) -> None:
    def broken(inputs: LossInputs) -> LossOutputs:
        return LossOutputs(
            per_token=inputs.logprobs * float("nan"),
            clipped=torch.zeros_like(inputs.logprobs, dtype=torch.bool),
        )

    learner = trainer(tiny_model, broken)
    before = [tensor.clone() for _, tensor in learner.model.named_parameters()]
    with pytest.raises(TrainingError, match="the gradient is not finite"):
        learner.train_on([group(0, [1.0, 0.0])])
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
    learner.train_on([group(0, [1.0, 0.0])])
    learner.export(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    again = CausalModel(str(tmp_path / "out"), device=torch.device("cpu"), trust_remote_code=False)
    for (name, mine), (_, theirs) in zip(
        learner.model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name
