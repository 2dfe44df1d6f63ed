"""A Hugging Face causal model, and the logprobs of chosen tokens under it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from areal_ray.errors import ModelError
from areal_ray.training.packing import MicroBatch

LOGITS_CHUNK_TOKENS = 2048
"""Logits exist for this many tokens at a time: a vocabulary is large, a batch is long."""

_CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class CausalModel:
    def __init__(self, path: str, *, device: torch.device, trust_remote_code: bool) -> None:
        self.uses_flash_attention = device.type == "cuda"
        if os.path.isdir(path):
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
            self.module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=torch.float32,
                trust_remote_code=trust_remote_code,
                attn_implementation="flash_attention_2" if self.uses_flash_attention else "sdpa",
            ).to(device)
        except (OSError, ValueError) as error:
            raise ModelError(f"model.path: {path} can't be loaded: {error}") from error
        for name in _CHANGES_LOGITS:
            if getattr(config, name, None) not in (None, 1.0):
                raise ModelError(
                    f"model.path: {config.model_type} models change their logits ({name}) in a "
                    "way that the trainer does not follow"
                )
        self.device = device
        # Without dropout: the logprobs must be those of the policy that the engines serve.
        self.module.eval()

    def logprobs(self, batch: MicroBatch, *, temperature: float) -> Tensor:
        """Of each learned token, given what comes before it in its own sequence."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden = self.module.get_decoder()(
                input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
            ).last_hidden_state
        before_targets = hidden.flatten(0, 1)[batch.predictors]
        pieces = zip(
            before_targets.split(LOGITS_CHUNK_TOKENS),
            batch.targets.split(LOGITS_CHUNK_TOKENS),
            strict=True,
        )
        if len(batch.targets) <= LOGITS_CHUNK_TOKENS:
            return torch.cat([self._of_chunk(h, t, temperature) for h, t in pieces])
        return torch.cat(
            [checkpoint(self._of_chunk, h, t, temperature, use_reentrant=False) for h, t in pieces]
        )

    def save(self, directory: Path, dtype: torch.dtype) -> None:
        if dtype == torch.float32:
            self.module.save_pretrained(directory)
            return
        copy = type(self.module)(self.module.config).to(dtype)
        copy.load_state_dict(self.module.state_dict())
        copy.save_pretrained(directory)

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        return list(self.module.named_parameters())

    def _of_chunk(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        head = self.module.get_output_embeddings()
        logits = head(hidden.to(head.weight.dtype)).float() / temperature
        chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
        return chosen - logits.logsumexp(-1)
