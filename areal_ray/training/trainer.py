"""One rank of the trainer: forward, backward, step. Knows nothing of Ray or event loops.

Supervised and policy steps are the same step with another loss per token. Every method blocks
while it computes: the actor calls them in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from areal_ray.algorithms import Advantage, LossInputs, PolicyLoss
from areal_ray.data.tokenizer import PromptTokenizer
from areal_ray.errors import TrainingError
from areal_ray.plugins import unpack
from areal_ray.training.model import CausalModel
from areal_ray.training.packing import LearnedSequence, MicroBatch, pack
from areal_ray.training.residence import Residence
from areal_ray.training.spec import StepMetrics, TrainerSpec
from areal_ray.types import Prompt, TokenIds, Trajectory, TrajectoryGroup

WARMUP_LR_STEPS = 20


class PolicyTrainer:
    def __init__(self, spec: TrainerSpec) -> None:
        torch.manual_seed(spec.seed)
        self._spec = spec
        self._advantage: Advantage = unpack(spec.packed_advantage)
        self._loss: PolicyLoss = unpack(spec.packed_loss)
        self.model = CausalModel(
            spec.model_path,
            device=torch.device(spec.device),
            trust_remote_code=spec.trust_remote_code,
        )
        self.tokenizer = PromptTokenizer(
            spec.model_path,
            trust_remote_code=spec.trust_remote_code,
            max_tokens=spec.max_prompt_tokens,
        )
        self._optimizer = self._new_optimizer(spec.trainer.lr)
        self._steps = 0
        self.residence = Residence(self.model.device, self._tensors)

    def warm_up(self, prompts: Sequence[Prompt], *, steps: int, batch: int, lr: float) -> float:
        """Supervised steps on the prompts' answers; returns the last loss.

        The learning rate rises over the first few steps and then falls to zero at the end.
        """
        rng = np.random.default_rng(self._spec.seed)
        sequences = [
            _supervised_sequence(question, answer)
            for question, answer in self.tokenizer.encode_demonstrations(prompts)
        ]
        optimizer, loss = self._new_optimizer(lr), float("nan")
        for step in range(steps):
            chosen = rng.integers(len(sequences), size=batch)
            scale = min(1.0, (step + 1) / WARMUP_LR_STEPS) * (1 - step / steps)
            loss, _ = self._step(
                optimizer,
                lr * scale,
                [sequences[i] for i in chosen],
                lambda _, logprobs: -logprobs,
                temperature=1.0,
            )
        return loss

    def train_on(self, groups: Sequence[TrajectoryGroup]) -> StepMetrics:
        """One optimizer step on these groups."""
        began = time.perf_counter()
        tally = _Tally()

        def policy_loss(batch: MicroBatch, logprobs: Tensor) -> Tensor:
            outputs = self._loss(
                LossInputs(
                    logprobs=logprobs,
                    behaviour_logprobs=batch.behaviour_logprobs,
                    advantages=batch.advantages,
                    clip_low=self._spec.algorithm.clip_low,
                    clip_high=self._spec.algorithm.clip_high,
                )
            )
            tally.add(outputs.clipped, logprobs.detach() - batch.behaviour_logprobs)
            return outputs.per_token

        self._steps += 1
        config = self._spec.trainer
        lr = config.lr * min(1.0, self._steps / max(1, config.lr_warmup_steps))
        loss, grad_norm = self._step(
            self._optimizer,
            lr,
            self._policy_sequences(groups),
            policy_loss,
            temperature=self._spec.temperature,
        )
        return StepMetrics(
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=tally.tokens,
            clipped=tally.clipped / max(1, tally.tokens),
            kl_to_behaviour=tally.kl / max(1, tally.tokens),
            seconds=time.perf_counter() - began,
        )

    def export(self, directory: Path) -> None:
        """Save a Hugging Face directory that transformers and vLLM load as it is."""
        self.model.save(directory, getattr(torch, self._spec.dtype))
        self.tokenizer.save(directory)

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        lr: float,
        sequences: Sequence[LearnedSequence],
        loss_per_token: Callable[[MicroBatch, Tensor], Tensor],
        *,
        temperature: float,
    ) -> tuple[float, float]:
        """The mean loss over all learned tokens, and the norm of its gradient."""
        tokens = max(1, sum(int(s.learned.sum()) for s in sequences))
        total = 0.0
        for batch in pack(
            sequences,
            budget_tokens=self._spec.trainer.micro_batch_tokens,
            one_row=self.model.uses_flash_attention,
        ):
            batch = batch.to(self.model.device)
            logprobs = self.model.logprobs(batch, temperature=temperature)
            loss = loss_per_token(batch, logprobs).sum() / tokens
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.module.parameters(), self._spec.trainer.max_grad_norm
        )
        if not torch.isfinite(norm):
            raise TrainingError(f"the gradient is not finite (norm {norm}, loss {total})")
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total, float(norm)

    def _policy_sequences(self, groups: Sequence[TrajectoryGroup]) -> list[LearnedSequence]:
        trajectories = [t for group in groups for t in group.trajectories]
        group_ids = [group.group_id for group in groups for _ in group.trajectories]
        advantages = self._advantage(
            torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
            torch.tensor(group_ids),
        )
        return [
            _policy_sequence(trajectory, advantage)
            for trajectory, advantage in zip(trajectories, advantages.tolist(), strict=True)
        ]

    def _tensors(self) -> Iterator[Tensor]:
        """All that a step needs on the device."""
        yield from self.model.module.parameters()
        yield from self.model.module.buffers()
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def _new_optimizer(self, lr: float) -> torch.optim.Optimizer:
        config = self._spec.trainer
        return torch.optim.AdamW(
            self.model.module.parameters(),
            lr=lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )


class _Tally:
    """Sums over the learned tokens of a step, whatever its split into micro-batches."""

    def __init__(self) -> None:
        self.tokens, self.clipped, self.kl = 0, 0.0, 0.0

    def add(self, clipped: Tensor, log_ratio: Tensor) -> None:
        self.tokens += clipped.numel()
        self.clipped += float(clipped.sum())
        self.kl += float((log_ratio.exp() - 1 - log_ratio).sum())


def _supervised_sequence(question: TokenIds, answer: TokenIds) -> LearnedSequence:
    return LearnedSequence(
        token_ids=np.concatenate([question, answer]),
        learned=np.repeat([False, True], [len(question), len(answer)]),
        behaviour_logprobs=np.zeros(len(answer), dtype=np.float32),
        advantage=1.0,
    )


def _policy_sequence(trajectory: Trajectory, advantage: float) -> LearnedSequence:
    made = trajectory.response_mask
    not_prompt = np.concatenate([np.zeros(len(trajectory.prompt_ids), dtype=np.bool_), made])
    return LearnedSequence(
        token_ids=np.concatenate([trajectory.prompt_ids, trajectory.response_ids]),
        learned=not_prompt,
        behaviour_logprobs=trajectory.logprobs[made],
        advantage=advantage,
    )
