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
from vil.commands import COMMANDS


def main(command: str | None = None) -> None:
    """Run ``command``, or the command in the first argument."""
    run_tool(lambda: _main([command, *sys.argv[1:]] if command else sys.argv[1:]))


def _main(words: list[str]) -> None:
    if words and words[0] in COMMANDS:
        run, options = COMMANDS[words[0]]
        make = ToolParser if options is None else ConfigToolParser
        run(make(inspect.getdoc(run), prog=f"vil {words[0]}", **(options or {})), words[1:])
        return
    purposes = {name: str(inspect.getdoc(run)).splitlines()[0] for name, (run, _) in COMMANDS.items()}
    width = max(map(len, purposes))
    listed = [f"    {name.ljust(width)}  {purpose}" for name, purpose in purposes.items()]
    description = "\n".join([__doc__, "Commands (vil COMMAND --help lists the arguments):", *listed])
    parser = ToolParser(description, prog="vil", usage="vil COMMAND ...")
    parser.add_argument("--version", action="version", version=version("vil-detectron2"))
    if words and not words[0].startswith("-"):
        parser.error(f"unknown command '{words[0]}'{closest(words[0], COMMANDS)}")
    parser.parse_args(words or ["--help"])


if __name__ == "__main__":
    main()
