"""docs/api.md says what the code says: every public name, with its signature."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap

import pytest

import areal_ray
from tests.documents import REPO, Document, sections

API = Document(REPO / "docs" / "api.md")
DESCRIBED = {
    heading.strip("`"): below
    for heading, below in sections(API)
    if heading.startswith("`areal_ray.")
}
ACTORS = re.findall(r"^\| `(areal_ray\.actors\.\S+)` \|[^|]*\| (.*) \|$", API.text, re.MULTILINE)
REGISTRIES = re.findall(
    r"^\| `(areal_ray\.algorithms\.\S+)` \| `([\w.]+)` \| (.*) \|$", API.text, re.MULTILINE
)


def found(dotted: str) -> object:
    """The object of this name: from the longest part that is a module on."""
    names = dotted.split(".")
    for length in range(len(names), 0, -1):
        try:
            here: object = importlib.import_module(".".join(names[:length]))
        except ModuleNotFoundError:
            continue
        for name in names[length:]:
            here = getattr(here, name)
        return here
    raise AttributeError(dotted)


def source(of: object) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(of))).body
    return tree


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    begins = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
    returns = "" if function.returns is None else f" -> {ast.unparse(function.returns)}"
    return f"{begins} {function.name}({ast.unparse(function.args)}){returns}"


def members(tree: ast.ClassDef) -> dict[str, str]:
    """Fields and methods by name, each as one line of code."""
    known = {}
    for statement in tree.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)):
                known[name] = ast.unparse(statement)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                known[name] = signature(statement)
    return known


def test_every_public_name_is_described() -> None:
    assert {f"areal_ray.{name}" for name in areal_ray.__all__} <= DESCRIBED.keys()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(areal_ray(?:\.\w+)+)", API.prose))))
def test_what_is_named_exists(name: str) -> None:
    assert found(name) is not None


@pytest.mark.parametrize("name", DESCRIBED)
def test_signatures_are_those_of_the_code(name: str) -> None:
    code = re.search(r"```python\n(.*?)```", DESCRIBED[name], re.DOTALL)
    if code is None:
        assert DESCRIBED[name].strip()
        return
    (shown,) = ast.parse(code[1]).body
    real = source(found(name))
    if isinstance(shown, ast.ClassDef):
        assert shown.name == real.name
        told, known = members(shown), members(real)
        assert told == {one: known.get(one) for one in told}
        fields = {
            one for one, line in known.items() if "def " not in line and not one.startswith("_")
        }
        assert fields <= told.keys(), "every field"
    else:
        assert signature(shown) == signature(real)


@pytest.mark.parametrize(("name", "methods"), ACTORS)
def test_actors_have_the_methods_that_are_told(name: str, methods: str) -> None:
    actor = found(name).__ray_metadata__.modified_class
    for method in re.findall(r"`(\w+)`", methods):
        assert inspect.iscoroutinefunction(getattr(actor, method, None)), method


def test_all_actors_are_told_of() -> None:
    decorated = re.compile(r"^@ray\.remote.*\nclass (\w+)", re.MULTILINE)
    there = {
        name
        for path in (REPO / "actors").glob("*.py")
        for name in decorated.findall(path.read_text())
    }
    assert {name.rpartition(".")[2] for name, _ in ACTORS} == there - {"PacedTrainer"}


@pytest.mark.parametrize(("name", "key", "names"), REGISTRIES)
def test_registries_hold_the_names_that_are_told(name: str, key: str, names: str) -> None:
    registry = found(name)
    assert set(re.findall(r"`(\w+)`", names)) == set(registry)
    assert registry._config_key == key


def test_all_registries_are_told_of() -> None:
    assert len(REGISTRIES) == 4
