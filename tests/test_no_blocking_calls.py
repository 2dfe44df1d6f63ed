from __future__ import annotations

from pathlib import Path

import pytest
from blocking_calls import find_blocking_calls

REPO = Path(__file__).parents[1]


def test_no_coroutine_of_the_product_makes_a_blocking_call() -> None:
    sources = {}
    for room, package in (
        ("areal_ray", "areal_ray"),
        ("actors", "areal_ray.actors"),
        ("placement", "areal_ray.placement"),
    ):
        for path in sorted((REPO / room).rglob("*.py")):
            inner = path.relative_to(REPO / room).with_suffix("").parts
            name = ".".join([package, *(part for part in inner if part != "__init__")])
            sources[name] = path.read_text()
    assert len(sources) > 40
    assert find_blocking_calls(sources) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import ray\nasync def f(r):\n    return ray.get(r)", ["m:3: ray.get"]),
        ("import time\nasync def f():\n    time.sleep(1)", ["m:3: time.sleep"]),
        ("from time import sleep as nap\nasync def f():\n    nap(1)", ["m:3: time.sleep"]),
        ("import ray as r\nasync def f(x):\n    r.wait([x])", ["m:3: ray.wait"]),
        ("async def f(p):\n    return open(p)", ["m:2: open"]),
        ("async def f(p):\n    p.write_text('x')", ["m:2: p.write_text"]),
        (
            "import ray\nclass A:\n    async def f(self):\n        self._g()\n"
            "    def _g(self):\n        ray.get(1)",
            ["m:4: m.A._g"],
        ),
        (
            "class W:\n    def __init__(self, p):\n        self.f = open(p)\n"
            "async def f(p):\n    return W(p)",
            ["m:5: m.W"],
        ),
        ("import ray\ndef f(r):\n    return ray.get(r)", []),
        ("import asyncio, time\nasync def f():\n    await asyncio.to_thread(time.sleep, 1)", []),
        ("import time\nasync def f():\n    return lambda: time.sleep(1)", []),
    ],
)
def test_the_walker_finds_what_blocks_and_nothing_else(source: str, found: list[str]) -> None:
    assert find_blocking_calls({"m": source}) == found


def test_the_walker_follows_imports_from_module_to_module() -> None:
    sources = {
        "a": "import ray\ndef fetch(r):\n    return ray.get(r)",
        "b": "from a import fetch\nasync def f(r):\n    return fetch(r)",
    }
    assert find_blocking_calls(sources) == ["b:3: a.fetch"]
