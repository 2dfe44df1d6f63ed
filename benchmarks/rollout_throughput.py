"""Tokens/s of the whole rollout path against a bare vLLM engine, on the same requests.

Bare: one `VllmEngine` in this process, all groups asked for at once. Through the control plane:
the same number of groups by one engine in its actor, leased by the controller, run by a worker,
scored, and taken over by the queue. Same model, same sampling, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

from areal_ray import Completion, Prompt
from areal_ray.actors.crew import Crew, Task, engine_spec
from areal_ray.config import Config, resolve
from areal_ray.config_file import from_mapping
from areal_ray.generation.vllm import VllmEngine
from areal_ray.placement import connect, plan, reserve
from areal_ray.plugins import pack
from areal_ray.types import GenerationRequest
from areal_ray.workflows import single_turn

PROMPT = "12+34="


def no_reward(prompt: Prompt, completion: Completion) -> float:
    return 0.0


def make_model(directory: Path, hidden: int, layers: int) -> None:
    """The demo's tokenizer around a larger random model, so that generation is real work."""
    import sys

    from transformers import Qwen2Config, Qwen2ForCausalLM

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from arithmetic import tiny_qwen

    tiny_qwen(directory)
    config = Qwen2Config.from_pretrained(directory)
    config.hidden_size, config.intermediate_size = hidden, 3 * hidden
    config.num_hidden_layers = layers
    config.layer_types = ["full_attention"] * layers
    config.num_attention_heads = config.num_key_value_heads = hidden // 64
    config.max_position_embeddings = 1024
    Qwen2ForCausalLM(config).save_pretrained(directory)


async def bare(config: Config, model: Path, groups: int) -> float:
    engine = VllmEngine(engine_spec(config, 0, str(model)), address="127.0.0.1")
    await engine.start()
    prompt_ids = np.arange(3, 3 + len(PROMPT), dtype=np.int32)
    gate = asyncio.Semaphore(config.rollout.max_concurrent_groups)

    async def one(number: int) -> int:
        request = GenerationRequest(
            str(number), prompt_ids, config.rollout.samples, config.sampling
        )
        async with gate:
            result = await engine.generate(request)
        return sum(len(completion.token_ids) for completion in result.completions)

    async def all_groups(first: int, count: int) -> int:
        return sum(await asyncio.gather(*(one(first + i) for i in range(count))))

    await all_groups(0, groups // 8)
    rate = await timed(lambda: all_groups(groups, groups))
    await engine.close()
    return rate


async def through_the_control_plane(config: Config, model: Path, groups: int) -> float:
    seats = await reserve(plan(config, device="cpu"))
    task = Task(
        prompts=[Prompt(text=PROMPT)],
        demonstrations=(),
        packed_workflow=pack(single_turn),
        packed_reward=pack(no_reward),
    )
    with tempfile.TemporaryDirectory() as run_dir:
        async with Crew(
            config, task, model_path=str(model), run_dir=Path(run_dir), seats=seats
        ) as crew:
            await crew.start()

            async def until_accepted() -> int:
                while True:
                    status = await crew.controller.status.remote()
                    if status.ledger.accepted >= groups and not status.ledger.running:
                        return status.generated_tokens
                    await asyncio.sleep(0.05)

            return await timed(until_accepted)


async def timed(work: Callable[[], Awaitable[int]]) -> float:
    began = time.perf_counter()
    tokens = await work()
    return tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        make_model(model, options.hidden, options.layers)
        config = resolve(
            from_mapping(
                {
                    "name": "benchmark",
                    "model": {"path": directory},
                    "data": {"max_prompt_tokens": 8},
                    "generation": {"max_new_tokens": options.new_tokens},
                    "rollout": {
                        "samples": options.samples,
                        "max_staleness": 0,
                        "max_concurrent_groups": min(64, options.groups),
                    },
                    "trainer": {"groups_per_step": options.groups},
                }
            ),
            device="cpu",
        )
        bare_rate = asyncio.run(bare(config, model, options.groups))
        cluster = connect(config)
        rate = asyncio.run(through_the_control_plane(config, model, options.groups))
        cluster.leave()
    print(f"{'bare engine':24} {bare_rate:10,.0f} tokens/s")
    print(f"{'through the control plane':24} {rate:9,.0f} tokens/s   ratio {rate / bare_rate:.2f}")
    print(json.dumps({"bare": bare_rate, "control_plane": rate, "ratio": rate / bare_rate}))


if __name__ == "__main__":
    main()
