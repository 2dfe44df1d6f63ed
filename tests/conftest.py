from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium import webdriver

REPO = Path(__file__).parents[1]
EXAMPLES = REPO / "examples"


def pytest_collection_finish() -> None:
    """With a core that is busy otherwise, torch's threads wait for each other most of the time:
    one is up to fifty times as fast. Of this process alone: actors and runs are as they are."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "ray_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.actors)


@pytest.fixture(scope="session")
def arithmetic() -> ModuleType:
    """examples/arithmetic.py as a module."""
    spec = importlib.util.spec_from_file_location("arithmetic", EXAMPLES / "arithmetic.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_model(arithmetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with its random weights."""
    directory = tmp_path_factory.mktemp("tiny_model")
    arithmetic.tiny_qwen(directory)
    return directory


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray cluster as `areal-ray train` starts one, with room for pools to grow."""
    import ray

    from areal_ray.config_file import from_mapping
    from areal_ray.placement import connect

    cluster = connect(from_mapping({"name": "tests", "generation": {"engines": 8}}))
    yield
    cluster.leave()
    assert not ray.is_initialized()


BROWSER_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """A real one, without a screen. No longer than it is needed: its connections come and go, and
    other tests count what this process has open."""
    from selenium import webdriver

    paths = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    assert all(paths.values()), f"not installed: {paths}; `make browser` sees to it"
    options = webdriver.ChromeOptions()
    options.binary_location = paths["chromium"]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for flag in (*BROWSER_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    chrome = webdriver.Chrome(options, webdriver.ChromeService(paths["chromedriver"]))
    chrome.set_page_load_timeout(60)
    yield chrome
    chrome.quit()


class MarkedProcesses:
    """Finds every process that descends from one started with `environment`, by its marker."""

    def __init__(self, marker: str) -> None:
        self.environment = {**os.environ, "AREAL_RAY_TEST_MARKER": marker}
        self._wanted = f"AREAL_RAY_TEST_MARKER={marker}".encode()

    def alive(self) -> dict[int, str]:
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if self._wanted in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found[int(entry.name)] = command.strip()
            except (OSError, ValueError):
                continue
        return found

    def named(self, prefix: str) -> list[int]:
        return [pid for pid, command in self.alive().items() if command.startswith(prefix)]

    def listening(self) -> set[str]:
        """The addresses, in the kernel's hexadecimal, that these processes listen on."""
        sockets = set()
        for pid in self.alive():
            for handle in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(handle))
        addresses = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    addresses.add(fields[1].partition(":")[0])
        return addresses

    def kill(self) -> None:
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def marked_processes(request: pytest.FixtureRequest) -> Iterator[MarkedProcesses]:
    marked = MarkedProcesses(f"{request.node.name}-{os.getpid()}")
    yield marked
    marked.kill()
