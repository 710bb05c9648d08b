"""The backbones, FPN over them and models of a config; importing this registers the builders of detectron2."""

import contextlib
import functools
import logging
import math
import re
import traceback
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
import torchvision  # noqa: F401  its operators are in every exported detector
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_model
from detectron2.modeling.backbone import BACKBONE_REGISTRY, FPN, Backbone
from fvcore.nn.weight_init import c2_xavier_fill
from torch import Tensor, nn

from backbones import ConfigError, create_backbone
from backbones.backbone import ATTENTION_BACKENDS
from backbones.build import OPTIONS, get_variant
from backbones.errors import check_choice
from projects_vil.config import config_items, with_overrides
from projects_vil.modeling.timm_backbone import TIMM_PREFIX, TIMM_STAGES, TimmBackbone

_logger = logging.getLogger(__name__)
# The parts of a detector that may compute in 16 bits: all but the last layers and the mask head, which post-processing
# follows that compares scores and pastes masks by their coordinates.
_SIXTEEN_BIT = r"backbone|head\.(cls|bbox)_subnet|proposal_generator\.rpn_head\.conv|roi_heads\.box_head(\.\d+)?"
# Sides of images in pixels, and images in a batch, that exported programs take.
MIN_EXPORT_SIDE, MAX_EXPORT_SIDE, LARGEST_BATCH = 32, 8192, 1024


class TransformerBackbone(Backbone):
    """A backbone of :mod:`backbones` with detectron2's interface.

    Args:
        name: a variant.
        out_features: stages to return.
        freeze_at: number of stages, from the first, that are not trained.
        options: keywords of :func:`backbones.create_backbone`, which checks them.
    """

    def __init__(self, name: str, *, out_features: Sequence[str], freeze_at: int = 0, **options) -> None:
        super().__init__()
        self.variant = name
        # For the conversion of official weights.
        self.options = {"out_features": tuple(out_features), **options}
        self.net = create_backbone(name, **self.options)
        if not 0 <= freeze_at <= len(self.net.stages):
            raise ConfigError(f"MODEL.BACKBONE.FREEZE_AT is {freeze_at}: {name} has {len(self.net.stages)} stages")
        self.net.freeze_stages(freeze_at)

    @property
    def variant_options(self) -> dict[str, object]:
        """Return the options that differ from the variant's."""
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
        """The largest stride: FPN adds features of neighbouring levels, whose sizes must be multiples."""
        return max(info.stride for info in self.net.feature_info.values())


def stage_names(name: str) -> tuple[str, ...]:
    """Return the names of the stages of a variant, or of a model of timm.

    Raises:
        ConfigError: for an unknown variant.
    """
    return tuple(TIMM_STAGES) if name.startswith(TIMM_PREFIX) else get_variant(name).stage_names


def build_transformer_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> TransformerBackbone | TimmBackbone:
    """Build the bottom-up backbone of ``MODEL.TRANSFORMER``, which may be a model of timm."""
    node, in_features = cfg.MODEL.TRANSFORMER, list(cfg.MODEL.FPN.IN_FEATURES)
    out_features = list(node.OUT_FEATURES) or in_features
    with _naming("MODEL.TRANSFORMER.VARIANT"):
        stages = stage_names(node.VARIANT)
    for key, names, available in (
        ("MODEL.TRANSFORMER.OUT_FEATURES", node.OUT_FEATURES, stages),
        ("MODEL.FPN.IN_FEATURES", in_features, [name for name in out_features if name in stages]),
    ):
        unknown = [name for name in names if name not in available]
        if unknown:
            raise ConfigError(f"{key} has {unknown[0]}: {node.VARIANT} returns {', '.join(available)}")
    if not in_features:
        raise ConfigError("MODEL.FPN.IN_FEATURES is empty: name the stages that feed FPN")
    check_choice("MODEL.TRANSFORMER.ATTENTION_BACKEND", node.ATTENTION_BACKEND, ATTENTION_BACKENDS)
    is_timm = node.VARIANT.startswith(TIMM_PREFIX)
    with _naming("MODEL.TRANSFORMER"):
        backbone = (TimmBackbone if is_timm else TransformerBackbone)(
            node.VARIANT,
            out_features=out_features,
            freeze_at=cfg.MODEL.BACKBONE.FREEZE_AT,
            drop_path_rate=node.DROP_PATH,
            max_img_size=None if is_timm else node.MAX_IMG_SIZE,
            activation_checkpointing=node.ACTIVATION_CHECKPOINTING,
            attention_backend=node.ATTENTION_BACKEND,
            attention=list(node.ATTENTION) or None,
            attention_mode=node.ATTENTION_MODE or None,
            global_tokens=list(node.GLOBAL_TOKENS) or None,
            chunk_size=list(node.CHUNK_SIZE) or None,
            projection_rank=list(node.PROJECTION_RANK) or None,
            shared_projections=node.SHARED_PROJECTIONS,
            token_merging=node.TOKEN_MERGING or None,
            norm=node.NORM or None,
            position_interpolation=node.POSITION_INTERPOLATION or None,
        )
    if node.COMPILE:
        _logger.info("MODEL.TRANSFORMER.COMPILE: the first call of the backbone compiles it, which takes minutes")
        # In place, at its first call: names of parameters stay, and copies are not compiled.
        backbone.net.compile(dynamic=True)
    return backbone


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """Name ``key`` in errors that name no key themselves."""
    try:
        yield
    except ConfigError as error:
        raise error if str(error).startswith("MODEL.") else ConfigError(f"{key}: {error}") from error


