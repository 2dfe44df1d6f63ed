"""What a GRPO step costs: packed against padded, by hand and by TRL.

Forward, backward and AdamW on a Qwen2 of random weights, on CPUs, in float32, on the same sequences
of very unequal lengths, turn by turn, in tokens/s without padding: `PolicyTrainer.train_on`; a
padded loop as one writes it by hand; TRL's `GRPOTrainer`. All have the same loss (`token_mean`,
what TRL calls dapo), which is checked before anything is timed: loss and gradient of the first step
must agree.

TRL is driven from `training_step` on, with only its sampling and scoring left out: it pads all
samples of a step to the longest, and is given the old logprobs for nothing. On CPUs it computes
logits at padding and prompts too, which on GPUs it does not; so there is a row for TRL with
its GPUs' choice of positions. TRL 1.16 is what this was written for.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol
from unittest import mock

import numpy as np
import torch
from common import Figure, random_model, say, show
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from areal_ray import Prompt
from areal_ray.algorithm_config import AlgorithmConfig
from areal_ray.algorithms import Algorithm
from areal_ray.config import TrainerConfig
from areal_ray.plugins import pack as pickled
from areal_ray.training.packing import pack
from areal_ray.training.ranks import Ranks
from areal_ray.training.spec import TrainerSpec
from areal_ray.training.step_data import step_data
from areal_ray.training.trainer import PolicyTrainer
from areal_ray.types import Trajectory, TrajectoryGroup

HIDDEN, LAYERS = 192, 4
VOCABULARY = 16000
"""Six tenths of the weights that a token meets are the head's: small models are like that."""
PROMPT_TOKENS = (24, 40)
MEDIAN_ANSWER, SPREAD, LONGEST_ANSWER = 60, 1.0, 512
MICRO_BATCH_SEQUENCES = 8
"""TRL's default, `per_device_train_batch_size`."""
ALGORITHM = AlgorithmConfig()
OPTIMIZER = TrainerConfig(lr_warmup_steps=0)


@dataclass(frozen=True)
class Sample:
    """One answer as a loop by hand knows it."""

    prompt_ids: Tensor
    answer_ids: Tensor
    old_logprobs: Tensor
    advantage: float

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass(frozen=True)
class StepOutcome:
    loss: float
    grad_norm: float


class Contestant(Protocol):
    positions: int
    """That the layers compute in a step, padding included."""

    def step(self) -> StepOutcome: ...


@dataclass
class Measured:
    """Tokens/s, one per round."""

    by_wall: list[float] = field(default_factory=list)
    by_cpu: list[float] = field(default_factory=list)
    """Per second of CPU: other people's work on the machine counts less."""


def make_groups(count: int, samples: int) -> list[TrajectoryGroup]:
    rng = np.random.default_rng(0)

    def trajectory(prompt_ids: np.ndarray) -> Trajectory:
        length = round(MEDIAN_ANSWER * rng.lognormal(sigma=SPREAD))
        length = min(max(length, 1), LONGEST_ANSWER)
        return Trajectory(
            prompt_ids=prompt_ids,
            response_ids=rng.integers(2, VOCABULARY, length).astype(np.int32),
            response_mask=np.ones(length, dtype=np.bool_),
            # About those of random weights, so that some ratios are clipped and others not.
            logprobs=(rng.normal(scale=0.1, size=length) - np.log(VOCABULARY)).astype(np.float32),
            versions=np.zeros(length, dtype=np.int32),
            reward=float(rng.random()),
            finish_reason="stop",
            text="",
        )

    groups = []
    for group_id in range(count):
        prompt_ids = rng.integers(2, VOCABULARY, rng.integers(*PROMPT_TOKENS)).astype(np.int32)
        trajectories = [trajectory(prompt_ids) for _ in range(samples)]
        groups.append(TrajectoryGroup(group_id, Prompt(text="random"), trajectories))
    return groups


def samples_of(groups: Sequence[TrajectoryGroup]) -> list[Sample]:
    samples = []
    for group in groups:
        rewards = torch.tensor([t.reward for t in group.trajectories])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        samples += [
            Sample(
                prompt_ids=torch.from_numpy(t.prompt_ids).long(),
                answer_ids=torch.from_numpy(t.response_ids).long(),
                old_logprobs=torch.from_numpy(t.logprobs),
                advantage=advantage,
            )
            for t, advantage in zip(group.trajectories, advantages.tolist(), strict=True)
        ]
    return samples


def plain_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Of all tokens but the first of each row."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


