"""The trainer of YAML configs and LazyConfigs, its hooks, and the launch of its processes."""

from projects_vil.engine.checks import check_output_dir, check_setup, check_values, saved_config
from projects_vil.engine.lazy import load_records, run_lazy_config
from projects_vil.engine.trainer import Trainer
