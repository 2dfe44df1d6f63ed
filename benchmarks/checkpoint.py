"""What a checkpoint costs: tokens/s of an engine while one is written, and the copy it waits for.

A model of 110 million parameters with its AdamW state, 1.3 GB in all, is copied and written again
and again by a process of its own, as the trainer does it, beside a vLLM engine that generates.
Windows with and without alternate, so that a drift of the machine meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
from common import local_cluster, resolved, say, show
from engine_load import Load, make_model, new_engine

from areal_ray.priority import step_aside
from areal_ray.training import state
from areal_ray.training.state import Part, Snapshot


@dataclass(frozen=True)
class Saved:
    copy_s: float
    write_s: float
    total_bytes: int


@ray.remote(num_cpus=0)
class SavingTrainer:
    """A trainer between two steps."""

    def __init__(self, model_path: str) -> None:
        from transformers import AutoModelForCausalLM

        step_aside()
        torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        self._parts = {"policy": Part(model, optimizer)}

    async def save(self, directory: str) -> Saved:
        began = time.perf_counter()
        taken: Snapshot = await asyncio.to_thread(state.snapshot, self._parts, steps=1)
        copied = time.perf_counter()
        await asyncio.to_thread(state.write, taken, Path(directory))
        written = time.perf_counter()
        return Saved(
            copy_s=copied - began,
            write_s=written - copied,
            total_bytes=await asyncio.to_thread(_total_bytes, Path(directory)),
        )


def _total_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


async def measure(arguments: argparse.Namespace, directory: Path) -> None:
    model = directory / "model"
    engine = new_engine("engine", model, samples=arguments.samples)
    trainer = SavingTrainer.remote(str(model))
    await engine.start.remote()
    load = Load(engine, arguments.samples)
    await load.until_begun()
    saves: list[Saved] = []

    async def save_once() -> None:
        saves.append(await trainer.save.remote(str(directory / f"checkpoint-{len(saves)}")))

    say("a first one, to warm up")
    await save_once()
    alone, saving = [], []
    for number in range(arguments.rounds):
        say(f"round {number + 1} of {arguments.rounds}")
        saving.append(await load.rate(save_once))
        lasted_s = saves[-1].copy_s + saves[-1].write_s
        alone.append(await load.rate(lambda lasted_s=lasted_s: asyncio.sleep(lasted_s)))
    ratios = [one / other for one, other in zip(saving, alone, strict=True)]
    copy_s = statistics.median(one.copy_s for one in saves[1:])
    write_s = statistics.median(one.write_s for one in saves[1:])
    show(
        ["tokens/s alone", "while saving", "ratio", "copy s", "write s", "MB"],
        [
            [
                f"{statistics.median(alone):.1f}",
                f"{statistics.median(saving):.1f}",
                f"{statistics.median(ratios):.2f}",
                f"{copy_s:.2f}",
                f"{write_s:.2f}",
                f"{saves[-1].total_bytes / 1e6:.0f}",
            ]
        ],
        {
            "tokens_ratio": statistics.median(ratios),
            "tokens_ratios": ratios,
            "copy_s": copy_s,
            "write_s": write_s,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--samples", type=int, default=8, help="in flight at the engine")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_model(directory / "model")
        with local_cluster(resolved({"model": {"path": str(directory / "model")}})):
            asyncio.run(measure(arguments, directory))


if __name__ == "__main__":
    main()
