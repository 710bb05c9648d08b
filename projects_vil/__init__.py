"""The backbones in detectron2: importing this package registers their builders."""

from projects_vil import backbone as _backbone  # noqa: F401  (registers the builders)
from projects_vil.config import add_vil_config, load_config

__all__ = ["add_vil_config", "load_config"]
