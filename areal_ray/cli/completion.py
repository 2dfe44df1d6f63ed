"""`areal-ray completion`: a script for the shell, made from the commands and the config's keys.

The script knows everything by itself: nothing is started when a key is pressed.
"""

from __future__ import annotations

import argparse

import msgspec

from areal_ray.cli.command import command

SHELLS = ("bash", "zsh", "fish")
FILES, DIRECTORIES, CONFIGS, OVERRIDES, NOTHING = "files", "dirs", "configs", "overrides", "nothing"
"""What an argument can be completed with, besides words of its own."""
BY_METAVAR = {
    "CONFIG": CONFIGS,
    "key=value": OVERRIDES,
    "RUN": DIRECTORIES,
    "DIR": DIRECTORIES,
    "FILE": FILES,
}


class Argument(msgspec.Struct, frozen=True):
    flags: tuple[str, ...]
    """None for one that is known by its place."""
    takes: str
    """What comes behind a flag, or stands in this place."""
    choices: tuple[str, ...]
    help: str


class Command(msgspec.Struct, frozen=True):
    name: str
    help: str
    arguments: tuple[Argument, ...]

    @property
    def options(self) -> list[Argument]:
        return [one for one in self.arguments if one.flags]

    @property
    def places(self) -> list[Argument]:
        return [one for one in self.arguments if not one.flags]


def add(commands: argparse._SubParsersAction) -> None:
    completion = command(
        commands,
        "completion",
        _run,
        summary="print a script that completes areal-ray in a shell",
        description=(
            "Print a script that completes commands, options, .yaml files, and the config's keys "
            "with their values: `trainer.lr_s` and the tab key give `trainer.lr_schedule=`, once "
            "more its values. Make it anew after an update of areal_ray."
        ),
        examples=[
            "areal-ray completion bash > ~/.local/share/bash-completion/completions/areal-ray",
            "areal-ray completion zsh > ~/.zfunc/_areal-ray     # a folder of $fpath",
            "areal-ray completion fish > ~/.config/fish/completions/areal-ray.fish",
        ],
    )
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def _run(options: argparse.Namespace) -> int:
    from areal_ray.cli.completion_scripts import SCRIPTS
    from areal_ray.cli.main import make_parser

    print(SCRIPTS[options.shell](commands_of(make_parser()), values_by_key()), end="")
    return 0


def commands_of(parser: argparse.ArgumentParser) -> list[Command]:
    """As argparse knows them, which has no public way to ask."""
    (added,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    summaries = {one.dest: one.help or "" for one in added._choices_actions}
    return [
        Command(name, summaries[name], tuple(_argument(action) for action in inner._actions))
        for name, inner in added.choices.items()
    ]


def values_by_key() -> dict[str, tuple[str, ...]]:
    """The config's keys, with the values that can be listed: also names of algorithms."""
    from areal_ray.algorithms import ADVANTAGES, POLICY_LOSSES, REDUCTIONS
    from areal_ray.config_keys import config_keys

    values = {key.path: key.values for key in config_keys()}
    registered = {
        "algorithm.advantage": ADVANTAGES,
        "algorithm.loss": POLICY_LOSSES,
        "algorithm.reduction": REDUCTIONS,
    }
    return values | {key: tuple(registry) for key, registry in registered.items()}


def _argument(action: argparse.Action) -> Argument:
    takes_one = action.nargs != 0
    return Argument(
        flags=tuple(action.option_strings),
        takes=BY_METAVAR.get(str(action.metavar), "value") if takes_one else NOTHING,
        choices=tuple(action.choices or ()),
        help=action.help or "",
    )
