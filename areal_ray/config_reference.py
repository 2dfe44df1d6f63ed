"""The reference of the configuration, made from the Structs and what stands under their fields.

Python forgets the docstrings of fields, so they are read from the source: whatever text follows a
field in the class is what it means.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache

import msgspec
import yaml
from msgspec.inspect import type_info

from areal_ray.config import Config
from areal_ray.config_file import expected
from areal_ray.config_section import Section
from areal_ray.errors import ConfigError

INTRODUCTION = """\
# Configuration

Every key, with its default. In YAML sections are nested; on the command line a key is named by its
path, `trainer.lr=1e-5`. Values are as in YAML: `null`, `true`, `[a, b]`. A key that is unknown, a
wrong type and a combination that can't work are refused before anything starts.

A default that is *derived* follows from other keys, as told beside it; `areal-ray plan` shows what
it comes to, and a run's `config.yaml` what it was. Files (`file.py:function`, `.jsonl`, a model's
directory) are relative to the YAML file that names them.

This page is made by `areal-ray reference > docs/config.md`; `areal-ray reference trainer` prints a
section."""


class FieldNote(msgspec.Struct, frozen=True):
    """One key that holds a value."""

    path: str
    expected: str
    default: str
    note: str


class SectionNote(msgspec.Struct, frozen=True):
    path: str
    """Empty for the root."""
    note: str
    fields: list[FieldNote]


def reference(path: str = "") -> str:
    """The page in Markdown; with a `path`, the sections and keys there. Raises `ConfigError`."""
    sections = list(section_notes())
    if not path:
        return "\n\n".join([INTRODUCTION, *(_shown(one) for one in sections)]) + "\n"
    below = [one for one in sections if one.path == path or one.path.startswith(f"{path}.")]
    for section in sections:
        below += [
            msgspec.structs.replace(section, note="", fields=[field])
            for field in section.fields
            if field.path == path
        ]
    if not below:
        raise ConfigError(f"{path}: there is no such key or section")
    return "\n\n".join(_shown(one) for one in below) + "\n"


def section_notes(
    section: type[Section] = Config, path: str = "", note: str = ""
) -> Iterator[SectionNote]:
    """The section, then those in it, in the order of their fields."""
    own, notes = _texts(section)
    types = {field.name: field.type for field in type_info(section).fields}
    here, inner = [], []
    for field in msgspec.structs.fields(section):
        at = f"{path}.{field.name}" if path else field.name
        told = notes.get(field.name, "")
        if isinstance(field.type, type) and issubclass(field.type, Section):
            inner.append(section_notes(field.type, at, told))
        else:
            here.append(FieldNote(at, expected(types[field.name]), _default(field, told), told))
    yield SectionNote(path, " ".join(filter(None, (note, own))), here)
    for sections in inner:
        yield from sections


@cache
def _texts(section: type[Section]) -> tuple[str, dict[str, str]]:
    """The class's own docstring, and those of its fields."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(tree, ast.ClassDef)
    notes = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as text)),
            ):
                notes[name] = " ".join(text.split())
    return " ".join((ast.get_docstring(tree) or "").split()), notes


def _default(field: msgspec.structs.FieldInfo, note: str) -> str:
    if field.required:
        return "required"
    value = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is None and "Derived:" in note:
        return "derived"
    return f"`{_as_yaml(value)}`"


def _as_yaml(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.15g}".replace("e-0", "e-")
    text = yaml.safe_dump(msgspec.to_builtins(value), default_flow_style=True)
    return text.removesuffix("...\n").strip()


def _shown(section: SectionNote) -> str:
    lines = [f"## `{section.path}`" if section.path else "## The run"]
    if section.note:
        lines += ["", *textwrap.wrap(section.note, 100)]
    if section.fields:
        lines += ["", "| key | expected | default | |", "|---|---|---|---|"]
    for field in section.fields:
        cells = (f"`{field.path}`", field.expected.replace("*", "\\*"), field.default, field.note)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
