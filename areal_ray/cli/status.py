"""`areal-ray status`: a run that is on its way, as it is now, from any shell."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

import msgspec

from areal_ray.cli.command import command
from areal_ray.cli.running import ANSWER_TIMEOUT_S, add_run, asked, the_monitor_of
from areal_ray.deadlines import within

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from rich.console import Console

EVERY_S = 1.0


def add(commands: argparse._SubParsersAction) -> None:
    parser = command(
        commands,
        "status",
        _run,
        summary="look at a run that is on its way",
        description=(
            "Show how a run does: progress, reward, what every engine and the trainer spend their "
            "time with, queue, failures. On a terminal it is drawn anew every second until Ctrl-C "
            "or the run's end."
        ),
        examples=[
            "areal-ray status runs/arithmetic",
            "areal-ray status --once",
            "areal-ray status --json",
        ],
        exit_codes={0: "done", 1: "the run does not answer", 2: "refused: there is no such run"},
    )
    add_run(parser)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--once", action="store_true", help="print it once, and end")
    ways.add_argument("--json", action="store_true", help="print it once, as JSON, for programs")


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from areal_ray.cli.status_view import status_view

    with the_monitor_of(options.run) as monitor:
        console = Console()
        if options.json:
            status = asked(monitor.status.remote)
            print(msgspec.json.format(msgspec.json.encode(status)).decode())
        elif options.once or not console.is_terminal:
            console.print(status_view(asked(monitor.status.remote)))
        else:
            asyncio.run(_watch(monitor, console))
    return 0


async def _watch(monitor: ActorHandle, console: Console) -> None:
    from ray.exceptions import ActorDiedError, ActorUnavailableError
    from rich.live import Live

    from areal_ray.cli.status_view import status_view

    with Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                status = await within(
                    ANSWER_TIMEOUT_S,
                    monitor.status.remote(),
                    who="the run's monitor",
                    doing="answering",
                )
            except ActorUnavailableError:
                pass  # it is being restarted
            except ActorDiedError:
                break
            else:
                live.update(status_view(status), refresh=True)
            await asyncio.sleep(EVERY_S)
    console.print("the run is over")
