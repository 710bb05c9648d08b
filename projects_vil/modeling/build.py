"""Models of a config."""

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import nn

from backbones import InputError


def build_on_meta(cfg: CfgNode) -> nn.Module:
    """The model of ``cfg`` without memory for its weights.

    Raises:
        InputError: where a key has a value that no part of it can be built with.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "meta"
    try:
        with torch.device("meta"):
            return build_model(cfg)
    except InputError:
        raise
    except (KeyError, ValueError, IndexError, AssertionError) as error:
        what = " ".join(str(error).split()) or "an assertion failed"
        raise InputError(f"the model cannot be built from this config: {what} ({type(error).__name__})") from error
