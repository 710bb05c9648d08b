"""Training and evaluation from the command line."""

from projects_vil.engine.checks import check_setup
from projects_vil.engine.defaults import Trainer
from projects_vil.engine.launch import train_from_command_line

__all__ = [
    "Trainer",
    "check_setup",
    "train_from_command_line",
]
