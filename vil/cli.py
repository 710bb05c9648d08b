"""Detectors with efficient vision transformers: train, evaluate, predict and export.

Example:
    vil train photos --model vil_tiny --detector retinanet --epochs 50
    vil predict output/photos_vil_tiny_retinanet holiday.jpg
"""

import inspect
import sys
from importlib.metadata import version

from backbones.errors import closest
from vil.arguments import ConfigToolParser, ToolParser, run_tool
from vil.commands import COMMANDS


def main(command: str | None = None) -> None:
    """Run a command: ``command``, or the one that the first argument names."""
    run_tool(lambda: _main([command, *sys.argv[1:]] if command else sys.argv[1:]))


def _main(words: list[str]) -> None:
    if words and words[0] in COMMANDS:
        run, options = COMMANDS[words[0]]
        make = ToolParser if options is None else ConfigToolParser
        run(make(inspect.getdoc(run), prog=f"vil {words[0]}", **(options or {})), words[1:])
        return
    width = max(map(len, COMMANDS))
    listed = [f"    {name.ljust(width)}  {inspect.getdoc(run).splitlines()[0]}" for name, (run, _) in COMMANDS.items()]
    description = "\n".join([__doc__, "Commands, each with its own --help:", *listed])
    parser = ToolParser(description, prog="vil", usage="vil COMMAND ...")
    parser.add_argument("--version", action="version", version=version("vil-detectron2"))
    if words and not words[0].startswith("-"):
        parser.error(f"unknown command {words[0]}{closest(words[0], COMMANDS)}")
    parser.parse_args(words or ["--help"])


if __name__ == "__main__":
    main()
