"""Where received weights wait for the commit.

    device   beside the weights that serve, on the same device
    host     in pinned host memory, for GPUs without room for a second copy
    none     nowhere: they are written over the ones that serve, under a pause

A worker that holds the whole model stages the stream as it is: each bucket is received in its
place, and the commit copies from there. A tensor-parallel worker holds a part of the model, and
stages only that part. Staging memory is kept from one update to the next.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

import torch

from areal_ray.errors import WeightUpdateError
from areal_ray.weights.layout import StreamLayout
from areal_ray.weights.load_plan import Loadable, LoadPlan, derive
from areal_ray.weights.update import StagingMode


class Staging(Protocol):
    writes_in_place: bool
    """What arrives is in the model at once: once begun, there is no way back."""

    def buffer(self, bucket: range) -> torch.Tensor:
        """The memory to receive a bucket in: done with before the next but one is asked for."""

    def arrived(self, bucket: range, received: torch.Tensor) -> None: ...

    def apply(self) -> None:
        """All has arrived: into the model with it. Under a pause."""


def staging_for(
    model: Loadable, layout: StreamLayout, mode: StagingMode, *, is_shard: bool
) -> Staging:
    """`is_shard`: the model is one worker's part of a tensor-parallel engine's."""
    parameters = {name: tensor.data for name, tensor in model.named_parameters()}
    device = next(iter(parameters.values())).device
    plan = derive(model, layout)
    if mode == "none":
        if plan is None:
            raise WeightUpdateError(
                "weights.staging: `none` needs a model whose weights are loaded by copying alone; "
                f"{type(model).__name__} transforms them: use `device` or `host`"
            )
        return Landing(layout, plan, parameters, device)
    try:
        if plan is not None and is_shard:
            shadows = {name: _staged(tensor, mode) for name, tensor in parameters.items()}
            return ShardStaging(layout, plan, shadows, parameters, device)
        stream = _empty_bytes(layout.total_bytes, device if mode == "device" else "cpu")
    except torch.OutOfMemoryError as error:
        raise WeightUpdateError(
            f"no room for a staging copy of {layout.total_bytes / 2**30:.2f} GiB: lower "
            f"generation.gpu_memory, or choose another weights.staging than `{mode}`"
        ) from error
    if plan is None:
        return StreamStaging(
            layout, stream, lambda: model.load_weights(layout.tensors(stream)), device
        )
    return StreamStaging(layout, stream, _copies(layout, plan, stream, parameters), device)


class StreamStaging:
    """The whole stream, as it came."""

    writes_in_place = False

    def __init__(
        self,
        layout: StreamLayout,
        stream: torch.Tensor,
        load: Callable[[], object],
        device: torch.device,
    ) -> None:
        """`load`: puts what is in `stream` into the model. `device`: where buckets are received."""
        self._stream = stream
        self._load = load
        self._buckets = None if stream.device == device else _Buckets(layout, device)

    def buffer(self, bucket: range) -> torch.Tensor:
        if self._buckets is None:
            return self._stream[bucket.start : bucket.stop]
        return self._buckets.next(len(bucket))

    def arrived(self, bucket: range, received: torch.Tensor) -> None:
        if self._buckets is not None:
            self._stream[bucket.start : bucket.stop].copy_(received)

    def apply(self) -> None:
        self._load()


class Landing:
    """Each tensor goes to its places as soon as all of it is there."""

    writes_in_place = True

    def __init__(
        self,
        layout: StreamLayout,
        plan: LoadPlan,
        targets: dict[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        self._layout = layout
        self._plan = plan
        self._targets = targets
        self._buckets = _Buckets(layout, device)
        self._begun: torch.Tensor | None = None
        """The one tensor that a bucket's end has cut: what is there of it."""

    def buffer(self, bucket: range) -> torch.Tensor:
        return self._buckets.next(len(bucket))

    def arrived(self, bucket: range, received: torch.Tensor) -> None:
        for piece in self._layout.pieces(bucket):
            spec = self._layout.manifest.tensors[piece.tensor_index]
            part = received[piece.in_bucket]
            if part.numel() == spec.nbytes:
                whole = part
            else:
                if piece.in_tensor.start == 0:
                    self._begun = torch.empty(
                        spec.nbytes, dtype=torch.uint8, device=received.device
                    )
                self._begun[piece.in_tensor].copy_(part)
                if piece.in_tensor.stop < spec.nbytes:
                    continue
                whole, self._begun = self._begun, None
            flat = whole.view(spec.torch_dtype)
            for target, source in self._plan.apply(piece.tensor_index, flat, self._targets):
                target.copy_(source)

    def apply(self) -> None:
        pass


class ShardStaging(Landing):
    """A second copy of this worker's own parameters."""

    writes_in_place = False

    def __init__(
        self,
        layout: StreamLayout,
        plan: LoadPlan,
        shadows: dict[str, torch.Tensor],
        parameters: dict[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        super().__init__(layout, plan, shadows, device)
        self._copies = [(parameters[name], shadow) for name, shadow in shadows.items()]

    def apply(self) -> None:
        _copy_all(self._copies)


class _Buckets:
    """Two buffers, in turn: one is received in while the other is read."""

    def __init__(self, layout: StreamLayout, device: torch.device) -> None:
        longest = max(map(len, layout.buckets), default=0)
        self._buffers = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(2)]

    def next(self, size: int) -> torch.Tensor:
        self._buffers.reverse()
        return self._buffers[0][:size]


def _copies(
    layout: StreamLayout,
    plan: LoadPlan,
    stream: torch.Tensor,
    parameters: dict[str, torch.Tensor],
) -> Callable[[], None]:
    """The copies from the stream to the parameters, found once: then they are a loop."""
    pairs = []
    for index, (_, tensor) in enumerate(layout.tensors(stream)):
        pairs += plan.apply(index, tensor.view(-1), parameters)
    return lambda: _copy_all(pairs)


def _copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """By all cores: generation stands still meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs], True)
    finally:
        torch.set_num_threads(threads)
    if pairs and pairs[0][0].is_cuda:
        torch.cuda.current_stream().synchronize()


def _staged(tensor: torch.Tensor, mode: StagingMode) -> torch.Tensor:
    """A second copy of a parameter, with all of it that no update writes."""
    if mode == "device" or tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


def _empty_bytes(count: int, device: torch.device | str) -> torch.Tensor:
    is_pinned = device == "cpu" and torch.cuda.is_available()
    return torch.empty(count, dtype=torch.uint8, device=device, pin_memory=is_pinned)
