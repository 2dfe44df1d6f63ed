"""What a notebook's cell shows while it is awaited: one line, drawn anew in its place."""

from __future__ import annotations

import linecache
import re
import sys
from typing import TYPE_CHECKING, TypeVar

from areal_ray.errors import ArealRayError
from areal_ray.observability.html import line_html
from areal_ray.observability.records import EvaluationRecord, StepRecord

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

E = TypeVar("E", bound=BaseException)

FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.*)$', re.M)


class CellView:
    """A `View` of one cell. Outside of a notebook it shows nothing."""

    def __init__(self) -> None:
        self._is_shown = _in_notebook()
        self._handle: DisplayHandle | None = None

    def warn(self, text: str) -> None:
        """In a line of its own, which stays."""
        if self._is_shown:
            from IPython.display import HTML, display

            display(HTML(line_html(text)))

    def phase(self, text: str) -> None:
        if not self._is_shown:
            return
        from IPython.display import HTML, display

        line = HTML(line_html(text))
        if self._handle is None:
            self._handle = display(line, display_id=True)
        else:
            self._handle.update(line)

    def step(self, record: StepRecord) -> None:
        self.phase(
            f"step {record.step}: reward {record.reward:.3f}, {record.tokens_per_s:,.0f} tokens/s"
        )

    def evaluation(self, record: EvaluationRecord) -> None:
        self.phase(f"held-out reward {record.reward:.3f} at version {record.version}")

    def close(self) -> None:
        """What comes later is another cell's to show."""
        self._is_shown = False


def _in_notebook() -> bool:
    """Whether this process is a kernel. IPython is there by then: nobody else needs it."""
    return "ipykernel" in sys.modules and sys.modules["IPython"].get_ipython() is not None


def at_cells(error: E) -> E:
    """The same error: where its message has a traceback from another process, which knows no
    cells, lines of cells are told as a notebook tells them."""
    if _in_notebook() and isinstance(error, ArealRayError) and FRAME.search(str(error)):
        error.args = (FRAME.sub(_at_cell, str(error)),)
    return error


def _at_cell(frame: re.Match[str]) -> str:
    compiler = sys.modules["IPython"].get_ipython().compile
    cell = compiler.format_code_name(frame["file"])
    if cell is None:
        return frame[0]
    source = linecache.getline(frame["file"], int(frame["line"])).strip()
    return f"  {' '.join(cell)}, line {frame['line']}, in {frame['function']}\n    {source}"
