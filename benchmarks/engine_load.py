"""A vLLM engine that is busy: a model of 110 million parameters, and samples in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import torch
from ray.actor import ActorHandle

from areal_ray.actors.generation import GenerationActor
from areal_ray.generation.engine import EngineSpec
from areal_ray.types import GenerationRequest, Sampling
from areal_ray.weights.update import KvAfterUpdate, StagingMode

PROMPT_TOKENS, ANSWER_TOKENS = 16, 2000


def make_model(directory: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=PROMPT_TOKENS + ANSWER_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(directory)


def new_engine(
    name: str,
    model: Path,
    *,
    samples: int,
    staging: StagingMode = "device",
    kv_after_update: KvAfterUpdate = "recompute",
) -> ActorHandle:
    return GenerationActor.options(num_cpus=0, max_concurrency=64).remote(
        EngineSpec(
            name=name,
            model_path=str(model),
            dtype="float32",
            device="cpu",
            max_prompt_tokens=PROMPT_TOKENS,
            max_new_tokens=ANSWER_TOKENS,
            max_samples=samples,
            tensor_parallel=1,
            kv_cache_gib=None,
            gpu_memory=0.85,
            trust_remote_code=False,
            seed=0,
            staging=staging,
            kv_after_update=kv_after_update,
        )
    )


class Load:
    """Samples in flight at an engine, and how many tokens they have."""

    def __init__(self, engine: ActorHandle, samples: int) -> None:
        self._engine = engine
        self._known = {"load": [0] * samples}
        rng = np.random.default_rng(0)
        request = GenerationRequest(
            request_id="load",
            prompt_ids=rng.integers(2, 32000, PROMPT_TOKENS).astype(np.int32),
            n=samples,
            sampling=Sampling(max_new_tokens=ANSWER_TOKENS),
        )
        self._running = asyncio.ensure_future(engine.generate.remote(request))

    async def tokens(self) -> int:
        told = await self._engine.progress.remote(self._known)
        if self._running.done():
            raise RuntimeError(f"the load ended: {self._running.result()}")
        # None of it, if the request has yet to come.
        return sum(len(completion.token_ids) for completion in told.get("load", ()))

    async def until_begun(self) -> None:
        while not await self.tokens():  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(0.1)

    async def rate(self, work: Callable[[], Awaitable[object]]) -> float:
        """Tokens/s while `work` goes on."""
        before, began = await self.tokens(), time.perf_counter()
        await work()
        return (await self.tokens() - before) / (time.perf_counter() - began)
