"""How a model's weights lie in one stream of bytes.

Both sides derive the same layout from the same manifest, so nothing but bytes travels. Tensors
follow each other, each aligned; buckets cut the stream into equal pieces, wherever a tensor may
begin or end:

    tensors   |--embed------------|-qkv-|-o-|--gate_up----| ...
    buckets   |=========|=========|=========|=========| ...

So many small tensors share a bucket, a tensor larger than a bucket is split, and a receiver
whose staging copy is one buffer gets each bucket in its place, without a copy in between. Both
tensors and buckets begin at multiples of `ALIGNMENT_BYTES`: no number is ever cut in two.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # the control plane sends manifests about, and does without torch
    import torch

    from areal_ray.weights.whole import Weight

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
        return self.torch_dtype.itemsize * math.prod(self.shape)


class WeightManifest(msgspec.Struct, frozen=True):
    """What is sent, in which order, cut into pieces of which size."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int


@dataclass(frozen=True)
class Piece:
    """The part of one tensor that lies in one bucket, in bytes."""

    tensor_index: int
    in_tensor: slice
    in_bucket: slice


class StreamLayout:
    """A manifest with every place in the stream worked out, once."""

    def __init__(self, manifest: WeightManifest) -> None:
        self.manifest = manifest
        self.begins: list[int] = []
        """Where each tensor begins in the stream."""
        self.ends: list[int] = []
        at = 0
        for tensor in manifest.tensors:
            self.begins.append(at)
            self.ends.append(at + tensor.nbytes)
            at = _aligned(self.ends[-1])
        self.total_bytes = self.ends[-1] if self.ends else 0
        step = manifest.bucket_bytes
        self.buckets = [
            range(begin, min(begin + step, self.total_bytes))
            for begin in range(0, self.total_bytes, step)
        ]

    def index_at(self, place: int) -> int:
        """Which tensor holds this byte of the stream."""
        return bisect.bisect_right(self.begins, place) - 1

    def pieces(self, bucket: range) -> Iterator[Piece]:
        """What lies in this bucket, in order."""
        for index in range(bisect.bisect_right(self.ends, bucket.start), len(self.begins)):
            begin = self.begins[index]
            if begin >= bucket.stop:
                return
            first, last = max(begin, bucket.start), min(self.ends[index], bucket.stop)
            if first < last:
                yield Piece(
                    tensor_index=index,
                    in_tensor=slice(first - begin, last - begin),
                    in_bucket=slice(first - bucket.start, last - bucket.start),
                )

    def tensors(self, stream: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors as views into a received stream."""
        for spec, begin, end in zip(self.manifest.tensors, self.begins, self.ends, strict=True):
            yield spec.name, stream[begin:end].view(spec.torch_dtype).view(spec.shape)


def manifest_of(
    parameters: Sequence[tuple[str, Weight]], *, dtype: torch.dtype, bucket_bytes: int
) -> WeightManifest:
    """`bucket_bytes` is rounded up to whole alignments."""
    name = str(dtype).removeprefix("torch.")
    return WeightManifest(
        tensors=tuple(
            TensorSpec(name=key, dtype=name, shape=tuple(value.shape)) for key, value in parameters
        ),
        bucket_bytes=_aligned(bucket_bytes),
    )


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
