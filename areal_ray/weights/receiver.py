"""The engine's side of a weight update: a staging copy, filled in a thread of its own.

    idle -> receiving -> staged -> (take) -> idle
                     `-> failed -> (discard) -> idle

While a receiver is receiving, the engine goes on generating with the weights it has. `take`
hands over the staged tensors, once; it raises what went wrong if they are not whole. `discard`
never waits: a thread that still hangs in the group is abandoned with all that it holds, and
ends when the sender closes the group, or with the group's time limit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from areal_ray.errors import WeightUpdateError
from areal_ray.weights.layout import WeightManifest, tensors_in
from areal_ray.weights.transport import TransferGroup
from areal_ray.weights.update import GroupMember


class StagingReceiver:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: TransferGroup | None = None
        self._reception: _Reception | None = None

    def start(self, member: GroupMember, manifest: WeightManifest) -> None:
        """Begin to receive, in the background. The group of the last update is used again."""
        if self._reception is not None:
            raise WeightUpdateError("a weight update began before the last one ended")
        if self._group is not None and self._group.member != member:
            self._group.close()
            self._group = None
        self._reception = _Reception(self._group or member, manifest, self._device)

    def take(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The staged tensors. Waits for the thread, which ends with the group's time limit."""
        if self._reception is None:
            raise WeightUpdateError("no weights were staged")
        reception, self._reception = self._reception, None
        self._group, staging = reception.result()
        return tensors_in(staging, reception.manifest)

    def discard(self) -> str:
        """Let go of what was staged; returns what had gone wrong, if anything had."""
        reception, self._reception = self._reception, None
        self._group = None
        return "" if reception is None else reception.trouble()


class _Reception:
    """One update's worth of receiving. Owns its thread and all that the thread touches."""

    def __init__(
        self, group: TransferGroup | GroupMember, manifest: WeightManifest, device: torch.device
    ) -> None:
        self.manifest = manifest
        self._device = device
        self._received: tuple[TransferGroup, torch.Tensor] | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._receive, args=(group,), name="weight-staging", daemon=True
        )
        self._thread.start()

    def result(self) -> tuple[TransferGroup, torch.Tensor]:
        self._thread.join()
        if self._received is None:
            raise WeightUpdateError(
                f"the weights did not arrive whole: {self._error}"
            ) from self._error
        return self._received

    def trouble(self) -> str:
        if self._thread.is_alive():
            return "it was still receiving"
        return "" if self._error is None else str(self._error)

    def _receive(self, group: TransferGroup | GroupMember) -> None:
        try:
            with _beside_generation(self._device):
                if isinstance(group, GroupMember):
                    group = TransferGroup(group)
                staging = torch.empty(
                    self.manifest.total_bytes, dtype=torch.uint8, device=self._device
                )
                for bucket in self.manifest.buckets():
                    group.broadcast(staging[bucket.start : bucket.stop]).wait()
                group.acknowledge(self._device)
            self._received = group, staging
        except Exception as error:  # noqa: BLE001 - raised by `result`, told by `trouble`
            self._error = error


@contextmanager
def _beside_generation(device: torch.device) -> Iterator[None]:
    """On a GPU, a stream of our own on the worker's device, so that decoding is not held up."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
