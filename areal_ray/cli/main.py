"""The `areal-ray` command.

Exit codes: 0 done, 1 failed, 2 refused (bad command line or config), 130 or 143 stopped by a
signal, with the model saved.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal_ray import __version__
from areal_ray.checkpoints import LATEST
from areal_ray.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    PluginError,
    described,
)

if TYPE_CHECKING:
    from areal_ray.config import Config

REFUSALS = (CheckpointError, ConfigError, DataError, ModelError, PluginError)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes no positional arguments behind an option: `train a.yaml --resume steps=50`.
    if unknown := [one for one in rest if one.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides += rest
    return options.command(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal-ray",
        description="Asynchronous reinforcement learning of language models on Ray.",
    )
    parser.add_argument("--version", action="version", version=f"areal-ray {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a model as a config says",
        description="Train a model. Joins the cluster at RAY_ADDRESS, or starts a local one.",
        epilog="example: areal-ray train examples/arithmetic.yaml steps=50 trainer.lr=1e-4",
    )
    train.add_argument("config", metavar="CONFIG", help="a YAML file")
    train.add_argument(
        "overrides", metavar="key=value", nargs="*", help="change a key of the config"
    )
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
    train.set_defaults(command=_train)
    return parser


def _train(options: argparse.Namespace) -> int:
    from areal_ray.config import check
    from areal_ray.config_file import load

    try:
        config = load(options.config, options.overrides)
        check(config)
    except ConfigError as error:
        return refuse(error)
    return train_and_report(config, resume=options.resume)


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
        print(f"\nareal-ray: the run failed: {described(error)}", file=sys.stderr)
        return 1
    print(result.summary())
    return result.exit_code


def refuse(error: Exception) -> int:
    print(f"areal-ray: {error}", file=sys.stderr)
    return 2
