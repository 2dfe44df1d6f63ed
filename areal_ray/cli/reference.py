"""`areal-ray reference`: every key of the configuration, with its type, default and meaning."""

from __future__ import annotations

import argparse

from areal_ray.cli.command import command


def add(commands: argparse._SubParsersAction) -> None:
    parser = command(
        commands,
        "reference",
        _run,
        summary="tell what each key of a config means",
        description="Print every key of the configuration, or those of a section, as Markdown.",
        examples=["areal-ray reference trainer.lora", "areal-ray reference > docs/config.md"],
        exit_codes={0: "done", 2: "refused: there is no such key"},
    )
    parser.add_argument("key", metavar="KEY", nargs="?", default="", help="a key or a section")


def _run(options: argparse.Namespace) -> int:
    from areal_ray.config_reference import reference

    print(reference(options.key), end="")
    return 0
