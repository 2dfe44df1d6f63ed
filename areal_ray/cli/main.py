"""The `areal-ray` command.

Each command is a module here with an `add`, which makes it known to the parser. Exit codes: 0 done,
1 failed, 2 refused (bad command line or config), 130 or 143 stopped by a signal.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from areal_ray import __version__
from areal_ray.cli import (
    completion,
    control,
    dashboard,
    doctor,
    plan,
    reference,
    report,
    status,
    trace,
    train,
)
from areal_ray.cli.command import refuse
from areal_ray.errors import REFUSALS, ArealRayError, described

COMMANDS = (train, plan, reference, doctor, dashboard, status, control, trace, report, completion)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = _parsed(parser, arguments)
    try:
        return options.command(options)
    except REFUSALS as error:
        return refuse(error)
    except ArealRayError as error:
        print(f"areal-ray: {described(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output wants no more of it; nor must the interpreter's last flush fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal-ray",
        description="Asynchronous reinforcement learning of language models on Ray.",
        epilog="`areal-ray COMMAND --help` tells more, with examples.",
        usage="areal-ray [-h] [--version] COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"areal-ray {__version__}")
    # So wide that every command's name has its summary on the same line.
    commands = parser.add_subparsers(title="commands", required=True, metavar=f"{'COMMAND':<12}")
    for module in COMMANDS:
        module.add(commands)
    return parser


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes no positional arguments behind an option: `train a.yaml --resume steps=50`."""
    options, rest = parser.parse_known_args(arguments)
    takes_more = hasattr(options, "overrides")
    if unknown := [one for one in rest if one.startswith("-") or not takes_more]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if takes_more:
        options.overrides += rest
    return options
