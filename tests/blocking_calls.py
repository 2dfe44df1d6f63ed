"""Finds calls that block inside coroutines, by walking the syntax tree of a source tree.

A call blocks if it is one of `BLOCKING`, a file method of `BLOCKING_METHODS`, or a plain
function (or a class whose `__init__`) of the same tree that contains such a call, directly or
through others. Handing such a function to `asyncio.to_thread` is no call, and is fine.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

BLOCKING = {
    "input",
    "open",
    "os.popen",
    "os.system",
    "os.waitpid",
    "ray.available_resources",
    "ray.cluster_resources",
    "ray.get",
    "ray.init",
    "ray.put",
    "ray.shutdown",
    "ray.util.placement_group.placement_group",
    "ray.util.placement_group.remove_placement_group",
    "ray.wait",
    "requests.get",
    "requests.post",
    "shutil.copytree",
    "shutil.rmtree",
    "socket.create_connection",
    "subprocess.call",
    "subprocess.check_call",
    "subprocess.check_output",
    "subprocess.run",
    "time.sleep",
    "urllib.request.urlopen",
}
BLOCKING_METHODS = {
    "mkdir",
    "open",
    "read_bytes",
    "read_text",
    "rename",
    "unlink",
    "write_bytes",
    "write_text",
}


@dataclass
class _Function:
    """One function of the tree: what it calls, as dotted names with imports resolved."""

    where: str
    is_coroutine: bool
    calls: list[tuple[int, str]] = field(default_factory=list)


def find_blocking_calls(sources: dict[str, str]) -> list[str]:
    """`sources` maps module names to their text; the result names each offending line."""
    functions: dict[str, _Function] = {}
    for module, text in sources.items():
        functions.update(_functions_of(module, ast.parse(text)))
    blocking = _blocking_functions(functions)
    return [
        f"{function.where}:{line}: {call}"
        for function in functions.values()
        if function.is_coroutine
        for line, call in function.calls
        if _blocks(call) or call in blocking
    ]


def _blocking_functions(functions: dict[str, _Function]) -> set[str]:
    """The plain functions that block, found by going round until none is added."""
    blocking: set[str] = set()
    while True:
        found = {
            name
            for name, function in functions.items()
            if not function.is_coroutine
            and any(_blocks(call) or call in blocking for _, call in function.calls)
        }
        found |= {name.removesuffix(".__init__") for name in found if name.endswith(".__init__")}
        if found == blocking:
            return blocking
        blocking = found


def _blocks(call: str) -> bool:
    return call in BLOCKING or ("." in call and call.rpartition(".")[2] in BLOCKING_METHODS)


def _functions_of(module: str, tree: ast.Module) -> Iterator[tuple[str, _Function]]:
    imported = _imports(tree)
    yield from _walk(module, tree, prefix=module, owner=None, imported=imported)


def _walk(
    module: str, node: ast.AST, *, prefix: str, owner: str | None, imported: dict[str, str]
) -> Iterator[tuple[str, _Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            name = f"{prefix}.{child.name}"
            yield from _walk(module, child, prefix=name, owner=name, imported=imported)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{child.name}"
            function = _Function(module, isinstance(child, ast.AsyncFunctionDef))
            for call in _calls_in(child):
                if dotted := _resolve(call.func, module, owner, imported):
                    function.calls.append((call.lineno, dotted))
            yield name, function
            yield from _walk(module, child, prefix=name, owner=owner, imported=imported)
        else:
            yield from _walk(module, child, prefix=prefix, owner=owner, imported=imported)


def _calls_in(function: ast.AST) -> Iterator[ast.Call]:
    """Calls that run when the function runs: not those of functions defined inside it."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from _calls_in(child)


def _resolve(
    callee: ast.expr, module: str, owner: str | None, imported: dict[str, str]
) -> str | None:
    parts: list[str] = []
    while isinstance(callee, ast.Attribute):
        parts.append(callee.attr)
        callee = callee.value
    if not isinstance(callee, ast.Name):
        return "?." + ".".join(reversed(parts)) if parts else None
    first = callee.id
    parts.reverse()
    if first == "self" and owner is not None and len(parts) == 1:
        return f"{owner}.{parts[0]}"
    if first in imported:
        return ".".join([imported[first], *parts])
    if not parts and first not in BLOCKING:
        return f"{module}.{first}"
    return ".".join([first, *parts])


def _imports(tree: ast.Module) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names