class LastLevelConvs(nn.Module):
    """FPN's levels beyond its last feature map, each by a 3 x 3 convolution with stride 2 on the one before.

    Two levels on features of stride 32 are, with ``relu``, detectron2's ``LastLevelP6P7``, with its names and initial
    values.

    Args:
        in_channels: channels of ``in_feature``.
        out_channels: channels of the levels.
        in_feature: a bottom-up feature or a level of FPN.
        levels: numbers of the levels by convolution; may be empty.
        pooled: whether one more level is pooled from the last, as Mask R-CNN's P6.
        relu: whether a ReLU is between two levels.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_feature: str,
        levels: Sequence[int],
        *,
        pooled: bool = False,
        relu: bool = True,
    ) -> None:
        super().__init__()
        self.in_feature = in_feature
        self.pooled = pooled
        self.relu = relu
        self.num_levels = len(levels) + pooled
        self.names = [f"p{level}" for level in levels]
        for name in self.names:
            layer = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=2, padding=1)
            c2_xavier_fill(layer)
            self.add_module(name, layer)
            in_channels = out_channels

    def forward(self, features: Tensor) -> list[Tensor]:
        """(B, C_in, H, W) -> the levels (B, C, H / 2, W / 2), (B, C, H / 4, W / 4), ..., rounded up."""
        levels: list[Tensor] = []
        with _in_float32(features) as inputs:
            for name in self.names:
                before = levels[-1] if levels else inputs
                levels.append(self.get_submodule(name)(F.relu(before) if levels and self.relu else before))
        # detectron2 pools regions of levels with one dtype.
        levels = [level.to(features.dtype) if inputs is not features else level for level in levels]
        if self.pooled:
            levels.append(F.max_pool2d(levels[-1] if levels else features, kernel_size=1, stride=2))
        return levels


@contextlib.contextmanager
def _in_float32(features: Tensor) -> Iterator[Tensor]:
    """Switch CPU autocast off: in bfloat16 the filters' gradient for 1 x 1 features is uninitialised memory."""
    if features.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            yield features.float()
    else:
        yield features


@BACKBONE_REGISTRY.register()
def build_transformer_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """Build FPN with a pooled last level, P2 to P6 from stages 1 to 4: for Mask R-CNN.

    Where the last stage has stride 16 (CvT), P5 is a convolution with stride 2 on P4.
    """
    bottom_up = build_transformer_backbone(cfg, input_shape)
    level, channels = _last_level(cfg, bottom_up), cfg.MODEL.FPN.OUT_CHANNELS
    return _fpn(cfg, bottom_up, LastLevelConvs(channels, channels, f"p{level}", range(level + 1, 6), pooled=True))


@BACKBONE_REGISTRY.register()
def build_retinanet_transformer_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """Build FPN with two convolutions on the last stage's features, P3 to P7 from stages 2 to 4: for RetinaNet.

    Where the last stage has stride 16 (CvT), P5 is a convolution on its features too.
    """
    bottom_up = build_transformer_backbone(cfg, input_shape)
    last, level = cfg.MODEL.FPN.IN_FEATURES[-1], _last_level(cfg, bottom_up)
    channels = bottom_up.output_shape()[last].channels
    levels, node = range(level + 1, 8), cfg.MODEL.FPN
    return _fpn(cfg, bottom_up, LastLevelConvs(channels, node.OUT_CHANNELS, last, levels, relu=node.P7_RELU))


def _last_level(cfg: CfgNode, bottom_up: Backbone) -> int:
    """Return 5 if FPN's last bottom-up feature has stride 32, 4 for 16; check the strides."""
    in_features = list(cfg.MODEL.FPN.IN_FEATURES)
    strides = [bottom_up.output_shape()[name].stride for name in in_features]
    if strides != [strides[0] * 2**index for index in range(len(strides))] or strides[-1] not in (16, 32):
        raise ConfigError(f"MODEL.FPN.IN_FEATURES have strides {strides}: they must double up to 16 or 32")
    return int(math.log2(strides[-1]))


