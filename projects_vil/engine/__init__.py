"""The trainer of YAML configs and LazyConfigs, its hooks, and how its processes are launched."""

from projects_vil.engine.checks import check_output_dir, check_setup, check_values
from projects_vil.engine.launch import distributed_env
from projects_vil.engine.lazy import load_records, train_lazily_from_command_line
from projects_vil.engine.train import train_from_command_line
from projects_vil.engine.trainer import Trainer
