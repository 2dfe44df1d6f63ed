"""Named functions that a config can choose and a user's script can add to.

@POLICY_LOSSES.register("mine")
def mine(inputs: LossInputs) -> LossOutputs: ...
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from areal_ray.errors import ConfigError

F = TypeVar("F", bound=Callable[..., object])


class Registry(Generic[F]):
    def __init__(self, config_key: str) -> None:
        self._config_key = config_key
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        def add(function: F) -> F:
            if name in self._functions:
                raise ValueError(f"{self._config_key}: `{name}` is registered already")
            self._functions[name] = function
            return function

        return add

    def __getitem__(self, name: str) -> F:
        if name not in self._functions:
            close = difflib.get_close_matches(name, self._functions, n=1)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            known = ", ".join(self._functions)
            raise ConfigError(f'{self._config_key}: expected one of {known}, got "{name}"{hint}')
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)