def _fpn(cfg: CfgNode, bottom_up: Backbone, top_block: nn.Module) -> FPN:
    in_features, node = cfg.MODEL.FPN.IN_FEATURES, cfg.MODEL.FPN
    options = {"norm": node.NORM, "top_block": top_block, "fuse_type": node.FUSE_TYPE}
    fpn = PaddedFPN(bottom_up=bottom_up, in_features=in_features, out_channels=node.OUT_CHANNELS, **options)
    levels = list(fpn.output_shape())
    heads = {
        "RetinaNet": ("RETINANET",),
        "GeneralizedRCNN": ("RPN", "ROI_HEADS"),
        "PanopticFPN": ("RPN", "ROI_HEADS", "SEM_SEG_HEAD"),
        "SemanticSegmentor": ("SEM_SEG_HEAD",),
    }
    for head in heads.get(cfg.MODEL.META_ARCHITECTURE, ()):
        unknown = [name for name in cfg.MODEL[head].IN_FEATURES if name not in levels]
        if unknown:
            made = f"FPN makes {', '.join(levels)} of MODEL.FPN.IN_FEATURES {list(in_features)}"
            raise ConfigError(f"MODEL.{head}.IN_FEATURES has {unknown[0]}, and {made}")
    return fpn


class PaddedFPN(FPN):
    """detectron2's FPN; images are padded to multiples of 32 also where P5 comes from features of stride 16."""

    @property
    def size_divisibility(self) -> int:
        return max(super().size_divisibility, 32)


# -- models of a config, and the sizes of images that they take --------------------------------------


def build_on_meta(cfg: CfgNode) -> nn.Module:
    """Build the model of ``cfg`` on the meta device.

    Raises:
        ConfigError: if a key has a value with which it cannot be built.
    """
    cfg = with_overrides(cfg, {"MODEL.DEVICE": "meta"})
    try:
        with torch.device("meta"):
            return build_model(cfg)
    except ConfigError:
        raise
    except (AssertionError, IndexError, KeyError, ValueError) as error:
        # detectron2's registries raise a KeyError with the name that a key has.
        strings = [(key, value) for key, value in config_items(cfg) if isinstance(value, str)]
        keys = [f"{key} is {value!r}" for key, value in strings if f"'{value}'" in str(error)]
        what = " and ".join(keys) or " ".join(str(error).split())
        if isinstance(error, AssertionError):
            # The code of detectron2's assertions names the keys, and not all have a message.
            code = traceback.extract_tb(error.__traceback__)[-1].line
            what = " ".join([what, code.rstrip("\\( ,")]).strip()
        raise ConfigError(f"the model cannot be built from this config: {what} ({type(error).__name__})") from error


def stage_channels(name: str, stage: str) -> int:
    """Return the channels of a stage of a variant or of a model of timm, for the layers of a LazyConfig that follow it.

    Raises:
        ConfigError: for an unknown variant or stage.
    """
    with torch.device("meta"):
        if name.startswith(TIMM_PREFIX):
            return TimmBackbone(name, out_features=(stage,)).output_shape()[stage].channels
        return create_backbone(name, out_features=(stage,)).feature_info[stage].channels


def export_sides(detector: nn.Module) -> tuple[int, int]:
    """Return the shortest and the longest side, in pixels, of images that an exported detector takes.

    Absolute positions limit the longest one. In models of timm a map of 1 x 1 token may lie in memory as one of another
    layout, and programs are not for both.
    """
    shortest = MIN_EXPORT_SIDE + any(isinstance(module, TimmBackbone) for module in detector.modules())
    return shortest, max_input_side(detector) or MAX_EXPORT_SIDE


def max_input_side(detector: nn.Module) -> int | None:
    """Return the longest side of images, in pixels, that absolute positions allow; None if there is no limit."""
    has_tables = any(getattr(module, "resizing", None) == "once" for module in detector.modules())
    return detector.backbone.bottom_up.options["max_img_size"] if has_tables else None


@contextlib.contextmanager
def autocast_detector(dtype: torch.dtype, detector: nn.Module) -> Iterator[None]:
    """Compute a detector's backbone and the layers of its heads but the last by autocast, and the rest in float32."""
    parts = [part for name, part in detector.named_modules() if re.fullmatch(_SIXTEEN_BIT, name)]
    with contextlib.ExitStack() as stack:
        for part in parts if dtype != torch.float32 else ():
            part.forward = functools.partial(_in_dtype, part.forward, dtype)
            stack.callback(delattr, part, "forward")
        yield


def _in_dtype(forward: Callable, dtype: torch.dtype, x: Tensor) -> Tensor | dict[str, Tensor]:
    with torch.autocast(x.device.type, dtype):
        outputs = forward(x)
    return {name: y.float() for name, y in outputs.items()} if isinstance(outputs, dict) else outputs.float()
