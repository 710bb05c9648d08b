"""FPN over the backbones, for Mask R-CNN and RetinaNet."""

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling.backbone import BACKBONE_REGISTRY, FPN
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from fvcore.nn.weight_init import c2_xavier_fill
from torch import Tensor, nn

from backbones import InputError
from projects_vil.modeling.backbone.transformer import TransformerBackbone, build_transformer_backbone


class CoarserLevels(nn.Module):
    """FPN's levels beyond its last map, each by a 3 x 3 convolution with stride 2 on the one before.

    For two levels on a map of stride 32 it is detectron2's ``LastLevelP6P7``, with its names and initial values.

    Args:
        in_channels: of the map ``in_feature``.
        out_channels: of the levels.
        in_feature: a bottom-up map or a level of FPN.
        first_level: the number of the first new level.
        num_convolutions: levels by convolution.
        pooled: whether one level more is pooled from the last, as Mask R-CNN's P6.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_feature: str,
        *,
        first_level: int,
        num_convolutions: int,
        pooled: bool = False,
    ) -> None:
        super().__init__()
        self.in_feature = in_feature
        self.pooled = pooled
        self.num_levels = num_convolutions + pooled
        self.names = [f"p{first_level + index}" for index in range(num_convolutions)]
        for name in self.names:
            layer = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=2, padding=1)
            c2_xavier_fill(layer)
            self.add_module(name, layer)
            in_channels = out_channels

    def forward(self, maps: Tensor) -> list[Tensor]:
        """(B, C_in, H, W) -> the levels (B, C, H / 2, W / 2), (B, C, H / 4, W / 4), ..., rounded up."""
        levels: list[Tensor] = []
        with _in_float32(maps) as inputs:
            for name in self.names:
                levels.append(self.get_submodule(name)(F.relu(levels[-1]) if levels else inputs))
        # detectron2 pools regions of levels of one type.
        levels = [level.to(maps.dtype) if inputs is not maps else level for level in levels]
        if self.pooled:
            levels.append(F.max_pool2d(levels[-1], kernel_size=1, stride=2))
        return levels


@contextlib.contextmanager
def _in_float32(maps: Tensor) -> Iterator[Tensor]:
    """Where autocast is on, on the CPU: of a 1 x 1 map the gradient of these filters is memory as found in bfloat16."""
    if maps.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            yield maps.float()
    else:
        yield maps


@BACKBONE_REGISTRY.register()
def build_transformer_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """FPN with a pooled last level, P2 to P6 from stages 1 to 4: for Mask R-CNN.

    Where the last stage has stride 16 (CvT), P5 is a convolution with stride 2 on P4.
    """
    bottom_up = build_transformer_backbone(cfg, input_shape)
    level = _last_level(cfg, bottom_up)
    if level == 5:
        return _fpn(cfg, bottom_up, LastLevelMaxPool())
    channels = cfg.MODEL.FPN.OUT_CHANNELS
    top_block = CoarserLevels(
        channels, channels, f"p{level}", first_level=level + 1, num_convolutions=5 - level, pooled=True
    )
    return _fpn(cfg, bottom_up, top_block)


@BACKBONE_REGISTRY.register()
def build_retinanet_transformer_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """FPN with two convolutions on the last stage's map, P3 to P7 from stages 2 to 4: for RetinaNet.

    Where the last stage has stride 16 (CvT), P5 is a convolution on its map too.
    """
    bottom_up = build_transformer_backbone(cfg, input_shape)
    last, level = cfg.MODEL.FPN.IN_FEATURES[-1], _last_level(cfg, bottom_up)
    top_block = CoarserLevels(
        bottom_up.output_shape()[last].channels,
        cfg.MODEL.FPN.OUT_CHANNELS,
        last,
        first_level=level + 1,
        num_convolutions=7 - level,
    )
    return _fpn(cfg, bottom_up, top_block)


def _last_level(cfg: CfgNode, bottom_up: TransformerBackbone) -> int:
    """5 where FPN's last map has a stride of 32, 4 for 16."""
    last = cfg.MODEL.FPN.IN_FEATURES[-1]
    stride = bottom_up.output_shape()[last].stride
    if stride not in (16, 32):
        raise InputError(f"MODEL.FPN.IN_FEATURES ends with {last}, of stride {stride}: the last one has 16 or 32")
    return int(math.log2(stride))


def _fpn(cfg: CfgNode, bottom_up: TransformerBackbone, top_block: nn.Module) -> FPN:
    in_features = cfg.MODEL.FPN.IN_FEATURES
    strides = [bottom_up.output_shape()[name].stride for name in in_features]
    if strides != [strides[0] * 2**index for index in range(len(strides))]:
        raise InputError(
            f"MODEL.FPN.IN_FEATURES is {list(in_features)}, of strides {strides}: each is twice the one before"
        )
    fpn = PaddedFPN(
        bottom_up=bottom_up,
        in_features=in_features,
        out_channels=cfg.MODEL.FPN.OUT_CHANNELS,
        norm=cfg.MODEL.FPN.NORM,
        top_block=top_block,
        fuse_type=cfg.MODEL.FPN.FUSE_TYPE,
    )
    levels = list(fpn.output_shape())
    for key, names in _levels_of_heads(cfg).items():
        for name in names:
            if name not in levels:
                raise InputError(
                    f"{key} has {name}, and FPN makes {', '.join(levels)} of MODEL.FPN.IN_FEATURES {list(in_features)}"
                )
    return fpn


class PaddedFPN(FPN):
    """detectron2's FPN; where P5 comes from a map of stride 16, images are padded to multiples of 32 all the same."""

    @property
    def size_divisibility(self) -> int:
        return max(super().size_divisibility, 32)


def _levels_of_heads(cfg: CfgNode) -> dict[str, list[str]]:
    """The config keys that name levels of FPN, and the names."""
    keys = {
        "RetinaNet": ("RETINANET",),
        "GeneralizedRCNN": ("RPN", "ROI_HEADS"),
        "PanopticFPN": ("RPN", "ROI_HEADS", "SEM_SEG_HEAD"),
        "SemanticSegmentor": ("SEM_SEG_HEAD",),
    }.get(cfg.MODEL.META_ARCHITECTURE, ())
    return {f"MODEL.{key}.IN_FEATURES": list(cfg.MODEL[key].IN_FEATURES) for key in keys}
