"""The configuration keys of this project, and how a config file is read."""

from projects_vil.config.command_line import ConfigToolParser, config_of
from projects_vil.config.defaults import add_vil_config
from projects_vil.config.device import check_device, check_device_name
from projects_vil.config.load import CONFIG_FILE, default_config, load_config, one_line
from projects_vil.config.task import (
    DETECTORS,
    detector_name,
    is_panoptic,
    is_point_rend,
    is_segmentor,
    number_of_classes,
)
from projects_vil.config.typed_keys import check_typed_keys

__all__ = [
    "CONFIG_FILE",
    "DETECTORS",
    "ConfigToolParser",
    "add_vil_config",
    "check_device",
    "check_device_name",
    "check_typed_keys",
    "config_of",
    "default_config",
    "detector_name",
    "is_panoptic",
    "is_point_rend",
    "is_segmentor",
    "load_config",
    "number_of_classes",
    "one_line",
]
