"""How large an engine is made: samples at once, tokens of a sequence, KV cache. Pure arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_ray.config import Config
from areal_ray.weights.update import DTYPE_BYTES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GIB = 2**30
MAX_SAMPLES = 1024
"""At once in one engine; more of them wait inside it."""


def samples_at_once(config: Config) -> int:
    """In each engine, when all groups that may be on their way are. `config`: resolved."""
    in_flight = config.rollout.max_concurrent_groups * config.rollout.samples
    return min(MAX_SAMPLES, -(-in_flight // config.generation.engines))


def longest_sequence(
    model: PretrainedConfig, *, max_prompt_tokens: int, max_new_tokens: int
) -> int:
    """Room for the longest prompt and answer, if the model has it."""
    wanted = max_prompt_tokens + max_new_tokens
    return min(wanted, longest_of(model) or wanted)


def longest_of(model: PretrainedConfig) -> int | None:
    """All that the model can hold."""
    return getattr(model, "max_position_embeddings", None)


def kv_token_bytes(model: PretrainedConfig, dtype: str) -> int:
    """A key and a value, for each layer and head that keeps its own."""
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    return 2 * model.num_hidden_layers * heads * head_dim * DTYPE_BYTES[dtype]


def cpu_kv_cache_bytes(token_bytes: int, longest: int, samples: int) -> int:
    """What all samples need at their longest, within limits: zeroing a GiB takes seconds."""
    return min(max(token_bytes * longest * samples, GIB // 16), GIB)
