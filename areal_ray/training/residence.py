"""Where a trainer's tensors live: on its device, or at home in host memory.

A trainer that shares its devices with engines moves in for the time of a step. Each tensor comes
home to the memory that it left, which others may know: a weight update sends from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Residence:
    def __init__(self, device: torch.device, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """`tensors`: all that there are now; an optimizer makes its own with its first step."""
        self._device = device
        self._tensors = tensors
        self._homes: list[tuple[Tensor, Tensor]] = []
        self._is_in = True

    def move_in(self) -> None:
        """Unless it is."""
        if self._is_in:
            return
        self._is_in = True
        for tensor in self._tensors():
            home = tensor.data
            self._homes.append((tensor, home))
            tensor.data = torch.empty_like(home, device=self._device).copy_(home)

    def move_out(self) -> None:
        """Unless it is. What was made on the device gets a home now."""
        if not self._is_in:
            return
        known = {id(tensor) for tensor, _ in self._homes}
        for tensor in self._tensors():
            if id(tensor) not in known:
                self._homes.append((tensor, torch.empty_like(tensor.data, device="cpu")))
        while self._homes:
            tensor, home = self._homes.pop()
            tensor.data = home.copy_(tensor.data)
        self._is_in = False
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
