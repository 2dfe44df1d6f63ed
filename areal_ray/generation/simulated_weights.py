"""The weights of a simulated engine: a version, and, if a trainer really sends some, tensors.

Receiving is the real thing, over a real group and into a real staging copy; only the model is
missing that would use them. An update without tensors changes the version alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from areal_ray.generation.faults import RestStep, Step
from areal_ray.types import WeightVersion
from areal_ray.weights.update import StagingMode, WeightUpdate

if TYPE_CHECKING:  # without tensors an engine does without torch, and is up in no time
    import torch

    from areal_ray.weights.layout import StreamLayout
    from areal_ray.weights.receiver import StagingReceiver
    from areal_ray.weights.staging import Staging


class Host(Protocol):
    """The engine whose weights they are."""

    async def answer_at_step(
        self, step: Step | RestStep, when: Literal["before", "after"]
    ) -> None: ...

    async def copy_weights(self) -> None: ...

    def set_pace(self) -> None: ...

    def commit(self, version: WeightVersion) -> None: ...


class SimulatedWeights:
    """`SwitchSteps` for an engine that has no model."""

    def __init__(self, host: Host, staging: StagingMode) -> None:
        self._host = host
        self._staging: StagingMode = staging
        self._receiver: StagingReceiver | None = None
        self._is_receiving = False
        self.version: WeightVersion = 0
        self.is_paused = self.is_kv_released = self.is_asleep = False
        self.tensors: dict[str, torch.Tensor] = {}

    async def pause(self) -> None:
        await self._host.answer_at_step("pause", "before")
        self.is_paused = True
        self._host.set_pace()
        await self._host.answer_at_step("pause", "after")

    async def resume(self) -> None:
        await self._host.answer_at_step("resume", "before")
        self.is_paused = False
        self._host.set_pace()
        await self._host.answer_at_step("resume", "after")

    async def release_kv(self) -> None:
        await self._host.answer_at_step("release_kv", "before")
        self.is_kv_released = True
        await self._host.answer_at_step("release_kv", "after")

    async def restore_kv(self) -> None:
        await self._host.answer_at_step("restore_kv", "before")
        self.is_kv_released = self.is_paused = False  # vLLM resumes with it
        self._host.set_pace()
        await self._host.answer_at_step("restore_kv", "after")

    async def sleep(self) -> None:
        await self._host.answer_at_step("sleep", "before")
        self.is_asleep = True
        self._host.set_pace()
        await self._host.answer_at_step("sleep", "after")

    async def wake(self) -> None:
        await self._host.answer_at_step("wake", "before")
        self.is_asleep = False
        self._host.set_pace()
        await self._host.answer_at_step("wake", "after")

    async def receive(self, encoded_update: bytes) -> None:
        await self._host.answer_at_step("receive", "before")
        if encoded_update:
            update = msgspec.msgpack.decode(encoded_update, type=WeightUpdate)
            if update.manifest.tensors:
                self._is_receiving = True
                self.receiver.start(update)
        await self._host.answer_at_step("receive", "after")

    async def drop(self) -> str:
        await self._host.answer_at_step("drop", "before")
        self._is_receiving = False
        trouble = await asyncio.to_thread(self.receiver.discard) if self._receiver else ""
        await self._host.answer_at_step("drop", "after")
        return trouble

    async def swap(self) -> None:
        await self._host.answer_at_step("swap", "before")
        await self._host.copy_weights()
        if self._is_receiving:
            await asyncio.to_thread(self.receiver.apply)
            self._is_receiving = False
        await self._host.answer_at_step("swap", "after")

    async def stamp(self, version: WeightVersion) -> None:
        await self._host.answer_at_step("stamp", "before")
        self.version = version
        self._host.commit(version)
        await self._host.answer_at_step("stamp", "after")

    @property
    def receiver(self) -> StagingReceiver:
        if self._receiver is None:
            import torch

            from areal_ray.weights.receiver import StagingReceiver

            self._receiver = StagingReceiver(torch.device("cpu"), self._make_staging)
        return self._receiver

    @receiver.setter
    def receiver(self, receiver: StagingReceiver) -> None:
        self._receiver = receiver

    def _make_staging(self, layout: StreamLayout) -> Staging:
        from areal_ray.weights.staging import staging_for

        return staging_for(HeldTensors(layout, self.tensors), layout, self._staging, is_shard=False)


class HeldTensors:
    """In the place of a model: holds tensors as they are sent, in the dict that it is given."""

    def __init__(self, layout: StreamLayout, tensors: dict[str, torch.Tensor]) -> None:
        import torch

        self._tensors = tensors
        for spec in layout.manifest.tensors:
            tensors.setdefault(spec.name, torch.zeros(spec.shape, dtype=spec.torch_dtype))

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self._tensors[name].copy_(tensor)
