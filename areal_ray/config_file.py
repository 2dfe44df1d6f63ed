"""Reading a configuration: YAML and `key=value` overrides into the tree, strictly.

An unknown key, a wrong type or a missing value is refused with the path of the key, what was
expected and the nearest valid name; all problems of a file are named at once.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import yaml
from msgspec import inspect

from areal_ray.config import Config, Section
from areal_ray.errors import ConfigError

Raw = dict[str, object]


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path` and apply `key=value` overrides."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    raw = _parse_yaml(text, where=str(path))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {_shown(raw)}")
    for override in overrides:
        _apply_override(raw, override)
    config = from_mapping(raw)
    return with_paths_from(config, path.parent.resolve())


def from_mapping(raw: Raw) -> Config:
    """Turn plain dicts into a configuration, or say everything that is wrong with them."""
    problems = list(_problems(raw, Config, at=""))
    if problems:
        raise ConfigError("\n".join(problems))
    return msgspec.convert(raw, Config)


def with_values(config: Config, values: Mapping[str, object]) -> Config:
    """The same with other values for some keys, each by its path; as strict as a file."""
    raw = msgspec.to_builtins(config)
    for key, value in values.items():
        _set(raw, key, value)
    return from_mapping(raw)


def to_yaml(config: Config) -> str:
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


class _StrictLoader(yaml.SafeLoader):
    """YAML 1.1 takes `1e-4` for text and lets a repeated key win silently. Neither here."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Raw:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"{node.start_mark.name}:{line}: `{key}` is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _parse_yaml(text: str, *, where: str) -> object:
    loader = _StrictLoader(text)
    loader.name = where
    try:
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from error
    finally:
        loader.dispose()


def _apply_override(raw: Raw, override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override}: expected an override of the form key=value")
    _set(raw, key, _parse_yaml(value, where=f"override {key}"))


def _set(raw: Raw, key: str, value: object) -> None:
    *parents, leaf = key.split(".")
    target = raw
    for parent in parents:
        inner = target.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{key}: `{parent}` holds a value, not a section")
        target = inner
    target[leaf] = value


def _problems(raw: Raw, section: type[Section], *, at: str) -> Iterator[str]:
    fields = {field.name: field for field in msgspec.structs.fields(section)}
    types = {field.name: field.type for field in inspect.type_info(section).fields}
    for key in raw:
        if key not in fields:
            yield f"{_join(at, key)}: unknown key; {_nearest(str(key), list(fields))}"
    for name, field in fields.items():
        here = _join(at, name)
        if name not in raw:
            if field.required:
                yield f"{here}: missing; expected {expected(types[name])}"
            continue
        value = raw[name]
        if isinstance(field.type, type) and issubclass(field.type, Section):
            if isinstance(value, dict):
                yield from _problems(value, field.type, at=here)
            else:
                yield f"{here}: expected a section of keys and values, got {_shown(value)}"
            continue
        if not _is_valid(value, field.type):
            yield f"{here}: expected {expected(types[name])}, got {_shown(value)}" + _meant(
                value, types[name]
            )


def _is_valid(value: object, kind: type) -> bool:
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return not isinstance(converted, float) or math.isfinite(converted)


def _join(at: str, key: object) -> str:
    return f"{at}.{key}" if at else str(key)


def _nearest(key: str, valid: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, valid, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    return "valid here: " + ", ".join(valid)


def _meant(value: object, kind: inspect.Type) -> str:
    if not isinstance(kind, inspect.LiteralType):
        return ""
    close = difflib.get_close_matches(str(value), [str(v) for v in kind.values], n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


def expected(kind: inspect.Type) -> str:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "an integer" + _bounds(kind)
        case inspect.FloatType():
            return "a number" + _bounds(kind)
        case inspect.StrType(pattern=str() as pattern):
            return f"text that matches {pattern}"
        case inspect.StrType():
            return "text"
        case inspect.LiteralType():
            return "one of " + ", ".join(str(value) for value in kind.values)
        case inspect.VarTupleType(item_type=item):
            return f"a list, each item {expected(item)}"
        case inspect.UnionType():
            return " or ".join(
                "null" if isinstance(inner, inspect.NoneType) else expected(inner)
                for inner in sorted(kind.types, key=lambda t: isinstance(t, inspect.NoneType))
            )
    return type(kind).__name__


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    bounds = [
        f"{sign} {bound:g}"
        for sign, bound in ((">", kind.gt), (">=", kind.ge), ("<", kind.lt), ("<=", kind.le))
        if bound is not None
    ]
    return "".join(f" {bound}" if i == 0 else f" and {bound}" for i, bound in enumerate(bounds))


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'the text "{value}"'
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "a section of keys and values"
    return str(value)


def with_paths_from(config: Config, base: Path) -> Config:
    """Make the files that a config names relative to `base`, such as the config's own folder."""

    def anchored(spec: str | None) -> str | None:
        if spec is None:
            return None
        file, colon, name = spec.partition(":")
        if file.endswith((".py", ".jsonl")) and not Path(file).is_absolute():
            return f"{base / file}{colon}{name}"
        return spec

    def model_path(spec: str | None) -> str | None:
        return str(base / spec) if spec is not None and (base / spec).is_dir() else spec

    replace = msgspec.structs.replace
    return replace(
        config,
        model=replace(
            config.model,
            factory=anchored(config.model.factory),
            path=model_path(config.model.path),
        ),
        data=replace(
            config.data,
            train=anchored(config.data.train),
            held_out=anchored(config.data.held_out),
        ),
        warmup=replace(config.warmup, data=anchored(config.warmup.data)),
        reward=replace(config.reward, function=anchored(config.reward.function)),
        rollout=replace(
            config.rollout,
            workflow=anchored(config.rollout.workflow),
            filter=anchored(config.rollout.filter),
        ),
        observability=replace(
            config.observability,
            trackers=tuple(anchored(spec) for spec in config.observability.trackers),
        ),
    )
