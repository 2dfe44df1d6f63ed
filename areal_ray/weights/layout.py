"""How a model's weights lie in one stream of bytes.

Both sides derive the same layout from the same manifest, so nothing but bytes travels. Tensors
follow each other, each aligned; buckets cut the stream into equal pieces, wherever a tensor may
begin or end:

    tensors   |--embed------------|-qkv-|-o-|--gate_up----| ...
    buckets   |=========|=========|=========|=========| ...

So many small tensors share a bucket, a tensor larger than a bucket is split, and a receiver
whose staging copy is one buffer gets each bucket in its place, without a copy in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # the control plane sends manifests about, and does without torch
    import torch

ALIGNMENT_BYTES = 64


class TensorSpec(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        size = self.torch_dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size


class WeightManifest(msgspec.Struct, frozen=True):
    """What is sent, in which order, cut into pieces of which size."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int

    def offsets(self) -> list[int]:
        """Where each tensor begins in the stream."""
        begins, at = [], 0
        for tensor in self.tensors:
            begins.append(at)
            at += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return begins

    @property
    def total_bytes(self) -> int:
        return self.offsets()[-1] + self.tensors[-1].nbytes if self.tensors else 0

    def buckets(self) -> Iterator[range]:
        for begin in range(0, self.total_bytes, self.bucket_bytes):
            yield range(begin, min(begin + self.bucket_bytes, self.total_bytes))


@dataclass(frozen=True)
class Piece:
    """The part of one tensor that lies in one bucket, in bytes."""

    tensor_index: int
    in_tensor: slice
    in_bucket: slice


def pieces_of(manifest: WeightManifest, bucket: range) -> Iterator[Piece]:
    for index, (spec, begin) in enumerate(zip(manifest.tensors, manifest.offsets(), strict=True)):
        first = max(begin, bucket.start)
        last = min(begin + spec.nbytes, bucket.stop)
        if first < last:
            yield Piece(
                tensor_index=index,
                in_tensor=slice(first - begin, last - begin),
                in_bucket=slice(first - bucket.start, last - bucket.start),
            )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8)


def tensors_in(
    stream: torch.Tensor, manifest: WeightManifest
) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors as views into a received stream."""
    for spec, begin in zip(manifest.tensors, manifest.offsets(), strict=True):
        flat = stream[begin : begin + spec.nbytes].view(spec.torch_dtype)
        yield spec.name, flat.view(spec.shape)


def manifest_of(
    parameters: Sequence[tuple[str, torch.Tensor]], *, dtype: torch.dtype, bucket_bytes: int
) -> WeightManifest:
    name = str(dtype).removeprefix("torch.")
    return WeightManifest(
        tensors=tuple(
            TensorSpec(name=key, dtype=name, shape=tuple(value.shape)) for key, value in parameters
        ),
        bucket_bytes=bucket_bytes,
    )
