"""Every key of the configuration by its dotted path, with the values that it can only have."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import inspect

from areal_ray.config import Config
from areal_ray.config_section import Section


class ConfigKey(msgspec.Struct, frozen=True):
    path: str
    """As in an override: `trainer.lora.rank`."""
    values: tuple[str, ...]
    """All that are possible, where they can be listed."""


def config_keys(section: type[Section] = Config, at: str = "") -> Iterator[ConfigKey]:
    types = {field.name: field.type for field in inspect.type_info(section).fields}
    for field in msgspec.structs.fields(section):
        path = f"{at}{field.name}"
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from config_keys(field.type, f"{path}.")
        else:
            yield ConfigKey(path, tuple(_values(types[field.name])))


def _values(kind: inspect.Type) -> Iterator[str]:
    match kind:
        case inspect.LiteralType():
            yield from map(str, kind.values)
        case inspect.BoolType():
            yield from ("true", "false")
        case inspect.UnionType():
            for one in kind.types:
                yield from _values(one)
