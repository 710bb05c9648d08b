"""Detectors with efficient vision transformers: train, evaluate, predict and export.

Example:
    vil train photos --output output/mine
    vil predict output/mine holiday.jpg
"""

import inspect
import sys
from importlib.metadata import version

from backbones.errors import closest
from vil.arguments import ConfigToolParser, ToolParser, run_tool
from vil.choices import NAMES_OF_OTHERS
from vil.commands import COMMANDS

# Titles in the list of commands, and the command below each.
_TITLES = {"check": "Your photos", "analyze": "Models and checkpoints", "examples": "Setup and examples"}


def main(command: str | None = None) -> None:
    """Run ``command``, or the command in the first argument."""
    run_tool(lambda: _main([command, *sys.argv[1:]] if command else sys.argv[1:]))


def _main(words: list[str]) -> None:
    if words and words[0] in ("help", "version"):
        words = [*words[1:], f"--{words[0]}"]
    if words and words[0] in COMMANDS:
        run, options = COMMANDS[words[0]]
        make = ToolParser if options is None else ConfigToolParser
        run(make(inspect.getdoc(run), prog=f"vil {words[0]}", **(options or {})), words[1:])
        return
    width, listed = max(map(len, COMMANDS)), [__doc__ + "\nvil COMMAND --help lists the arguments of a command."]
    for name, (run, _) in COMMANDS.items():
        listed += [f"\n{_TITLES[name]}:"] if name in _TITLES else []
        listed.append(f"    {name.ljust(width)}  {str(inspect.getdoc(run)).splitlines()[0]}")
    description = "\n".join(listed)
    parser = ToolParser(description, prog="vil", usage="vil COMMAND ...")
    parser.add_argument("--version", action="version", version=version("vil-detectron2"))
    if words and not words[0].startswith("-"):
        parser.error(f"unknown command '{words[0]}'{closest(NAMES_OF_OTHERS.get(words[0], words[0]), COMMANDS)}")
    parser.parse_args(words or ["--help"])
