"""Dependencies point one way: run -> actors, placement -> the library, which imports no ray."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
COMPOSES = {"areal_ray/run.py", "areal_ray/tune.py", "areal_ray/workbench.py"}
OUTER = ("ray", "areal_ray.actors", "areal_ray.placement", "areal_ray.run")


def imported_by(source: str) -> Iterator[str]:
    """Every module that the source imports when it runs: what only a type checker sees aside."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        waiting.extend(ast.iter_child_nodes(node))


def offends(module: str) -> bool:
    return any(module == outer or module.startswith(f"{outer}.") for outer in OUTER)


def test_the_library_imports_neither_ray_nor_the_actors() -> None:
    for path in sorted((REPO / "areal_ray").rglob("*.py")):
        name = str(path.relative_to(REPO))
        if name in COMPOSES or name.startswith("areal_ray/cli/"):
            continue
        wrong = [module for module in imported_by(path.read_text()) if offends(module)]
        assert wrong == [], name


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("import ray", True),
        ("def f():\n    from ray.util import metrics", True),
        ("from areal_ray.actors.crew import Crew", True),
        ("if TYPE_CHECKING:\n    from areal_ray.actors.crew import Crew", False),
        ("import raycast", False),
    ],
)
def test_what_counts_as_an_outward_import(source: str, wrong: bool) -> None:
    assert any(offends(module) for module in imported_by(source)) is wrong
