"""A Hugging Face causal model, and the logprobs of chosen tokens under it."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from areal_ray.config import LoraConfig
from areal_ray.errors import ModelError
from areal_ray.training.packing import MicroBatch
from areal_ray.training.sharding import settle, with_whole_weights
from areal_ray.training.token_statistics import token_statistics
from areal_ray.weights.whole import Weight, whole

if TYPE_CHECKING:
    from areal_ray.training.lora import Adapter

_CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class CausalModel:
    def __init__(
        self,
        path: str,
        *,
        device: torch.device,
        trust_remote_code: bool,
        gradient_checkpointing: bool = False,
        compiled: bool = False,
        mesh: DeviceMesh | None = None,
        settled: bool = True,
        lora: LoraConfig | None = None,
    ) -> None:
        """`mesh`: the ranks to shard it over, if it is to be sharded. `settled`: on its device;
        otherwise it stays in host memory, for somebody to settle it as a part of a module.
        `lora`: with a rank, adapters are put into it, and only these are trained."""
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
            )
        except (OSError, ValueError) as error:
            raise ModelError(f"model.path: {path} can't be loaded: {error}") from error
        for name in _CHANGES_LOGITS:
            if getattr(config, name, None) not in (None, 1.0):
                raise ModelError(
                    f"model.path: {config.model_type} models change their logits ({name}) in a "
                    "way that the trainer does not follow"
                )
        self.device = device
        self._mesh = mesh
        self._again = partial(
            CausalModel,
            path,
            device=device,
            trust_remote_code=trust_remote_code,
            gradient_checkpointing=gradient_checkpointing,
            compiled=compiled,
            mesh=mesh,
        )
        self._architecture = type(self.module)
        names = set(self.module._no_split_modules or ())
        self.layers = [part for part in self.module.modules() if type(part).__name__ in names]
        if not self.layers and (compiled or mesh is not None):
            raise ModelError(
                f"model.path: {config.model_type} models do not tell their layers, which "
                "`trainer.compile` and `trainer.sharding: full` need"
            )
        self._adapter: Adapter | None = None
        if lora is not None and lora.rank:
            from areal_ray.training.lora import adapt  # peft takes a second to import

            self._adapter = adapt(self.module, lora)
        # The logprobs must be those of the policy that the engines serve.
        _switch_dropout_off(self.module)
        self.module.train(gradient_checkpointing)
        if gradient_checkpointing:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
        if compiled:
            for layer in self.layers:
                # Its computing alone: names stay, and so does what is hooked to the layer.
                layer.forward = torch.compile(layer.forward, dynamic=True)
        if settled:
            settle(self.module, self.layers, device, mesh)
        self._statistics = with_whole_weights(self.module, self._token_statistics)

    def logprobs(self, batch: MicroBatch, *, temperature: float) -> Tensor:
        """Of each learned token, given what comes before it in its own sequence."""
        return self.token_statistics(batch, temperature=temperature, with_entropy=False)[0]

    def token_statistics(
        self, batch: MicroBatch, *, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The logprob of each learned token; the entropy of what could have stood there."""
        adapter = contextlib.nullcontext() if self._adapter is None else self._adapter.in_use()
        with adapter:
            return self._statistics(batch, temperature, with_entropy)

    def _token_statistics(
        self, batch: MicroBatch, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        return token_statistics(
            hidden_before(self.module.get_decoder(), batch),
            self.module.get_output_embeddings(),
            batch.targets,
            temperature=temperature,
            with_entropy=with_entropy,
        )

    def save(self, directory: Path, dtype: torch.dtype) -> None:
        """A sharded one is saved by the first rank, and all of them take part."""
        if self._mesh is None and self._adapter is None and dtype == torch.float32:
            self.module.save_pretrained(directory)
            return
        tensors = get_model_state_dict(
            self.module, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if self._mesh is not None and self._mesh.get_rank() != 0:
            return
        converted = self._architecture(self.module.config).to(dtype)
        converted.generation_config = self.module.generation_config
        weights = self._without_adapters(tensors)
        for name, place in converted.state_dict().items():
            place.copy_(whole(weights[name]))
        converted.save_pretrained(directory)

    def named_parameters(self) -> list[tuple[str, Weight]]:
        """As engines know them: what adapters have learnt is in the weights."""
        return list(self._without_adapters(dict(self.module.named_parameters())).items())

    @property
    def own_names(self) -> frozenset[str] | None:
        """Of the module's tensors that a checkpoint needs: the adapter's, or (None) all."""
        return None if self._adapter is None else self._adapter.names

    def frozen_copy(self) -> CausalModel:
        """As it is now, and stays. With adapters, only these are copied."""
        if self._adapter is not None:
            twin = copy.copy(self)
            twin._adapter = self._adapter.copied_to_reference()
            return twin
        twin = self._again()
        twin.module.load_state_dict(self.module.state_dict())
        twin.module.requires_grad_(False)
        return twin

    def _without_adapters(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Weight]:
        return tensors if self._adapter is None else self._adapter.merged(tensors)


def hidden_before(decoder: torch.nn.Module, batch: MicroBatch) -> Tensor:
    """The last state at the token before each learned one."""
    with torch.autocast("cuda", torch.bfloat16, enabled=batch.input_ids.is_cuda):
        hidden = decoder(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        ).last_hidden_state
    return hidden.flatten(0, 1)[batch.predictors]


def _switch_dropout_off(module: torch.nn.Module) -> None:
    """Also in training mode, which gradient checkpointing asks for."""
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        elif isinstance(getattr(part, "attention_dropout", None), float):
            part.attention_dropout = 0.0
