"""The backbones as detectron2 knows them."""

from collections.abc import Callable, Sequence
from typing import Any

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling.backbone import Backbone
from torch import Tensor

from backbones import InputError, create_backbone
from backbones.variants import OPTIONS, get_variant, stage_names


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
        self.variant = name
        # What official weights must be converted for.
        self.options = {"out_features": tuple(out_features), **options}
        self.net = create_backbone(name, **self.options)
        if not 0 <= freeze_at <= len(self.net.stages):
            raise InputError(f"MODEL.BACKBONE.FREEZE_AT is {freeze_at}: {name} has {len(self.net.stages)} stages")
        self.net.freeze_stages(freeze_at)

    @property
    def variant_options(self) -> dict[str, object]:
        """What is set in place of the variant's own."""
        return {key: value for key, value in self.options.items() if key in OPTIONS and value is not None}

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """(B, 3, H, W) -> {stage: (B, C, ceil(H / stride), ceil(W / stride))}."""
        return self.net(images)

    def output_shape(self) -> dict[str, ShapeSpec]:
        return {
            name: ShapeSpec(channels=info.channels, stride=info.stride) for name, info in self.net.feature_info.items()
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
    variant = _of_config(get_variant, node.NAME, key="MODEL.TRANSFORMER.NAME")
    stages = stage_names(variant)
    for name in out_features:
        if name not in stages:
            key = "MODEL.TRANSFORMER.OUT_FEATURES" if node.OUT_FEATURES else "MODEL.FPN.IN_FEATURES"
            raise InputError(f"{key} has {name}, and {node.NAME} has {', '.join(stages)}")
    for name in cfg.MODEL.FPN.IN_FEATURES:
        if name not in out_features:
            raise InputError(f"MODEL.FPN.IN_FEATURES has {name}, which MODEL.TRANSFORMER.OUT_FEATURES lacks")
    if not out_features:
        raise InputError("MODEL.FPN.IN_FEATURES is empty: name the stages that feed FPN")
    return _of_config(
        TransformerBackbone,
        node.NAME,
        out_features=out_features,
        freeze_at=cfg.MODEL.BACKBONE.FREEZE_AT,
        drop_path_rate=node.DROP_PATH,
        max_img_size=node.MAX_IMG_SIZE,
        activation_checkpointing=node.ACTIVATION_CHECKPOINTING,
        attention_backend=node.ATTENTION_BACKEND,
        attention=list(node.ATTENTION) or None,
        attention_mode=node.ATTENTION_MODE or None,
        global_tokens=list(node.GLOBAL_TOKENS) or None,
        window_size=list(node.WINDOW_SIZE) or None,
        rank=list(node.RANK) or None,
        shared_projections=node.SHARED_PROJECTIONS,
        merging=node.MERGING or None,
        batch_norm=node.BATCH_NORM or None,
        position_resizing=node.POSITION_RESIZING or None,
    )


def _of_config(build: Callable[..., Any], *args: Any, key: str = "MODEL.TRANSFORMER", **options: Any) -> Any:
    """What ``build`` returns; what it refuses is told with the ``key`` that it is of, where it names none itself."""
    try:
        return build(*args, **options)
    except InputError as error:
        of_a_key = str(error).startswith("MODEL.")
        raise InputError(str(error) if of_a_key else f"{key}: {error}") from error
