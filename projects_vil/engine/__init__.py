"""The trainer of YAML configs and LazyConfigs, its hooks, and how its processes are launched."""

from projects_vil.engine.checks import check_setup, check_values
from projects_vil.engine.launch import ProcessEnded
from projects_vil.engine.lazy import (
    build_lazy_optimizer,
    lazy_options,
    lazy_trainer,
    load_lazy_config,
    load_records,
    train_lazily_from_command_line,
)
from projects_vil.engine.train import train_from_command_line
from projects_vil.engine.trainer import Trainer

__all__ = [
    "ProcessEnded",
    "Trainer",
    "build_lazy_optimizer",
    "check_setup",
    "check_values",
    "lazy_options",
    "lazy_trainer",
    "load_lazy_config",
    "load_records",
    "train_from_command_line",
    "train_lazily_from_command_line",
]