class Packed:
    """areal_ray's own, with as many positions in a micro-batch as the padded ones may have."""

    def __init__(
        self, model: Path, groups: Sequence[TrajectoryGroup], ranks: Ranks | None = None
    ) -> None:
        sequences = step_data(groups, 0).sequences
        budget = MICRO_BATCH_SEQUENCES * max(len(s.token_ids) for s in sequences)
        self._groups = groups
        self._trainer = PolicyTrainer(
            TrainerSpec(
                model_path=str(model),
                trust_remote_code=False,
                device="cpu",
                dtype="float32",
                max_prompt_tokens=PROMPT_TOKENS[1],
                temperature=1.0,
                seed=0,
                trainer=TrainerConfig(lr_warmup_steps=0, micro_batch_tokens=budget),
                steps=1000,
                packed_algorithm=pickled(Algorithm.of(ALGORITHM)),
            ),
            ranks,
        )
        self.positions = sum(b.input_ids.numel() for b in pack(sequences, budget_tokens=budget))

    def step(self) -> StepOutcome:
        metrics = self._trainer.train_on(self._groups, 0)
        return StepOutcome(metrics.loss, metrics.grad_norm)


class Padded:
    """What one writes first: each micro-batch padded to its longest, and logits for all of it."""

    def __init__(self, model: Path, samples: Sequence[Sample]) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=OPTIMIZER.lr,
            betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
            weight_decay=OPTIMIZER.weight_decay,
            fused=True,
        )
        self._answer_tokens = sum(len(sample.answer_ids) for sample in samples)
        self._micro_batches = [
            samples[begin : begin + MICRO_BATCH_SEQUENCES]
            for begin in range(0, len(samples), MICRO_BATCH_SEQUENCES)
        ]
        self.positions = sum(len(b) * max(s.tokens for s in b) for b in self._micro_batches)

    def step(self) -> StepOutcome:
        loss = 0.0
        for samples in self._micro_batches:
            share = self._share(samples)
            share.backward()
            loss += float(share.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), OPTIMIZER.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepOutcome(loss, float(norm))

    def _share(self, samples: Sequence[Sample]) -> Tensor:
        """Of the step's loss."""

        def padded(column: Callable[[Sample], Tensor]) -> Tensor:
            return pad_sequence([column(sample) for sample in samples], batch_first=True)

        ids = padded(lambda s: torch.cat([s.prompt_ids, s.answer_ids]))
        attended = padded(lambda s: torch.ones(s.tokens, dtype=torch.long))
        learned = padded(lambda s: (torch.arange(s.tokens) >= len(s.prompt_ids)).float())
        old = padded(lambda s: torch.cat([torch.zeros(len(s.prompt_ids)), s.old_logprobs]))
        advantages = torch.tensor([[sample.advantage] for sample in samples])
        logits = self._model(input_ids=ids, attention_mask=attended, use_cache=False).logits
        logprobs = plain_logprobs(logits, ids)
        ratio = (logprobs - old[:, 1:]).exp()
        limited = ratio.clamp(1 - ALGORITHM.clip_low, 1 + ALGORITHM.clip_high)
        per_token = -torch.minimum(ratio * advantages, limited * advantages)
        return (per_token * learned[:, 1:]).sum() / self._answer_tokens


class Trl:
    def __init__(self, model: Path, samples: Sequence[Sample], *, skips_padding: bool) -> None:
        """`skips_padding`: in the logits, as on GPUs."""
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        inputs = _trl_inputs(samples)

        class WithoutSampling(GRPOTrainer):
            def _generate_and_score_completions(self, _: list[dict[str, str]]) -> dict[str, Tensor]:
                return inputs

        micro_batches = len(samples) // MICRO_BATCH_SEQUENCES
        self._trainer = WithoutSampling(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_dict({"prompt": ["1+1="] * len(samples)}),
            processing_class=AutoTokenizer.from_pretrained(model),
            args=GRPOConfig(
                output_dir=str(model / "trl"),
                report_to="none",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=MICRO_BATCH_SEQUENCES,
                gradient_accumulation_steps=micro_batches,
                num_generations=MICRO_BATCH_SEQUENCES,
                max_completion_length=LONGEST_ANSWER,
                loss_type="dapo",
                beta=0.0,
                epsilon=ALGORITHM.clip_low,
                epsilon_high=ALGORITHM.clip_high,
                optim="adamw_torch_fused",
                learning_rate=OPTIMIZER.lr,
                lr_scheduler_type="constant",
                adam_beta1=OPTIMIZER.beta1,
                adam_beta2=OPTIMIZER.beta2,
                weight_decay=OPTIMIZER.weight_decay,
                max_grad_norm=OPTIMIZER.max_grad_norm,
            ),
        )
        trainer = self._trainer
        self._model, trainer.optimizer = trainer.accelerator.prepare(
            trainer.model, trainer.create_optimizer()
        )
        trainer.current_gradient_accumulation_steps = micro_batches
        self._micro_batches = micro_batches
        self._skips_padding = skips_padding
        self.positions = inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()

    def step(self) -> StepOutcome:
        """As in the loop of `transformers.Trainer`, without callbacks."""
        trainer = self._trainer
        # Only what chooses the positions is told so: the kernels ask for themselves.
        choosing = mock.patch("trl.trainer.utils._use_triton", return_value=True)
        with choosing if self._skips_padding else nullcontext():
            loss = sum(
                float(trainer.training_step(self._model, [], None))
                for _ in range(self._micro_batches)
            )
        norm = trainer.accelerator.clip_grad_norm_(
            self._model.parameters(), trainer.args.max_grad_norm
        )
        trainer.optimizer.step()
        self._model.zero_grad()
        return StepOutcome(loss, float(norm))


