"""Named functions that a config can choose and a user's script can add to.

@POLICY_LOSSES.register("mine", LossTraits(needs_entropy=True))
def mine(inputs: LossInputs) -> LossOutputs: ...

Traits say what a function needs, so that the trainer computes only what is used.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from areal_ray.errors import ConfigError

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")


class Registry(Generic[F, T]):
    def __init__(self, config_key: str, *, default_traits: T) -> None:
        self._config_key = config_key
        self._default_traits = default_traits
        self._functions: dict[str, F] = {}
        self._traits: dict[str, T] = {}

    def register(self, name: str, traits: T | None = None) -> Callable[[F], F]:
        def add(function: F) -> F:
            if name in self._functions:
                raise ValueError(f"{self._config_key}: `{name}` is registered already")
            self._functions[name] = function
            self._traits[name] = self._default_traits if traits is None else traits
            return function

        return add

    def __getitem__(self, name: str) -> F:
        if name not in self._functions:
            close = difflib.get_close_matches(name, self._functions, n=1)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            known = ", ".join(self._functions)
            raise ConfigError(f'{self._config_key}: expected one of {known}, got "{name}"{hint}')
        return self._functions[name]

    def traits(self, name: str) -> T:
        _ = self[name]
        return self._traits[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)
