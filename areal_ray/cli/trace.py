"""`areal-ray trace`: what all actors of a running run have just done, as one file."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from areal_ray.cli.command import command
from areal_ray.cli.running import add_run, asked, the_monitor_of


def add(commands: argparse._SubParsersAction) -> None:
    parser = command(
        commands,
        "trace",
        _run,
        summary="write down what all actors of a running run have just done",
        description=(
            "Write a Chrome trace of the last seconds of a run, across all its actors: generation, "
            "rewards, waits in the queue, training, staging and commits of weights. Every process "
            "remembers its last 20,000 spans, so the trace shows what led up to this moment. It "
            "opens in ui.perfetto.dev or chrome://tracing. (When a run ends it leaves one, "
            "trace.json, by itself.)"
        ),
        examples=["areal-ray trace runs/arithmetic --last 30 --out slow.json"],
        exit_codes={0: "done", 1: "the run does not answer", 2: "refused: there is no such run"},
    )
    add_run(parser)
    parser.add_argument(
        "--last", metavar="SECONDS", type=float, default=60.0, help="how much (default: 60)"
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("trace.json"), help="default: trace.json"
    )


def _run(options: argparse.Namespace) -> int:
    from areal_ray.observability.chrome_trace import write_trace

    with the_monitor_of(options.run) as monitor:
        actors = asked(lambda: monitor.spans.remote(time.time() - options.last))
    write_trace(options.out, actors)
    spans = sum(len(actor.spans) for actor in actors)
    print(f"areal-ray: {spans} spans of {len(actors)} processes in {options.out}")
    return 0
