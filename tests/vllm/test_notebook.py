"""The notebook, executed by a kernel as its user would: it shows what it says, leaves nothing."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import EXAMPLES, MarkedProcesses
from tests.vllm.training import wait_until_empty

NOTEBOOK = EXAMPLES / "compose_actors.ipynb"
TITLE = "ray::"
"""How the name of an actor's process begins."""
ACTORS = (
    "CheckpointEngineManager",
    "GenerationActor",
    "RolloutController",
    "RolloutWorker",
    "RunMonitor",
    "TrainerActor",
    "TrajectoryQueue",
)
"""What a bench is made of; of engines there are two at first."""


class Executed:
    """A copy of the notebook, run up to its last cell, which closes the bench; then the cell that
    opens it once more; then the kernel is shut down with the bench open."""

    def __init__(self, directory: Path, marked: MarkedProcesses) -> None:
        self.notebook = nbformat.read(NOTEBOOK, as_version=4)
        for name in ("arithmetic.py", "arithmetic.yaml"):
            (directory / name).write_bytes((EXAMPLES / name).read_bytes())
        environment = {k: v for k, v in marked.environment.items() if k != "RAY_ADDRESS"}
        client = NotebookClient(
            self.notebook,
            timeout=240,
            kernel_name="python3",
            resources={"metadata": {"path": str(directory)}},
        )
        with client.setup_kernel(env=environment):
            for cell in self.notebook.cells:
                if cell.cell_type == "code" and cell.id != "close":
                    client.execute_cell(cell, self.notebook.cells.index(cell))
            self.actors_once = actors(marked)
            self._open_again(client)
            self.actors_again = actors(marked)
        self.left = wait_until_empty(marked.alive)

    def _open_again(self, client: NotebookClient) -> None:
        # The supervised phase has been seen, and so has a pool of two.
        quick = (
            "from msgspec.structs import replace\n"
            "config = replace(\n"
            "    config,\n"
            "    warmup=type(config.warmup)(),\n"
            "    generation=replace(config.generation, engines=1),\n"
            ")"
        )
        # Plain code may hold the kernel's loop, and need not hear of it.
        hold = "import time\ntime.sleep(1.5)"
        for source in (hold, quick, self.cell("open").source):
            self.notebook.cells.append(nbformat.v4.new_code_cell(source))
            client.execute_cell(self.notebook.cells[-1], len(self.notebook.cells) - 1)

    def cell(self, name: str) -> nbformat.NotebookNode:
        return next(cell for cell in self.notebook.cells if cell.id == name)

    def shown(self, name: str, kind: str = "text/plain") -> str:
        """The last thing that a cell shows."""
        return self.cell(name).outputs[-1].data[kind]


def actors(marked: MarkedProcesses) -> dict[int, str]:
    """By process: the class of each, whatever it does at the moment. Not Ray's own processes."""
    titled = {
        pid: re.match(r"\w+", command.removeprefix(TITLE))
        for pid, command in marked.alive().items()
        if command.startswith(TITLE)
    }
    return {pid: found[0] for pid, found in titled.items() if found and found[0] in ACTORS}


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executed]:
    marked = MarkedProcesses(f"notebook-{os.getpid()}")
    try:
        yield Executed(tmp_path_factory.mktemp("notebook"), marked)
    finally:
        marked.kill()


def test_the_pool_answers_and_the_reward_and_workflow_of_cells_are_used(
    executed: Executed,
) -> None:
    assert len(re.findall(r"'\d*'", executed.shown("ask"))) == 4
    rewards = [float(reward) for reward in re.findall(r", ([\d.]+)\)", executed.shown("group"))]
    assert len(rewards) == 8
    assert {round(reward * 12) for reward in rewards} <= {0, 3, 4, 6, 8, 9, 12}  # n/3 or n/4
    assert "<eos>" not in executed.shown("group", "text/html")  # escaped
    assert "&lt;eos&gt;" in executed.shown("group", "text/html")


def test_an_error_in_a_cell_s_reward_is_told_with_its_line(executed: Executed) -> None:
    (told,) = executed.cell("failure").outputs
    assert "the reward function raised" in told.text
    assert re.search(r"Cell In\[\d+\], line 5, in careless\n +return float\(", told.text)
    assert "has no attribute 'anwser'" in told.text


def test_a_step_leaves_the_engines_where_they_are_until_they_are_updated(
    executed: Executed,
) -> None:
    assert "StepRecord(step=1, version=0" in executed.shown("step")
    assert "version 1: 1 ahead of the engines" in executed.shown("ahead", "text/html")
    assert "Outcome(version=1, engines=2" in executed.shown("update")
    assert "version 1" in executed.shown("again", "text/html")


def test_training_learns_and_is_drawn(executed: Executed) -> None:
    before, after = (
        float(re.search(r"reward=([\d.]+)", executed.shown(name))[1])
        for name in ("before", "evaluate")
    )
    assert after > before + 0.1
    assert "version=15" in executed.shown("evaluate")
    assert base64.b64decode(executed.shown("plot", "image/png")).startswith(b"\x89PNG")


def test_cells_show_nothing_but_what_they_are_for(executed: Executed) -> None:
    for cell in executed.notebook.cells:
        for output in cell.get("outputs", ()):
            assert output.output_type != "error", output
            assert output.output_type != "stream" or cell.id == "failure", output


def test_opening_again_replaces_every_actor_and_the_kernel_s_end_leaves_none(
    executed: Executed,
) -> None:
    assert sorted(executed.actors_once.values()) == sorted([*ACTORS, "GenerationActor"])
    assert sorted(executed.actors_again.values()) == sorted(ACTORS)
    assert executed.actors_once.keys().isdisjoint(executed.actors_again)
    assert executed.left == {}


def test_the_notebook_in_the_repository_is_one_that_was_executed() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        assert cell.get("execution_count", 1) is not None
        shown = nbformat.v4.writes(nbformat.v4.new_notebook(cells=[cell]))
        assert not re.search(r"/(home|root|tmp|work|usr)/", shown), cell.id