def _trl_inputs(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """What its `_generate_and_score_completions` returns."""

    def padded(columns: Sequence[Tensor], side: Literal["left", "right"]) -> Tensor:
        return pad_sequence(list(columns), batch_first=True, padding_side=side)

    prompts = [sample.prompt_ids for sample in samples]
    answers = [sample.answer_ids for sample in samples]
    return {
        "prompt_ids": padded(prompts, "left"),
        "prompt_mask": padded([torch.ones_like(ids) for ids in prompts], "left"),
        "completion_ids": padded(answers, "right"),
        "completion_mask": padded([torch.ones_like(ids) for ids in answers], "right"),
        "advantages": torch.tensor([sample.advantage for sample in samples]),
        "old_per_token_logps": padded([sample.old_logprobs for sample in samples], "right"),
        "num_items_in_batch": torch.tensor(float(sum(map(len, answers)))),
    }


def contestants(model: Path, groups: Sequence[TrajectoryGroup]) -> dict[str, Contestant]:
    samples = samples_of(groups)
    found: dict[str, Contestant] = {
        "areal_ray": Packed(model, groups),
        "padded": Padded(model, samples),
    }
    if importlib.util.find_spec("trl") is None:
        say("TRL is not installed and is left out; `pip install trl 'datasets<5'` installs it")
        return found
    return found | {
        "TRL": Trl(model, samples, skips_padding=False),
        "TRL as on GPUs": Trl(model, samples, skips_padding=True),
    }


def refuse_unless_equal(outcomes: dict[str, StepOutcome]) -> None:
    """Figures of contestants that compute different things would mean nothing."""
    (first, ours), *others = outcomes.items()
    for name, theirs in others:
        is_equal = abs(theirs.loss - ours.loss) <= 1e-4 and np.isclose(
            theirs.grad_norm, ours.grad_norm, rtol=1e-3
        )
        if not is_equal:
            sys.exit(f"the first step must be the same for all: {first} {ours}, {name} {theirs}")


def race(entered: dict[str, Contestant], tokens: int, rounds: int) -> dict[str, Measured]:
    """Turn by turn, so that a busy moment of the machine meets all."""
    say("first steps")
    refuse_unless_equal({name: contestant.step() for name, contestant in entered.items()})
    measured = {name: Measured() for name in entered}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for name, contestant in entered.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            contestant.step()
            measured[name].by_cpu.append(tokens / (time.process_time() - began_cpu))
            measured[name].by_wall.append(tokens / (time.perf_counter() - began))
    return measured


def compare_steps(arguments: argparse.Namespace, model: Path) -> None:
    groups = make_groups(arguments.groups, MICRO_BATCH_SEQUENCES)
    tokens = sum(sample.tokens for sample in samples_of(groups))
    entered = contestants(model, groups)
    measured = race(entered, tokens, arguments.rounds)
    ours = measured["areal_ray"]
    figures: dict[str, Figure] = {"tokens": tokens, "threads": torch.get_num_threads()}
    rows = []
    for name, theirs in measured.items():
        ratio, cpu_ratio = (
            _median_ratio(ours.by_wall, theirs.by_wall),
            _median_ratio(ours.by_cpu, theirs.by_cpu),
        )
        rows.append(
            [
                name,
                f"{entered[name].positions / tokens:.2f}",
                f"{statistics.median(theirs.by_wall):.0f}",
                f"{ratio:.2f}",
                f"{statistics.median(theirs.by_cpu):.0f}",
                f"{cpu_ratio:.2f}",
            ]
        )
        key = name.lower().replace(" ", "_")
        figures[f"tokens_per_s_{key}"] = [round(rate, 1) for rate in theirs.by_wall]
        if theirs is not ours:
            figures |= {f"ratio_to_{key}": ratio, f"cpu_ratio_to_{key}": cpu_ratio}
    headings = [
        "",
        "positions/token",
        "tokens/s",
        "areal_ray / it",
        "tokens/CPU s",
        "areal_ray / it",
    ]
    show(headings, rows, figures)


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=3, help="of 8 samples, in a step")
    arguments = parser.parse_args()
    with random_model(hidden=HIDDEN, layers=LAYERS, vocabulary=VOCABULARY) as model:
        compare_steps(arguments, model)


if __name__ == "__main__":
    main()
