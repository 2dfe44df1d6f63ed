"""Logprobs and entropies of chosen tokens, without a matrix of all tokens by the vocabulary.

Logits exist for one tile of tokens at a time, in the forward pass and again in the backward pass,
where the gradient is written into them: each pass goes over a tile as seldom as it can, since with
a large vocabulary that, and not the multiplication, takes the time.

With z the logits over the temperature, p = softmax(z) and H the entropy:

    d logprob / dz = onehot(target) - p          d H / dz = -p * (log p + H)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

TILE_ELEMENTS = 2**24
"""Of a tile: 64 MiB in float32."""


def token_statistics(
    hidden: Tensor,
    head: torch.nn.Linear,
    targets: Tensor,
    *,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Of `targets`, each predicted from the state at the same place in `hidden`, (N, width)."""
    logprobs, entropies = _TokenStatistics.apply(
        hidden.to(head.weight.dtype), head.weight, head.bias, targets, temperature, with_entropy
    )
    return logprobs, entropies if with_entropy else None


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_zeros(len(targets), dtype=torch.float32)
        normalizers, entropies = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        for tile in _tiles(len(targets), len(weight)):
            logits = _logits(hidden[tile], weight, bias, temperature)
            normalizers[tile] = logits.logsumexp(-1)
            chosen = logits.gather(-1, targets[tile, None]).squeeze(-1)
            logprobs[tile] = chosen - normalizers[tile]
            if with_entropy:
                logits -= normalizers[tile, None]
                entropies[tile] = -torch.linalg.vecdot(logits.exp(), logits)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, entropies)
        ctx.temperature = temperature
        ctx.with_entropy = with_entropy
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logprobs: Tensor, grad_entropies: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizers, entropies = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        grad_bias = torch.zeros_like(bias) if wants_bias else None
        for tile in _tiles(len(targets), len(weight)):
            logits = _logits(hidden[tile], weight, bias, ctx.temperature)
            logits -= normalizers[tile, None]
            factor = grad_logprobs[tile, None]
            if ctx.with_entropy:
                wanted = grad_entropies[tile, None]
                factor = factor + wanted * (logits + entropies[tile, None])
            gradient = logits.exp_().mul_(-factor)
            gradient.scatter_add_(-1, targets[tile, None], grad_logprobs[tile, None])
            gradient = gradient.to(weight.dtype)
            if ctx.temperature != 1.0:
                gradient /= ctx.temperature
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[tile])
            if grad_weight is not None:
                grad_weight.addmm_(gradient.T, hidden[tile])
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _tiles(tokens: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, TILE_ELEMENTS // vocabulary)
    for begin in range(0, tokens, size):
        yield slice(begin, min(tokens, begin + size))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)
