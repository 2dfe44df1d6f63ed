"""`areal-ray pause`, `resume` and `resize`: tell a run that is on its way what to do."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from areal_ray.cli.command import command
from areal_ray.cli.running import WHAT_RUN, add_run, asked, the_monitor_of
from areal_ray.commands import Command, Pause, Resize, Resume

EXIT_CODES = {0: "done", 1: "the run could not do it", 2: "refused: there is no such run"}
ANSWER_TIMEOUT_S = 1200.0
"""An engine that joins takes its time to start, and one that leaves finishes what it has."""


def add(commands: argparse._SubParsersAction) -> None:
    pause = command(
        commands,
        "pause",
        partial(_tell, Pause()),
        summary="begin no new rollouts in a running run",
        description=(
            "Begin no new rollouts. Those under way are finished, and trained on as far as they "
            "fill a batch; then everything waits, however long, until `areal-ray resume`."
        ),
        examples=["areal-ray pause runs/arithmetic"],
        exit_codes=EXIT_CODES,
    )
    add_run(pause)
    resume = command(
        commands,
        "resume",
        partial(_tell, Resume()),
        summary="go on after a pause",
        description=(
            "Let a run that was paused go on. (A run that has ended goes on from its last "
            "checkpoint with `areal-ray train CONFIG --resume`.)"
        ),
        examples=["areal-ray resume runs/arithmetic"],
        exit_codes=EXIT_CODES,
    )
    add_run(resume)
    resize = command(
        commands,
        "resize",
        _resize,
        summary="grow or shrink a running run's pool of engines",
        description=(
            "Grow or shrink the pool to so many engines, while it works. A new one takes work once "
            "it has the current weights; one that leaves finishes what it has first. Returns when "
            "all of them serve."
        ),
        examples=["areal-ray resize 4 runs/arithmetic"],
        exit_codes=EXIT_CODES,
    )
    resize.add_argument("engines", metavar="ENGINES", type=int, help="how many there shall be")
    resize.add_argument("run", metavar="RUN", nargs="?", help=WHAT_RUN)


def _resize(options: argparse.Namespace) -> int:
    return _tell(Resize(options.engines), options)


def _tell(order: Command, options: argparse.Namespace) -> int:
    with the_monitor_of(options.run) as monitor:
        answer = asked(lambda: monitor.tell.remote(order), timeout_s=ANSWER_TIMEOUT_S)
    if answer.is_refusal:
        print(f"areal-ray: {answer.text}", file=sys.stderr)
        return 1
    print(f"areal-ray: {answer.text}")
    return 0
