"""The model of a config, and the image sizes that it takes."""

import traceback

import torch
import torchvision  # noqa: F401  its operators are in every exported detector
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import nn

from backbones import ConfigError, create_backbone
from projects_vil.config import config_items, updated

# Sides of images in pixels, and images in a batch, that exported programs take.
MIN_EXPORT_SIDE, MAX_EXPORT_SIDE, LARGEST_BATCH = 32, 8192, 1024


def build_on_meta(cfg: CfgNode) -> nn.Module:
    """Build the model of ``cfg`` on the meta device.

    Raises:
        ConfigError: if a key has a value with which it cannot be built.
    """
    cfg = updated(cfg, {"MODEL.DEVICE": "meta"})
    try:
        with torch.device("meta"):
            return build_model(cfg)
    except ConfigError:
        raise
    except (AssertionError, IndexError, KeyError, ValueError) as error:
        # detectron2's registries raise a KeyError with the name that a key has.
        strings = [(key, value) for key, value in config_items(cfg) if isinstance(value, str)]
        keys = [f"{key} is {value!r}" for key, value in strings if f"'{value}'" in str(error)]
        # The line of code shows the keys of an assertion, most of which have no message.
        is_bare = isinstance(error, AssertionError) and not error.args
        code = traceback.extract_tb(error.__traceback__)[-1].line
        what = code if is_bare else " and ".join(keys) or " ".join(str(error).split())
        raise ConfigError(f"the model cannot be built from this config: {what} ({type(error).__name__})") from error


def stage_channels(name: str, stage: str) -> int:
    """Return the channels of a variant's stage, for the layers of a LazyConfig that follow it.

    Raises:
        ConfigError: for an unknown variant or stage.
    """
    with torch.device("meta"):
        return create_backbone(name, out_features=(stage,)).feature_info[stage].channels


def max_export_side(detector: nn.Module) -> int:
    """Return the longest side, in pixels, of images that an exported detector takes: absolute positions limit it."""
    side = max_input_side(detector)
    return MAX_EXPORT_SIDE if side is None else side


def max_input_side(detector: nn.Module) -> int | None:
    """Return the longest side of images, in pixels, that absolute positions allow; None if there is no limit."""
    has_tables = any(getattr(module, "resizing", None) == "load" for module in detector.modules())
    return detector.backbone.bottom_up.options["max_img_size"] if has_tables else None
