"""Training and evaluation from the command line."""

from projects_vil.engine.checks import check_setup, check_values
from projects_vil.engine.defaults import Trainer
from projects_vil.engine.launch import train_from_command_line, training_parser
from projects_vil.engine.lazy import (
    build_lazy_optimizer,
    describe_lazy_config,
    lazy_training_parser,
    load_lazy_config,
    load_records,
    train_lazily_from_command_line,
)

__all__ = [
    "Trainer",
    "build_lazy_optimizer",
    "check_setup",
    "check_values",
    "describe_lazy_config",
    "lazy_training_parser",
    "load_lazy_config",
    "load_records",
    "train_from_command_line",
    "train_lazily_from_command_line",
    "training_parser",
]
