"""What the commands share: how one is made known, its help, and the config that some take."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_ray.config import Config

EXIT_CODES = {0: "done", 1: "failed", 2: "refused: a bad command line or config"}
WIDTH = 78


def command(
    commands: argparse._SubParsersAction,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    description: str,
    examples: Sequence[str],
    exit_codes: Mapping[int, str] = EXIT_CODES,
) -> argparse.ArgumentParser:
    """A new command, to which the caller adds arguments; `run` gets them, and returns an exit code.

    What `run` raises is dealt with in `main`: a refusal ends with 2, another error with 1.
    """
    parser = commands.add_parser(
        name,
        help=summary,
        description="\n\n".join(textwrap.fill(part, WIDTH) for part in description.split("\n\n")),
        epilog=_epilog(examples, exit_codes),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run)
    return parser


def add_config(parser: argparse.ArgumentParser) -> None:
    """The arguments `CONFIG [key=value …]`, which `config_of` reads."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="change a key of the config"
    )


def config_of(options: argparse.Namespace) -> Config:
    """The config that was asked for, checked. Raises `ConfigError`."""
    from areal_ray.config import check
    from areal_ray.config_file import load

    config = load(options.config, options.overrides)
    check(config)
    return config


def refuse(error: Exception) -> int:
    print(f"areal-ray: {error}", file=sys.stderr)
    return 2


def _epilog(examples: Sequence[str], exit_codes: Mapping[int, str]) -> str:
    lines = ["examples:" if len(examples) > 1 else "example:"]
    lines += [f"  {example}" for example in examples]
    lines += ["", "exit codes:"]
    for code, meaning in exit_codes.items():
        lines += textwrap.wrap(
            meaning, WIDTH, initial_indent=f"  {code:<5}", subsequent_indent=" " * 7
        )
    return "\n".join(lines)
