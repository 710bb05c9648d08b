"""The backbones in detectron2: importing this package registers their builders."""

from projects_vil.config.defaults import add_vil_config, load_config
from projects_vil.modeling.backbone import transformer as _transformer  # noqa: F401  (registers the builders)

__all__ = ["add_vil_config", "load_config"]
