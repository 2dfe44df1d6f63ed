"""Weights that prove their version: a trainer that sends them, and a model that takes them."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import ray
import torch

from areal_ray.types import WeightVersion
from areal_ray.weights.sender import Sender
from areal_ray.weights.transport import Transport, join
from areal_ray.weights.update import GroupMember, SendingPlan

Kind = Literal["proving", "random"]

FIRST_TOKEN, TOKENS = 2, 12
LENGTH = 600


def token_of(version: WeightVersion) -> int:
    """The only token that the weights of a version can make."""
    return FIRST_TOKEN + version % TOKENS


def make_model(directory: Path, tiny_model: Path) -> None:
    """Tied embeddings, and no end: its end token is none of its outputs."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    tokenizer.save_pretrained(directory)
    config = Qwen2Config.from_pretrained(tiny_model)
    config.tie_word_embeddings = True
    config.max_position_embeddings = 2 * LENGTH
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(directory)


def weights_of(
    model: list[tuple[str, torch.Tensor]], version: WeightVersion, *, kind: Kind
) -> dict[str, torch.Tensor]:
    """`proving`: whatever the prompt, the attention adds the same direction to each state, and one
    token's embedding alone points there. `random`: other weights for each version."""
    if kind == "random":
        generator = torch.Generator().manual_seed(version)
        return {n: 0.3 * torch.randn(t.shape, generator=generator) for n, t in model}
    made = {name: torch.zeros_like(tensor) for name, tensor in model}
    for name, tensor in made.items():
        if name.endswith("v_proj.bias") or "norm" in name:
            tensor.fill_(1.0)
        elif name.endswith("o_proj.weight"):
            tensor.copy_(torch.eye(len(tensor)))
        elif name.endswith("embed_tokens.weight"):
            tensor[token_of(version)] = 100.0
    return made


def engine_digests(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    """As vLLM tells them of a Qwen2: q, k, v and gate, up in one, the vocabulary padded."""
    fused: dict[str, list[torch.Tensor]] = {}
    for name, tensor in weights.items():
        for parts, whole in ((("q", "k", "v"), "qkv"), (("gate", "up"), "gate_up")):
            for part in parts:
                name = name.replace(f".{part}_proj.", f".{whole}_proj.")
        if name.endswith("embed_tokens.weight"):
            padded = -(-len(tensor) // 64) * 64
            tensor = torch.cat([tensor, torch.zeros(padded - len(tensor), tensor.shape[1])])
        fused.setdefault(name, []).append(tensor)
    return {
        name: hashlib.sha256(torch.cat(parts).contiguous().numpy().tobytes()).hexdigest()
        for name, parts in fused.items()
    }


@ray.remote(max_concurrency=16)
class VersionedTrainer:
    """What the manager asks of a trainer. It can be made to wait in the middle of sending."""

    def __init__(self, model_path: str) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._parameters = [(n, p.detach()) for n, p in model.named_parameters()]
        self._kind: Kind = "proving"
        self._thread = ThreadPoolExecutor(1)
        self._sender: Sender | None = None
        self._version: WeightVersion = 0
        self._is_waiting, self._go_on = threading.Event(), threading.Event()
        self._go_on.set()
        self._set()

    async def pid(self) -> int:
        return os.getpid()

    async def choose(self, kind: Kind) -> None:
        """Of the weights that it makes from now on."""
        self._kind = kind

    async def train(self, version: WeightVersion) -> None:
        self._version = version
        self._set()

    def _set(self) -> None:
        made = weights_of(self._parameters, self._version, kind=self._kind)
        for name, tensor in self._parameters:
            tensor.copy_(made[name])

    async def move_in(self) -> None:
        pass

    async def move_out(self) -> None:
        pass

    async def wait_in_the_middle(self) -> None:
        self._is_waiting.clear()
        self._go_on.clear()

    async def is_in_the_middle(self) -> bool:
        return self._is_waiting.is_set()

    async def go_on(self) -> None:
        self._go_on.set()

    async def sending_plan(self, bucket_bytes: int, timeout_s: float, verify: bool) -> SendingPlan:
        if self._sender is None:
            self._sender = Sender(
                "127.0.0.1",
                self._parameters,
                dtype=torch.float32,
                bucket_bytes=bucket_bytes,
                timeout_s=timeout_s,
                verify=verify,
                join=self._join,
            )
        return self._sender.plan

    async def send_weights(self, member: GroupMember) -> WeightVersion:
        import asyncio

        await asyncio.get_running_loop().run_in_executor(self._thread, self._sender.send, member)
        return self._version

    async def call_off_sending(self, group_id: str) -> None:
        self._sender.call_off(group_id)

    def _join(self, member: GroupMember, store: torch.distributed.Store) -> Transport:
        return _Waiting(join(member, store), self._is_waiting, self._go_on)


class _Waiting:
    """Before the second bucket it waits to be told to go on."""

    def __init__(
        self, inner: Transport, is_waiting: threading.Event, go_on: threading.Event
    ) -> None:
        self._inner = inner
        self._is_waiting, self._go_on = is_waiting, go_on
        self._sent = 0
        self.member = inner.member

    def broadcast(self, buffer: torch.Tensor) -> torch.distributed.Work:
        self._sent += 1
        if self._sent == 2 and not self._go_on.is_set():
            self._is_waiting.set()
            self._go_on.wait()
        return self._inner.broadcast(buffer)

    def acknowledge(self, device: torch.device, *, is_right: bool) -> bool:
        self._sent = 0
        return self._inner.acknowledge(device, is_right=is_right)

    def close(self) -> None:
        self._inner.close()

    def interrupt(self) -> None:
        self._inner.interrupt()
