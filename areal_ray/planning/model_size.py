"""How large a model is, from its files alone: nothing is loaded, and nothing downloaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from areal_ray.config import Config, LoraConfig
from areal_ray.generation.sizing import kv_token_bytes, longest_of
from areal_ray.weights.memory import tensor_shapes

HEADS = ("lm_head.weight", "output.weight", "embed_out.weight")
NO_LINEAR_LAYERS = ("embed", "wte", "wpe", ".experts.")
"""Parts of the names of matrices that are no `torch.nn.Linear`, and get no adapter."""


class ModelSize(msgspec.Struct, frozen=True):
    source: str
    shapes: dict[str, tuple[int, ...]]
    """Of every tensor, by its name in the files."""
    hidden: int
    kv_token_bytes: int
    """Of the KV cache, in the dtype that engines serve."""
    max_tokens: int | None
    """What a sequence may have, if the model says so."""

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @property
    def largest_tensor(self) -> int:
        return max(map(math.prod, self.shapes.values()))

    @property
    def critic_parameters(self) -> int:
        """The decoder, without the head that makes logits, and one number for each state."""
        heads = sum(math.prod(self.shapes[name]) for name in HEADS if name in self.shapes)
        return self.parameters - heads + self.hidden + 1

    def adapter_parameters(self, lora: LoraConfig) -> int:
        """Of one set: rank x (in + out) for each layer that has an adapter."""
        return sum(lora.rank * sum(self.shapes[name]) for name in self._adapted(lora))

    def _adapted(self, lora: LoraConfig) -> Iterator[str]:
        for name, shape in self.shapes.items():
            path, _, leaf = name.rpartition(".")
            is_linear = leaf == "weight" and len(shape) == 2 and name not in HEADS
            if not is_linear or any(part in name for part in NO_LINEAR_LAYERS):
                continue
            if lora.targets == "all-linear" or any(
                f".{path}".endswith(f".{target}") for target in lora.targets
            ):
                yield name


class UnknownSize(msgspec.Struct, frozen=True):
    why: str


def model_size(config: Config) -> ModelSize | UnknownSize:
    """`config`: resolved."""
    found = _directory(config)
    if isinstance(found, UnknownSize):
        return found
    directory, source = found
    shapes = tensor_shapes(directory)
    if not shapes:
        return UnknownSize(f"{source} holds no .safetensors files, whose headers tell the sizes")
    from transformers import AutoConfig

    try:
        model = AutoConfig.from_pretrained(
            directory, trust_remote_code=config.model.trust_remote_code, local_files_only=True
        ).get_text_config()
    except (OSError, ValueError) as error:
        return UnknownSize(f"{source}: its config.json can't be read: {error}")
    return ModelSize(
        source=source,
        shapes=shapes,
        hidden=model.hidden_size,
        kv_token_bytes=kv_token_bytes(model, config.model.dtype),
        max_tokens=longest_of(model),
    )


def _directory(config: Config) -> tuple[Path, str] | UnknownSize:
    """Where the model's files are, and how to speak of it."""
    path = config.model.path
    if path is None:
        made_before = config.run_dir / "base_model"
        if (made_before / "config.json").is_file():
            return made_before, f"{made_before}, which an earlier run of this name made"
        return UnknownSize("not known before model.factory has made it")
    if Path(path).is_dir():
        return Path(path), path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return UnknownSize(f"{path} is no directory, and no name on the Hugging Face hub")
    if not isinstance(cached, str):
        return UnknownSize(f"{path} is not in the local Hugging Face cache; it is not downloaded")
    return Path(cached).parent, f"{path}, in the local Hugging Face cache"
