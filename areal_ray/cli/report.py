"""`areal-ray report`: a run's report as a web page, written or served."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from areal_ray.cli.command import command, refuse


def add(commands: argparse._SubParsersAction) -> None:
    parser = command(
        commands,
        "report",
        _report,
        summary="write a run's report, one web page, or serve it live",
        description=(
            "Write one self-contained HTML page about a run, finished or going on: rewards, "
            "staleness, throughput, where the time of every actor went, weight updates, failures, "
            "and samples to read. The page needs no network."
        ),
        examples=(
            "areal-ray report runs/arithmetic",
            "areal-ray report runs/arithmetic --serve --port 8000",
        ),
        exit_codes={0: "done", 1: "failed", 2: "refused: RUN is no run's directory"},
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, as runs/NAME")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument(
        "--out", metavar="FILE", type=Path, help="where to write it (default: RUN/report.html)"
    )
    ways.add_argument(
        "--serve",
        action="store_true",
        help="write nothing: serve it at a local address, kept up to date, until Ctrl-C",
    )
    parser.add_argument(
        "--port", metavar="N", type=int, default=0, help="for --serve (default: a free one)"
    )


def _report(options: argparse.Namespace) -> int:
    from areal_ray.observability.report import write_report

    if options.serve:
        return _serve(options.run, options.port)
    if options.port:
        return refuse(ValueError("--port: only read with --serve"))
    print(f"areal-ray: {write_report(options.run, options.out)}")
    return 0


def _serve(run: Path, port: int) -> int:
    from areal_ray.observability.report import LiveReport
    from areal_ray.observability.report.data import check_is_run

    check_is_run(run)
    live = LiveReport(run, port=port)
    print(f"areal-ray: serving {run} at {live.start()} until Ctrl-C", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        live.close()
    return 0
