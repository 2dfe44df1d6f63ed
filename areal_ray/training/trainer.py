"""One rank of the trainer: forward, backward, step. Knows nothing of Ray or event loops.

Each rank knows the whole batch, and passes its share of it through the model.

A policy step, on one batch:

    columns     of the batch, and those that take a pass (proximal, reference, values)
    prepare     all that depends on more than one sample, from the whole batch, once
    learn       `epochs` times over `mini_batches` parts; each in micro-batches, then an
                optimizer step

A supervised step is the same without the first two. Every method blocks while it computes: the
actor calls them in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from areal_ray.algorithms import (
    Algorithm,
    PreparedStep,
    StepBatch,
    policy_loss,
    prepare,
    value_loss,
)
from areal_ray.config import LoraConfig
from areal_ray.data.tokenizer import PromptTokenizer
from areal_ray.plugins import unpack
from areal_ray.training import state
from areal_ray.training.learner import Learner, lr_scale
from areal_ray.training.model import CausalModel
from areal_ray.training.packing import NOTHING, LearnedSequence, MicroBatch, pack
from areal_ray.training.ranks import Ranks
from areal_ray.training.residence import Residence
from areal_ray.training.sharding import let_go
from areal_ray.training.spec import StepMetrics, TrainerSpec
from areal_ray.training.state import Part, Snapshot
from areal_ray.training.step_data import StepData, step_data
from areal_ray.training.tally import Tally
from areal_ray.training.value_model import ValueModel
from areal_ray.types import Prompt, TokenIds, TrajectoryGroup, WeightVersion

WARMUP_LR_STEPS = 20


class PolicyTrainer:
    def __init__(self, spec: TrainerSpec, ranks: Ranks | None = None) -> None:
        torch.manual_seed(spec.seed)
        self._spec = spec
        self.ranks = ranks or Ranks()
        self._algorithm: Algorithm = unpack(spec.packed_algorithm)
        self.model = self._new_model(lora=spec.trainer.lora)
        self.tokenizer = PromptTokenizer(
            spec.model_path,
            trust_remote_code=spec.trust_remote_code,
            max_tokens=spec.max_prompt_tokens,
        )
        self._policy = self._new_learner(self.model.module, spec.trainer.lr)
        self._reference: CausalModel | None = None
        """Made when reinforcement learning begins: what supervision taught is part of it."""
        self._critic: ValueModel | None = None
        self._critic_learner: Learner | None = None
        if self._algorithm.needs.values:
            self._critic = ValueModel(self._new_model(settled=False), self.ranks.mesh)
            self._critic_learner = self._new_learner(
                self._critic.module, self._algorithm.config.critic.lr
            )
        self._steps = 0
        self.residence = Residence(self.model.device, self._tensors)

    @property
    def dtype(self) -> str:
        """What engines and the exported model get."""
        return self._spec.dtype

    def warm_up(self, prompts: Sequence[Prompt], *, steps: int, batch: int, lr: float) -> float:
        """Supervised steps on the prompts' answers; returns the last loss.

        The learning rate rises over the first few steps and then falls to zero at the end.
        """
        rng = np.random.default_rng(self._spec.seed)
        sequences = [
            _supervised_sequence(question, answer)
            for question, answer in self.tokenizer.encode_demonstrations(prompts)
        ]
        learner = self._new_learner(self.model.module, lr)
        loss = float("nan")
        for step in range(steps):
            chosen = [sequences[i] for i in rng.integers(len(sequences), size=batch)]
            tokens = max(1, sum(int(sequence.learned.sum()) for sequence in chosen))
            loss = 0.0
            for part in self._micro_batches(chosen):
                share = -self.model.logprobs(part, temperature=1.0).sum() / tokens
                share.backward()
                loss += float(share.detach())
            learner.step(min(1.0, (step + 1) / WARMUP_LR_STEPS) * (1 - step / steps))
        return float(self.ranks.sum(torch.tensor(loss)))

    def train_on(self, groups: Sequence[TrajectoryGroup], version: WeightVersion) -> StepMetrics:
        """Learn from these groups. `version`: of the weights as they are now."""
        began = time.perf_counter()
        data = step_data(groups, version)
        step = prepare(self._with_passes(data), self._algorithm)
        self._steps += 1
        config = self._spec.trainer
        scale = lr_scale(
            config.lr_schedule,
            self._steps,
            warmup=config.lr_warmup_steps,
            total=self._spec.steps,
            floor=config.lr_floor,
        )
        tally = Tally(updates=config.epochs * config.mini_batches)
        rng = np.random.default_rng((self._spec.seed, self._steps))
        for epoch in range(config.epochs):
            order = rng.permutation(len(data.sequences))
            for part in np.array_split(order, config.mini_batches):
                chosen = [data.sequences[i] for i in part]
                self._update(chosen, step, scale, tally, is_first_epoch=epoch == 0)
        return StepMetrics(
            lr=config.lr * scale,
            tokens=data.batch.tokens,
            seconds=time.perf_counter() - began,
            mismatch=step.diagnostics,
            **tally.means(
                self.ranks,
                has_kl=self._algorithm.needs.reference,
                has_entropy=self._algorithm.needs.entropy,
                has_critic=self._critic is not None,
            ),
        )

    def snapshot(self) -> Snapshot:
        """All that there is, as it is now."""
        return state.snapshot(self._parts, steps=self._steps)

    def write(self, taken: Snapshot, directory: Path) -> None:
        """This rank's part of it. May go on beside everything else."""
        state.write(taken, directory, self.ranks)

    def restore(self, directory: Path) -> None:
        """As it was when that was written, by however many ranks."""
        self._steps = state.restore(self._parts, directory, self.ranks)

    @property
    def _parts(self) -> dict[str, Part]:
        parts = {"policy": Part(self.model.module, self._policy.optimizer, self.model.own_names)}
        if self._critic is not None:
            parts["critic"] = Part(self._critic.module, self._critic_learner.optimizer)
        if self._algorithm.needs.reference:
            reference = self._reference_model()
            parts["reference"] = Part(reference.module, None, reference.own_names)
        return parts

    def export(self, directory: Path) -> None:
        """Save a Hugging Face directory that transformers and vLLM load as it is."""
        if self.ranks.is_first or self.ranks.shards:
            self.model.save(directory, getattr(torch, self._spec.dtype))
        if self.ranks.is_first:
            self.tokenizer.save(directory)

    def _update(
        self,
        sequences: Sequence[LearnedSequence],
        step: PreparedStep,
        scale: float,
        tally: Tally,
        *,
        is_first_epoch: bool,
    ) -> None:
        """One optimizer step. The part of the batch stands for all of it: its share of the loss
        times the number of parts, so that the parts' gradients have the batch's as their mean."""
        parts = self._spec.trainer.mini_batches
        for batch in self._micro_batches(sequences):
            logprobs, entropy = self.model.token_statistics(
                batch,
                temperature=self._spec.temperature,
                with_entropy=self._algorithm.needs.entropy,
            )
            if not len(batch.columns):
                self._pass_along(batch, logprobs)
                continue
            part = step.take(batch.columns.cpu()).to(self.model.device)
            loss = policy_loss(part, self._algorithm, logprobs, entropy)
            (parts * loss.total).backward()
            tally.policy(loss, parts)
            if is_first_epoch:
                tally.off_policy(logprobs.detach() - part.behaviour_logprobs)
            if self._critic is not None:
                values = value_loss(part, self._algorithm, self._critic.values(batch))
                (parts * values.total).backward()
                tally.critic(values, parts)
        tally.stepped(self._policy.step(scale))
        if self._critic_learner is not None:
            self._critic_learner.step(scale)

    def _pass_along(self, batch: MicroBatch, logprobs: Tensor) -> None:
        """There is nothing to learn here, but other ranks may wait for us in the same passes."""
        logprobs.sum().backward()
        if self._critic is not None:
            self._critic.values(batch).sum().backward()

    def _with_passes(self, data: StepData) -> StepBatch:
        """The columns that the algorithm asks for, and no pass that it does not."""
        needs, columns = self._algorithm.needs, {}
        temperature = self._spec.temperature
        if needs.proximal:
            columns["proximal_logprobs"] = self._column(
                data,
                self.model.module,
                lambda batch: self.model.logprobs(batch, temperature=temperature),
            )
        if needs.reference:
            reference = self._reference_model()
            columns["reference_logprobs"] = self._column(
                data,
                reference.module,
                lambda batch: reference.logprobs(batch, temperature=temperature),
            )
        if self._critic is not None:
            columns["values"] = self._column(data, self._critic.module, self._critic.values)
        return replace(data.batch, **columns)

    def _reference_model(self) -> CausalModel:
        self._reference = self._reference or self.model.frozen_copy()
        return self._reference

    @torch.no_grad()
    def _column(
        self,
        data: StepData,
        module: torch.nn.Module,
        compute: Callable[[MicroBatch], Tensor],
    ) -> Tensor:
        column = torch.zeros(data.batch.tokens)
        for batch in self._micro_batches(data.sequences):
            column[batch.columns.cpu()] = compute(batch).float().cpu()
        let_go(module)
        return self.ranks.sum(column)

    def _micro_batches(self, sequences: Sequence[LearnedSequence]) -> Iterator[MicroBatch]:
        """Of this rank's share."""
        share = self.ranks.share(sequences, lambda sequence: len(sequence.token_ids))
        batches = list(
            pack(
                share,
                budget_tokens=self._spec.trainer.micro_batch_tokens,
                one_row=self.model.uses_flash_attention,
            )
        )
        if self.ranks.shards:
            # A pass through a sharded model is one that all ranks take part in.
            batches += [NOTHING] * (self.ranks.most(len(batches)) - len(batches))
        for batch in batches:
            yield batch.to(self.model.device)

    def _tensors(self) -> Iterator[Tensor]:
        """All that a step needs on the device."""
        modules = [self.model.module]
        if self._reference is not None and self._reference.module is not self.model.module:
            modules.append(self._reference.module)
        if self._critic is not None:
            modules.append(self._critic.module)
        for module in modules:
            yield from module.parameters()
            yield from module.buffers()
        for learner in (self._policy, self._critic_learner):
            if learner is not None:
                yield from learner.tensors()

    def _new_learner(self, module: torch.nn.Module, lr: float) -> Learner:
        return Learner(list(module.parameters()), self._spec.trainer, lr=lr, ranks=self.ranks)

    def _new_model(self, *, settled: bool = True, lora: LoraConfig | None = None) -> CausalModel:
        return CausalModel(
            self._spec.model_path,
            device=torch.device(self._spec.device),
            trust_remote_code=self._spec.trust_remote_code,
            gradient_checkpointing=self._spec.trainer.gradient_checkpointing,
            compiled=self._spec.trainer.compile,
            mesh=self.ranks.mesh,
            settled=settled,
            lora=lora,
        )


def _supervised_sequence(question: TokenIds, answer: TokenIds) -> LearnedSequence:
    return LearnedSequence(
        token_ids=np.concatenate([question, answer]),
        learned=np.repeat([False, True], [len(question), len(answer)]),
    )
