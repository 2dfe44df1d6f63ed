"""The engine's side of a weight update: a staging copy, filled in a thread of its own.

    idle -> receiving -> staged -> (take) -> idle
                     `-> failed -> (discard) -> idle

While a receiver is receiving, the engine goes on generating with the weights it has. `take`
hands over the staged tensors, once; it raises what went wrong if they are not whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from areal_ray.errors import WeightUpdateError
from areal_ray.weights.layout import WeightManifest, tensors_in
from areal_ray.weights.transport import GroupMember, TransferGroup


class StagingReceiver:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: TransferGroup | None = None
        self._thread: threading.Thread | None = None
        self._manifest: WeightManifest | None = None
        self._staging: torch.Tensor | None = None
        self._error: BaseException | None = None

    def start(self, member: GroupMember, manifest: WeightManifest) -> None:
        """Begin to receive, in the background."""
        if self._thread is not None:
            raise WeightUpdateError("a weight update began before the last one ended")
        self._manifest = manifest
        self._error = None
        self._thread = threading.Thread(
            target=self._receive, args=(member, manifest), name="weight-staging", daemon=True
        )
        self._thread.start()

    def take(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The staged tensors. Waits for the thread, which ends with the group's time limit."""
        if self._thread is None or self._manifest is None:
            raise WeightUpdateError("no weights were staged")
        self._thread.join()
        staging, error = self._staging, self._error
        manifest = self._manifest
        self._forget()
        if error is not None or staging is None:
            raise WeightUpdateError(f"the weights did not arrive whole: {error}") from error
        return tensors_in(staging, manifest)

    def discard(self) -> str:
        """Let go of what was staged; returns what had gone wrong, if anything had."""
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._thread is not None:
            self._thread.join()
        error = self._error
        self._forget()
        return "" if error is None else str(error)

    def _receive(self, member: GroupMember, manifest: WeightManifest) -> None:
        try:
            if self._group is None or self._group.member != member:
                self._group = TransferGroup(member)
            staging = torch.empty(manifest.total_bytes, dtype=torch.uint8, device=self._device)
            for bucket in manifest.buckets():
                self._group.broadcast(staging[bucket.start : bucket.stop]).wait()
            self._staging = staging
            self._group.count(True, self._device)
        except Exception as error:  # noqa: BLE001 - raised by `take`, told by `discard`
            self._error = error
            self._staging = None

    def _forget(self) -> None:
        self._thread = self._manifest = self._staging = self._error = None
