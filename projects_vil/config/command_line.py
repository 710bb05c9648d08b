"""How a tool is told its config: one file, overrides and short forms, the same on every tool.

Overrides are pairs of a key and a value, bare or after ``--opts``, and arguments stand in any place, also after them.
"""

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode

from backbones import InputError
from projects_vil.config.device import DEVICES, check_device, check_device_name, choose_device
from projects_vil.config.load import default_config, load_config
from projects_vil.utils import ToolParser

# Arguments that stand for a key.
SHORT_FORMS = {"weights": "MODEL.WEIGHTS", "device": "MODEL.DEVICE"}


class ConfigToolParser(ToolParser):
    """The parser of a tool that takes config keys: ``KEY VALUE`` pairs, bare or after ``--opts``, in any place.

    ``args.opts`` has all pairs after parsing, those of ``--weights`` and ``--device`` among them: they are short forms
    of ``MODEL.WEIGHTS`` and ``MODEL.DEVICE``. A tool of this kind has no positional arguments of its own.

    Args:
        description: the tool's docstring, with an example.
        config_file: whether ``--config-file FILE`` is added.
        config_required: whether it must be given.
        weights: whether ``--weights FILE`` is added.
        devices: kinds of device that the tool can run a model on; ``--device`` is added where there is any.
        parents: parsers whose arguments it takes too.
    """

    def __init__(
        self,
        description: str | None,
        *,
        config_file: bool = True,
        config_required: bool = True,
        weights: bool = False,
        devices: Sequence[str] = DEVICES,
        parents: Sequence[argparse.ArgumentParser] = (),
    ) -> None:
        super().__init__(description, parents=parents)
        self.devices = tuple(devices)
        if config_file:
            self.add_argument("--config-file", required=config_required, metavar="FILE", help="config of the model")
        if weights:
            self.add_argument("--weights", metavar="FILE", help="short for MODEL.WEIGHTS: checkpoint or exported model")
        if devices:
            self.add_argument("--device", metavar="DEVICE", help=f"short for MODEL.DEVICE: {' or '.join(devices)}")
        self.add_argument("--opts", nargs="+", metavar="KEY VALUE", help="the same overrides, behind a word")
        # For --help alone: parse_args takes them itself. detectron2's parser has brought its own along.
        if not any(action.dest == "opts" and not action.option_strings for action in self._actions):
            self.add_argument("opts", nargs="*")
        for action in self._actions:
            if action.dest == "opts" and not action.option_strings:
                action.metavar = "KEY VALUE"
                action.help = "overrides of config keys; arguments may stand before or after them"

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:
        """As argparse's.

        Raises:
            InputError: for an override without a value, a short form that says another thing than its key, or a
                device that is not here.
        """
        arguments, overrides = self._split(sys.argv[1:] if args is None else args)
        parsed = super().parse_args(arguments, namespace)
        said = dict(zip(overrides[::2], overrides[1::2], strict=False))
        for name, key in SHORT_FORMS.items():
            value = getattr(parsed, name, None)
            if value is None:
                continue
            if said.get(key, value) != value:
                raise InputError(f"--{name} {value} and {key} {said[key]} are one thing, said twice: leave one out")
            if name == "device":
                check_device_name("--device", value, kinds=self.devices, instead="use --device cpu")
            overrides += [key, value]
        parsed.opts = overrides
        parsed.devices = self.devices
        return parsed

    def _split(self, tokens: Sequence[str]) -> tuple[list[str], list[str]]:
        """The tool's own arguments, and keys and values."""
        arguments: list[str] = []
        overrides: list[str] = []
        left = deque(tokens)
        while left:
            token = left.popleft()
            if token in ("--opts", "--"):
                continue
            if token.startswith("-"):
                arguments.append(token)
                action = None if "=" in token else self._action_of(token)
                for _ in range(self._number_of_values(action, left)):
                    arguments.append(left.popleft())
                continue
            overrides.append(token)
            if left and self._action_of(left[0]) is not None:
                raise InputError(f"the override {token} has no value: {left[0]} follows it")
            if left:
                overrides.append(left.popleft())
        return arguments, overrides

    def _number_of_values(self, action: argparse.Action | None, left: Sequence[str]) -> int:
        """How many of the words that follow an argument are its own."""
        if action is None:
            return 0
        wanted = {None: 1, "?": 1, "*": len(left), "+": len(left)}.get(action.nargs, action.nargs)
        for number, token in enumerate(left):
            is_list = action.nargs == "*" or (action.nargs == "+" and number)
            if number == wanted or token == "--" or self._action_of(token) or (is_list and _is_key(token)):
                return number
        return min(wanted, len(left))

    def _action_of(self, token: str) -> argparse.Action | None:
        """The argument that a word names, in full or by its unmistakable beginning."""
        name = token.partition("=")[0]
        if not name.startswith("--") or name == "--":
            return self._option_string_actions.get(name)
        if name in self._option_string_actions:
            return self._option_string_actions[name]
        actions = [action for full, action in self._option_string_actions.items() if full.startswith(name)]
        return actions[0] if len(actions) == 1 else None


def config_of(args: argparse.Namespace) -> CfgNode:
    """The config that a tool was told, on a device that is here: its own, or the CPU where that is a GPU and there is
    none. The log says which, unless the tool knows one kind only.

    Args:
        args: of a :class:`ConfigToolParser` with ``--config-file``.

    Raises:
        InputError: as :func:`load_config`, and for a device asked for that is not here, or not for this tool.
    """
    cfg = load_config(args.config_file, args.opts)
    is_asked_for = SHORT_FORMS["device"] in args.opts[::2]
    if is_asked_for:
        check_device(cfg, kinds=args.devices)
    return choose_device(cfg, kinds=args.devices, is_asked_for=is_asked_for) if args.devices else cfg


def _is_key(token: str) -> bool:
    """Whether a word in a list of files is a config key: it begins as one, and no file has that name."""
    return token.partition(".")[0] in default_config() and not Path(token).exists()
