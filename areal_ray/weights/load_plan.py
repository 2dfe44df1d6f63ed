"""Where each part of the stream belongs in a model, found by watching the model load it.

vLLM fuses and shards weights when it loads them (q, k and v become one parameter, of which a
tensor-parallel worker keeps its rows), each family of models in its own way. So the model's own
`load_weights` is run once on a stream that holds nothing, and every copy that it would make is
noted instead of made. From then on weights go straight to their places, in a loop of copies.

A model that does more than copy (scales, quantises) has no such plan: `derive` returns
None, and its weights are loaded by `load_weights` itself each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from areal_ray.weights.layout import StreamLayout

_FILLS = (
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
)


class Loadable(Protocol):
    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object: ...


@dataclass(frozen=True)
class View:
    """A part of a tensor, in elements of `dtype` from where the tensor begins."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class Move:
    """A part of a received tensor, and the part of a parameter that it becomes."""

    source: View
    parameter: str
    target: View


@dataclass(frozen=True)
class LoadPlan:
    moves: list[list[Move]]
    """For each tensor of the stream."""

    def apply(
        self, index: int, received: torch.Tensor, parameters: dict[str, torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The copies, as (to, from), that put one received tensor (flat) in its places."""
        for move in self.moves[index]:
            yield move.target.of(parameters[move.parameter]), move.source.of(received)


def derive(model: Loadable, layout: StreamLayout) -> LoadPlan | None:
    """None if the model does more than copy, or if parameters share memory in parts."""
    parameters = dict(model.named_parameters())
    if len({_storage(tensor) for tensor in parameters.values()}) < len(parameters):
        return None
    # Never touched, so that the system never backs it with memory.
    stream = torch.empty(layout.total_bytes, dtype=torch.uint8)
    watch = _Watch(stream, parameters, layout)
    try:
        with torch.no_grad(), watch:
            model.load_weights(layout.tensors(stream))
    except _DoesMore:
        return None
    return LoadPlan(watch.moves)


class _DoesMore(Exception):
    """The model's loading is more than copies from the stream."""


class _Watch(TorchDispatchMode):
    """Notes copies from the stream into parameters and makes none of them."""

    def __init__(
        self, stream: torch.Tensor, parameters: dict[str, torch.Tensor], layout: StreamLayout
    ) -> None:
        super().__init__()
        self._stream = _storage(stream)
        self._parameters = {_storage(tensor): (n, tensor) for n, tensor in parameters.items()}
        self._layout = layout
        self.moves: list[list[Move]] = [[] for _ in layout.begins]

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        reads_stream = any(_storage(t) == self._stream for t in _tensors((args, kwargs)))
        written = _written(func, args, kwargs)
        if any(_storage(tensor) in self._parameters for tensor in written):
            if func in _FILLS:
                return args[0]  # padding, which was filled when the model was first loaded
            if func is not torch.ops.aten.copy_.default or _storage(args[1]) != self._stream:
                raise _DoesMore
            self._note(*args[:2])
            return args[0]
        if written and reads_stream:
            raise _DoesMore  # into something that is no parameter
        result = func(*args, **kwargs)
        if reads_stream and not all(
            isinstance(one, torch.Tensor) and _storage(one) == self._stream
            for one in tree_leaves(result)
        ):
            raise _DoesMore  # it computes with the weights, and there are none
        return result

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name, parameter = self._parameters[_storage(target)]
        begins_at = source.storage_offset() * source.itemsize
        index = self._layout.index_at(begins_at)
        skipped = (begins_at - self._layout.begins[index]) // source.itemsize
        if tuple(target.shape) != tuple(source.shape):
            source = source.expand(target.shape)
        self.moves[index].append(
            Move(
                source=View(source.dtype, tuple(source.shape), source.stride(), skipped),
                parameter=name,
                target=View(
                    target.dtype,
                    tuple(target.shape),
                    target.stride(),
                    target.storage_offset() - parameter.storage_offset(),
                ),
            )
        )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Every tensor that a call changes."""
    declared = func._schema.arguments
    given = [*zip(declared, args, strict=False), *((a, kwargs.get(a.name)) for a in declared)]
    return [
        tensor
        for argument, value in given
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value)
    ]
