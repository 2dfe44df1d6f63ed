"""What logits cost in memory: in tiles, as the trainer computes them, against all at once.

The peak of the logprobs of many tokens with their gradient, above what the process had with the
model loaded, each way in a process of its own. A Qwen2 of random weights, on CPUs, in float32.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from common import random_model, say, show

from areal_ray.training.model import CausalModel
from areal_ray.training.packing import LearnedSequence, pack

HIDDEN, LAYERS, VOCABULARY = 192, 4, 32000
ROW_TOKENS = 512
MIB = 1 << 20

HeadWay = Literal["no logits", "in tiles", "all at once"]


def peak_mib(way: HeadWay, model_path: Path, tokens: int) -> float:
    """Above what the process had with the model loaded. For a process of its own."""
    model = CausalModel(str(model_path), device=torch.device("cpu"), trust_remote_code=False)
    rng = np.random.default_rng(0)
    sequences = [
        LearnedSequence(
            token_ids=rng.integers(2, VOCABULARY, ROW_TOKENS),
            learned=np.arange(ROW_TOKENS) > 0,
        )
        for _ in range(tokens // ROW_TOKENS)
    ]
    (batch,) = pack(sequences, budget_tokens=tokens)
    # Makes the peak so far, which importing and loading made, forgotten.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_mib("VmRSS")
    match way:
        case "no logits":
            result = model.hidden_before(batch)
        case "in tiles":
            result = model.logprobs(batch, temperature=1.0)
        case "all at once":
            logits = model.module(
                input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
            ).logits
            targets = batch.input_ids[:, 1:, None]
            result = logits[:, :-1].log_softmax(-1).gather(-1, targets).squeeze(-1)
    result.sum().backward()
    return _status_mib("VmHWM") - before


def _status_mib(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / MIB
    raise LookupError(f"/proc/self/status: expected {name}")


def compare_memory(arguments: argparse.Namespace, model: Path) -> None:
    peaks: dict[HeadWay, float] = {}
    for way in ("no logits", "in tiles", "all at once"):
        say(f"memory of {arguments.tokens} tokens, {way}")
        # Spawned, since a fork begins with this process's memory.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
            peaks[way] = alone.submit(peak_mib, way, model, arguments.tokens).result()
    layers, tiled, plain = peaks["no logits"], peaks["in tiles"], peaks["all at once"]
    show(
        ["logits", "peak MiB", "above the layers'"],
        [[way, f"{peak:.0f}", f"{peak - layers:.0f}"] for way, peak in peaks.items()],
        {
            "memory_tokens": arguments.tokens,
            "peak_mib_layers": layers,
            "peak_mib_tiled": tiled,
            "peak_mib_plain": plain,
            "plain_to_tiled": plain / tiled,
            "plain_to_tiled_above_layers": (plain - layers) / (tiled - layers),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    with random_model(hidden=HIDDEN, layers=LAYERS, vocabulary=VOCABULARY) as model:
        compare_memory(arguments, model)


if __name__ == "__main__":
    main()
