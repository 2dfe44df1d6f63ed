"""How `areal-ray status` shows a run."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_ray.observability.actor_report import (
    ControllerFacts,
    EngineFacts,
    QueueFacts,
    TrainerFacts,
    WorkerFacts,
)
from areal_ray.observability.run_status import ActorStatus, RunStatus
from areal_ray.observability.terminal import (
    SPARKLINE_STEPS,
    clock,
    milliseconds,
    sparkline,
    time_left,
)

SILENT_S = 8.0
"""Who has told nothing for so long is marked."""
SHOWN_EVENTS = 6
STYLES = {
    "busy": "green",
    "waiting for data": "yellow",
    "waiting for weights": "magenta",
    "paused": "cyan",
    "resting": "blue",
    "saving": "blue",
    "restarting": "red",
    "idle": "dim",
}


def status_view(status: RunStatus, *, now: float | None = None) -> RenderableType:
    now = time.time() if now is None else now
    parts: list[RenderableType] = [_progress(status)]
    parts += [Text(), _actors(status)]
    if status.events:
        parts += [Text(), _events(status, now)]
    return Panel(
        Group(*parts),
        title=f"[bold]areal_ray[/]  {status.name}",
        subtitle=f"{status.phase} · {clock(now - status.began)}",
        border_style="cyan",
    )


def _progress(status: RunStatus) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", justify="right")
    rows.add_column()
    record = status.step
    if record is None:
        rows.add_row("phase", status.phase)
        return rows
    done = Table.grid(padding=(0, 1))
    done.add_row(
        ProgressBar(total=status.steps, completed=record.step, width=32),
        f"{record.step}/{status.steps}",
        f"{time_left(record, status.steps)} left",
    )
    rows.add_row("step", done)
    spark = sparkline(status.rewards[-SPARKLINE_STEPS:])
    rows.add_row("reward", Text.assemble((f"{record.reward:.3f}  ", "bold"), (spark, "green")))
    if status.first_evaluation is not None and status.last_evaluation is not None:
        first, last = status.first_evaluation, status.last_evaluation
        rows.add_row(
            "held-out", f"{first.reward:.3f} → {last.reward:.3f}  (version {last.version})"
        )
    rows.add_row(
        "staleness", f"{record.staleness_mean:.1f} on average, {record.staleness_max} at most"
    )
    rows.add_row(
        "weights",
        f"version {record.version}: staged in {milliseconds(record.staged_s)}, "
        f"pause {milliseconds(record.pause_s)}",
    )
    return rows


def _actors(status: RunStatus) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("actor")
    table.add_column("does")
    table.add_column("tokens/s", justify="right")
    table.add_column("loop p99", justify="right")
    for actor in sorted(status.actors, key=lambda one: (not one.shares, one.report.who)):
        if actor.report.who == "run":
            continue
        silent = actor.age_s > SILENT_S
        pace = f"{actor.tokens_per_s:,.0f}" if isinstance(actor.report.facts, EngineFacts) else ""
        table.add_row(
            Text(actor.report.who, style="red" if silent else ""),
            Text(f"silent for {clock(actor.age_s)}", style="red") if silent else _doing(actor),
            pace,
            f"{actor.report.loop_p99_ms:.0f} ms",
        )
    return table


def _doing(actor: ActorStatus) -> Text:
    text = Text()
    for activity, share in sorted(actor.shares.items(), key=lambda one: -one[1]):
        if share >= 0.005:
            text.append(f"{activity} {share:.0%}  ", style=STYLES[activity])
    match actor.report.facts:
        case EngineFacts(version=version, requests=requests):
            text.append(f"v{version}, {requests} requests", style="dim")
        case TrainerFacts(version=version):
            text.append(f"v{version}", style="dim")
        case WorkerFacts(groups=groups):
            text.append(f"{groups} groups")
        case QueueFacts(groups=groups, nbytes=nbytes):
            text.append(f"{groups} groups, {nbytes / 1e6:.1f} MB")
        case ControllerFacts() as facts:
            _append_ledger(text, facts)
        case _:
            text.append(actor.report.shown, style="dim")
    return text


def _append_ledger(text: Text, facts: ControllerFacts) -> None:
    if facts.is_paused:
        text.append("paused  ", style="cyan")
    counts = facts.ledger
    text.append(f"{counts.running} groups run, {counts.accepted} accepted")
    for name in ("filtered", "failed", "expired"):
        if count := getattr(counts, name):
            text.append(f", {count} {name}", style="yellow")


def _events(status: RunStatus, now: float) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="ellipsis", no_wrap=True)
    for event in status.events[-SHOWN_EVENTS:]:
        style = "red" if event.level == "error" else "yellow"
        table.add_row(f"{clock(now - event.at)} ago", Text(event.who, style=style), event.text)
    return table
