"""The configuration keys of this project, and how a config file is read."""

from projects_vil.config.defaults import add_vil_config
from projects_vil.config.load import (
    CONFIG_FILE,
    DETECTORS,
    check_device,
    check_override_effects,
    choose_device,
    default_config,
    detector_name,
    is_panoptic,
    is_point_rend,
    is_segmentor,
    load_config,
    number_of_classes,
    one_line,
)

__all__ = [
    "CONFIG_FILE",
    "DETECTORS",
    "add_vil_config",
    "check_device",
    "check_override_effects",
    "choose_device",
    "default_config",
    "detector_name",
    "is_panoptic",
    "is_point_rend",
    "is_segmentor",
    "load_config",
    "number_of_classes",
    "one_line",
]
