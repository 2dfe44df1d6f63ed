"""What a person sees while a run is on its way: a live panel, or plain lines without a terminal."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_ray.observability.records import EvaluationRecord, StepRecord
from areal_ray.observability.views import View

SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_STEPS = 48


def open_view(name: str, steps: int, console: Console | None = None) -> View:
    console = console or Console()
    if console.is_terminal:
        return LiveView(name, steps, console)
    return PlainView(steps)


class PlainView:
    """One line a step: for logs, jobs and pipes."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._began = time.monotonic()

    def phase(self, text: str) -> None:
        self._say(text)

    def warn(self, text: str) -> None:
        self._say(text)

    def step(self, record: StepRecord) -> None:
        left = time_left(record, self._steps)
        self._say(
            f"step {record.step}/{self._steps}  reward {record.reward:.3f}  "
            f"{record.tokens_per_s:,.0f} tokens/s  staleness {record.staleness_mean:.1f} "
            f"(max {record.staleness_max})  queue {record.queue_groups}  "
            f"pause {milliseconds(record.pause_s)}  left {left}"
        )

    def evaluation(self, record: EvaluationRecord) -> None:
        self._say(
            f"held-out reward {record.reward:.3f} at version {record.version} "
            f"({record.prompts} prompts)"
        )

    def close(self) -> None:
        pass

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)


class LiveView:
    """A panel that is drawn in place."""

    def __init__(self, name: str, steps: int, console: Console) -> None:
        self._name = name
        self._steps = steps
        self._phase = "starting"
        self._rewards: list[float] = []
        self._last: StepRecord | None = None
        self._evaluations: list[EvaluationRecord] = []
        self._began = time.monotonic()
        self._live = Live(
            console=console, get_renderable=self._draw, refresh_per_second=4, transient=False
        )
        self._live.start()

    def phase(self, text: str) -> None:
        self._phase = text

    def warn(self, text: str) -> None:
        self._phase = text

    def step(self, record: StepRecord) -> None:
        self._phase = "training"
        self._last = record
        self._rewards.append(record.reward)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._evaluations.append(record)

    def close(self) -> None:
        self._live.refresh()
        self._live.stop()

    def _draw(self) -> RenderableType:
        elapsed = time.monotonic() - self._began
        title = f"[bold]areal_ray[/]  {self._name}"
        subtitle = f"{self._phase} · {clock(elapsed)}"
        return Panel(self._body(), title=title, subtitle=subtitle, border_style="cyan", width=84)

    def _body(self) -> RenderableType:
        if self._last is None:
            return Text(f"{self._phase} …", style="dim")
        record = self._last
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", justify="right")
        rows.add_column()
        bar = ProgressBar(total=self._steps, completed=record.step, width=40)
        done = Table.grid(padding=(0, 1))
        done.add_row(bar, f"{record.step}/{self._steps}", f"{time_left(record, self._steps)} left")
        rows.add_row("step", done)
        spark = sparkline(self._rewards[-SPARKLINE_STEPS:])
        rows.add_row("reward", Text.assemble((f"{record.reward:.3f}  ", "bold"), (spark, "green")))
        if self._evaluations:
            rows.add_row("held-out", _evaluations(self._evaluations))
        rows.add_row(
            "generation", f"{record.tokens_per_s:,.0f} tokens/s by {record.engines} engines"
        )
        rows.add_row(
            "staleness",
            f"{record.staleness_mean:.1f} versions on average, {record.staleness_max} at most",
        )
        rows.add_row(
            "queue", f"{record.queue_groups} groups waiting; trainer waited {record.waited_s:.2f} s"
        )
        rows.add_row(
            "weights",
            f"version {record.version}: staged in {milliseconds(record.staged_s)}, "
            f"pause {milliseconds(record.pause_s)}",
        )
        if record.groups_failed or record.groups_expired or record.groups_filtered:
            rows.add_row(
                "groups",
                f"{record.groups_failed} failed, {record.groups_expired} expired, "
                f"{record.groups_filtered} filtered",
            )
        return Group(rows)


def _evaluations(evaluations: list[EvaluationRecord]) -> Text:
    first, last = evaluations[0], evaluations[-1]
    text = Text(f"{first.reward:.3f}")
    if last is not first:
        text.append(f" → {last.reward:.3f}", style="bold green")
    return text.append(f"  (greedy, version {last.version})", style="dim")


def sparkline(values: list[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    top = len(SPARKS) - 1
    return "".join(SPARKS[round((value - low) / span * top)] for value in values)


def time_left(record: StepRecord, steps: int) -> str:
    return clock(record.seconds / record.step * (steps - record.step))


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
