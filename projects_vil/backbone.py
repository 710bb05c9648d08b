"""The backbones as detectron2 knows them: bottom-up maps, and FPN over them for Mask R-CNN and RetinaNet."""

from collections.abc import Sequence

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling.backbone import BACKBONE_REGISTRY, FPN, Backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool, LastLevelP6P7
from torch import Tensor

from backbones import InputError, create_backbone


class TransformerBackbone(Backbone):
    """A backbone of :mod:`backbones` behind detectron2's interface.

    Args:
        name: a variant.
        out_features: stages to return.
        freeze_at: number of stages, from the first, that are not trained.
        options: keywords of :func:`backbones.create_backbone`, which checks them.
    """

    def __init__(self, name: str, *, out_features: Sequence[str], freeze_at: int = 0, **options) -> None:
        super().__init__()
        self.net = create_backbone(name, out_features=tuple(out_features), **options)
        if not 0 <= freeze_at <= len(self.net.stages):
            raise InputError(f"MODEL.BACKBONE.FREEZE_AT is {freeze_at}: {name} has {len(self.net.stages)} stages")
        self.net.freeze_stages(freeze_at)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """(B, 3, H, W) -> {stage: (B, C, ceil(H / stride), ceil(W / stride))}."""
        return self.net(images)

    def output_shape(self) -> dict[str, ShapeSpec]:
        return {
            name: ShapeSpec(channels=info.channels, stride=info.stride)
            for name, info in self.net.feature_info.items()
        }

    @property
    def size_divisibility(self) -> int:
        """FPN adds maps of neighbouring strides, so that the image must be a multiple of the largest one."""
        return max(info.stride for info in self.net.feature_info.values())


def build_transformer_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> TransformerBackbone:
    """The bottom-up part that ``MODEL.TRANSFORMER`` describes."""
    if input_shape.channels != 3:
        raise InputError(f"the backbones take 3 channels, and MODEL.PIXEL_MEAN has {input_shape.channels} values")
    node = cfg.MODEL.TRANSFORMER
    out_features = list(node.OUT_FEATURES) or list(cfg.MODEL.FPN.IN_FEATURES)
    for name in cfg.MODEL.FPN.IN_FEATURES:
        if name not in out_features:
            raise InputError(f"MODEL.FPN.IN_FEATURES has {name}, which MODEL.TRANSFORMER.OUT_FEATURES lacks")
    return TransformerBackbone(
        node.NAME,
        out_features=out_features,
        freeze_at=cfg.MODEL.BACKBONE.FREEZE_AT,
        drop_path_rate=node.DROP_PATH,
        max_img_size=node.MAX_IMG_SIZE,
        activation_checkpointing=node.ACTIVATION_CHECKPOINTING,
        attention_backend=node.ATTENTION_BACKEND,
        attention_mode=node.ATTENTION_MODE,
        global_tokens=list(node.GLOBAL_TOKENS) or None,
        window_size=list(node.WINDOW_SIZE) or None,
        shared_projections=node.SHARED_PROJECTIONS,
    )


@BACKBONE_REGISTRY.register()
def build_transformer_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """FPN with a pooled last level, P2 to P6 from stages 1 to 4: for Mask R-CNN."""
    return _fpn(cfg, build_transformer_backbone(cfg, input_shape), LastLevelMaxPool())


@BACKBONE_REGISTRY.register()
def build_retinanet_transformer_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """FPN with two convolutions on the last stage's map, P3 to P7 from stages 2 to 4: for RetinaNet."""
    bottom_up = build_transformer_backbone(cfg, input_shape)
    last = cfg.MODEL.FPN.IN_FEATURES[-1]
    top_block = LastLevelP6P7(bottom_up.output_shape()[last].channels, cfg.MODEL.FPN.OUT_CHANNELS, last)
    return _fpn(cfg, bottom_up, top_block)


def _fpn(cfg: CfgNode, bottom_up: TransformerBackbone, top_block) -> FPN:
    return FPN(
        bottom_up=bottom_up,
        in_features=cfg.MODEL.FPN.IN_FEATURES,
        out_channels=cfg.MODEL.FPN.OUT_CHANNELS,
        norm=cfg.MODEL.FPN.NORM,
        top_block=top_block,
        fuse_type=cfg.MODEL.FPN.FUSE_TYPE,
    )
