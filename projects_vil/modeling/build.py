"""Models of a config."""

from collections.abc import Iterator

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import nn

from backbones import InputError, create_backbone


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
    except KeyError as error:
        # A name that detectron2 looks up: it is all that the error says, or is quoted in it.
        names = [f"{key} is {value!r}" for key, value in _texts(cfg) if f"'{value}'" in str(error)]
        if not names:
            raise InputError(f"the model cannot be built from this config: there is no {error}") from error
        raise InputError(f"{' and '.join(names)}: detectron2 knows nothing of that name") from error
    except (ValueError, IndexError, AssertionError) as error:
        what = " ".join(str(error).split()) or "an assertion failed"
        raise InputError(f"the model cannot be built from this config: {what} ({type(error).__name__})") from error


def _texts(node: CfgNode, parents: str = "") -> Iterator[tuple[str, str]]:
    """The keys whose values are texts, and these."""
    for key, value in node.items():
        if isinstance(value, CfgNode):
            yield from _texts(value, f"{parents}{key}.")
        elif isinstance(value, str):
            yield f"{parents}{key}", value


def stage_channels(name: str, stage: str) -> int:
    """The channels of a variant's stage, for the layers of a LazyConfig that follow it.

    Raises:
        InputError: for an unknown variant or stage.
    """
    with torch.device("meta"):
        return create_backbone(name, out_features=(stage,)).feature_info[stage].channels
