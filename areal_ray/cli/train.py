"""`areal-ray train`: train a model as a config says."""

from __future__ import annotations

import argparse
import sys
import traceback
from typing import TYPE_CHECKING

from areal_ray.checkpoints import LATEST
from areal_ray.cli.command import add_config, command, config_of, refuse
from areal_ray.errors import REFUSALS, described

if TYPE_CHECKING:
    from areal_ray.config import Config

EXIT_CODES = {
    0: "done",
    1: "failed; the cause is on the last line",
    2: "refused: a bad command line or config. Nothing was started",
    130: "stopped by Ctrl-C, with the model saved (143: by SIGTERM)",
}


def add(commands: argparse._SubParsersAction) -> None:
    train = command(
        commands,
        "train",
        _run,
        summary="train a model as a config says",
        description="Train a model. Joins the cluster at RAY_ADDRESS, or starts a local one.",
        examples=[
            "areal-ray train examples/arithmetic.yaml steps=50 trainer.lr=1e-4",
            "areal-ray train examples/arithmetic.yaml --resume",
        ],
        exit_codes=EXIT_CODES,
    )
    add_config(train)
    resuming = train.add_mutually_exclusive_group()
    resuming.add_argument(
        "--resume",
        action="store_const",
        const=LATEST,
        help="go on from the last whole checkpoint of the runs of this name",
    )
    resuming.add_argument(
        "--resume-from", metavar="DIR", dest="resume", help="go on from this checkpoint"
    )


def _run(options: argparse.Namespace) -> int:
    return train_and_report(config_of(options), resume=options.resume)


def train_and_report(config: Config, *, resume: str | None = None) -> int:
    """Train, say on the last screen how it ended, and return the exit code."""
    from areal_ray.run import train

    try:
        result = train(config, resume=resume)
    except REFUSALS as error:
        return refuse(error)
    except KeyboardInterrupt as stopped:
        print(f"areal-ray: {stopped}", file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001 - whatever it was, it ends on the last screen
        traceback.print_exc()
        cause = described(error)
        print(f"\nareal-ray: the run failed: {cause}", file=sys.stderr)
        first, *more = cause.splitlines()
        if more:  # the last line is what a job's status shows at once
            print(f"areal-ray: the run failed: {first}", file=sys.stderr)
        return 1
    print(result.summary())
    return result.exit_code
