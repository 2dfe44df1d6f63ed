"""A plan as a person reads it: the nodes and actors, then each figure with how it came about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_ray.planning.figures import Chapter

if TYPE_CHECKING:
    from areal_ray.config import Config
    from areal_ray.placement.overview import NodeLoad, Overview


def show(
    config: Config, placed: Overview, chapters: Sequence[Chapter], console: Console | None = None
) -> None:
    console = console or Console(highlight=False)
    what = "GPUs" if placed.device == "cuda" else "CPUs"
    console.print(Text.assemble("\n", (config.name, "bold"), f"  on {what}, nothing started\n"))
    console.print(_placement(placed))
    console.print(_verdict(placed))
    console.print()
    console.print(_actors(placed))
    figures = [figure for chapter in chapters for figure in chapter.figures]
    name_width = max(len(figure.name) for figure in figures)
    value_width = max(len(figure.text) for figure in figures)
    for chapter in chapters:
        console.print()
        console.print(_chapter(chapter, name_width, value_width))
    console.print()
    console.print(
        Text(
            "Memory comes on top for activations, the CUDA context, and the libraries of each "
            "process: about 1 GB where torch or vLLM is loaded.",
            "dim",
        )
    )


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold cyan", box=None, pad_edge=False,
        padding=(0, 2, 0, 0), header_style="dim",
    )  # fmt: skip


def _placement(placed: Overview) -> Table:
    table = _table("Where")
    has_gpus = placed.device == "cuda"
    table.add_column("")
    if has_gpus:
        table.add_column("GPUs", justify="right")
    table.add_column("CPUs", justify="right")
    table.add_column("who")
    for load in placed.nodes:
        is_left = load.node is None
        style = "red" if is_left else ("dim" if not load.seats else "")
        name = "no room for" if is_left else f"node {load.node}"
        gpus = [_gpus(load)] if has_gpus else []
        table.add_row(name, *gpus, f"{load.cpus_used:g}", _seats(load), style=style)
    return table


def _gpus(load: NodeLoad) -> str:
    return str(load.gpus_used) if load.gpus is None else f"{load.gpus_used} of {load.gpus}"


def _seats(load: NodeLoad) -> str:
    names = {"trainer": "trainer rank", "engine": "engine"}
    return ", ".join(
        f"{count} {names[role]}{'s' if count > 1 else ''}" for role, count in load.seats.items()
    )


def _verdict(placed: Overview) -> Text:
    needed = f"{placed.cpus:g} CPUs in all"
    if placed.gpus:
        needed = f"{placed.gpus} GPUs and {needed}"
    if placed.fits:
        return Text(f"✓ {needed}: it fits, if each node has these CPUs", "green")
    return Text(f"✗ {needed}: it does not fit on these nodes", "red bold")


def _actors(placed: Overview) -> Table:
    table = _table("Actors")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("GPUs each", justify="right")
    table.add_column("CPUs each", justify="right")
    table.add_column("", style="dim")
    for one in placed.actors:
        gpus = str(one.gpus) if one.gpus else "-"
        cpus = f"{one.cpus:g}" if one.cpus else "-"
        table.add_row(one.actor, f"× {one.count}", gpus, cpus, one.note)
    return table


def _chapter(chapter: Chapter, name_width: int, value_width: int) -> Table:
    table = _table(chapter.title)
    table.show_header = False
    table.add_column(width=name_width)
    table.add_column(width=value_width, justify="right")
    table.add_column(style="dim", overflow="fold")
    for figure in chapter.figures:
        style = "bold" if figure.name == "in all" else ""
        value_style = "yellow" if figure.value is None else style
        table.add_row(Text(figure.name, style), Text(figure.text, value_style), figure.how)
    return table
