"""Our backbones and FPN in detectron2. Importing this module registers their builders."""

import contextlib
import functools
import logging
import math
import re
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_model
from detectron2.modeling.backbone import BACKBONE_REGISTRY, FPN, Backbone, SimpleFeaturePyramid
from detectron2.utils.logger import log_first_n
from fvcore.nn.weight_init import c2_xavier_fill
from torch import Tensor, nn

from backbones import ConfigError, create_backbone
from backbones.build import OPTIONS, get_variant
from projects_vil.config import config_items, with_overrides
from projects_vil.modeling.timm_backbone import TIMM_PREFIX, TIMM_STAGES, TimmBackbone, check_freeze_at

_logger = logging.getLogger(__name__)
# The parts of a detector that may run in 16 bits. The last layers and the mask head stay in float32, because
# post-processing compares scores and pastes masks by coordinates.
_AUTOCAST_PARTS = r"backbone|head\.(cls|bbox)_subnet|proposal_generator\.rpn_head\.conv|roi_heads\.box_head(\.\d+)?"
# Limits of exported programs: image sides in pixels, and images per batch.
MIN_EXPORT_SIDE, MAX_EXPORT_SIDE, LARGEST_BATCH = 32, 8192, 1024


class TransformerBackbone(Backbone):
    """A backbone of :mod:`backbones` with detectron2's interface.

    Args:
        name: Variant name.
        out_features: Names of the stages to return.
        freeze_at: Number of frozen stages, counted from the first.
        options: Keyword arguments of :func:`backbones.create_backbone`. A ``drop_path_rate`` of None is the rate of the
            variant.

    Raises:
        ConfigError: For an unknown variant or option.
    """

    def __init__(self, name: str, *, out_features: Sequence[str], freeze_at: int = 0, **options) -> None:
        super().__init__()
        self.variant = name
        if options.get("drop_path_rate", 0.0) is None:
            options["drop_path_rate"] = get_variant(name).drop_path_rate
        # The keywords are used to convert official weights, and checkpoints store the options of the variant.
        self.options = {"out_features": tuple(out_features), **options}
        self.variant_options = {key: value for key, value in options.items() if key in OPTIONS}
        self.net = create_backbone(name, **self.options)
        if freeze_at:
            check_freeze_at(freeze_at, name, len(self.net.variant.stages))
            self.net.freeze_stages(freeze_at)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """(B, 3, H, W) -> {stage: (B, C, ceil(H / stride), ceil(W / stride))}."""
        return self.net(images)

    def output_shape(self) -> dict[str, ShapeSpec]:
        return {name: ShapeSpec(info.channels, stride=info.stride) for name, info in self.net.feature_info.items()}


def stage_names(name: str) -> tuple[str, ...]:
    """Return the stage names of a variant or of a timm model.

    Raises:
        ConfigError: For an unknown variant.
    """
    return tuple(TIMM_STAGES) if name.startswith(TIMM_PREFIX) else get_variant(name).stage_names


def build_transformer_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> TransformerBackbone | TimmBackbone:
    """Build the bottom-up backbone of ``MODEL.TRANSFORMER``.

    Raises:
        ConfigError: For an invalid key of ``MODEL.TRANSFORMER``, or an unknown stage in ``MODEL.FPN.IN_FEATURES``.
    """
    node, backbone_class = cfg.MODEL.TRANSFORMER, TimmBackbone
    # The variant sets empty values.
    options = {key: node[key.upper()] for key in sorted(OPTIONS) if node[key.upper()] not in ("", [], None)}
    if not node.VARIANT.startswith(TIMM_PREFIX):
        backbone_class, options["max_img_size"] = TransformerBackbone, node.MAX_IMG_SIZE
    try:
        backbone = backbone_class(
            node.VARIANT,
            out_features=list(node.OUT_FEATURES or cfg.MODEL.FPN.IN_FEATURES),
            freeze_at=cfg.MODEL.BACKBONE.FREEZE_AT,
            drop_path_rate=node.DROP_PATH,
            activation_checkpointing=node.ACTIVATION_CHECKPOINTING,
            attention_backend=node.ATTENTION_BACKEND,
            **options,
        )
    except ConfigError as error:
        raise ConfigError(f"MODEL.TRANSFORMER: {error}") from error
    if node.COMPILE:
        _logger.info("MODEL.TRANSFORMER.COMPILE: the first call of the backbone compiles it, which takes minutes")
        # In place, at its first call: parameter names stay the same, and copies are not compiled.
        backbone.net.compile(dynamic=True)
    return backbone


class LastLevelConvs(nn.Module):
    """Extra FPN levels, each a 3 x 3 convolution with stride 2 on the level before.

    With two levels on features of stride 32 and ``relu`` it equals detectron2's ``LastLevelP6P7``, including parameter
    names and initial values.

    Args:
        in_channels: Channels of ``in_feature``.
        out_channels: Channels of the new levels.
        in_feature: Name of a bottom-up feature map or of an FPN level.
        levels: Numbers of the new levels; may be empty.
        pooled: Whether to add one more level by pooling the last one, as P6 of Mask R-CNN.
        relu: Whether to apply a ReLU between two levels.
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
        self.names: list[str] = []
        for level in levels:
            layer = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=2, padding=1)
            c2_xavier_fill(layer)
            self.names.append(f"p{level}")
            self.add_module(self.names[-1], layer)
            in_channels = out_channels

    def forward(self, features: Tensor) -> list[Tensor]:
        """(B, C_in, H, W) -> the levels (B, C, H / 2, W / 2), (B, C, H / 4, W / 4), ..., rounded up."""
        levels: list[Tensor] = []
        dtype, autocast = features.dtype, contextlib.nullcontext()
        if features.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            # In bfloat16 the weight gradient for 1 x 1 feature maps is uninitialized memory on the CPU.
            autocast, features = torch.autocast("cpu", enabled=False), features.float()
        with autocast:
            level = features
            for name in self.names:
                level = self.get_submodule(name)(F.relu(level) if levels and self.relu else level)
                levels.append(level)
        if features.dtype != dtype:
            # detectron2 pools regions from levels of one dtype.
            features, levels = features.to(dtype), [level.to(dtype) for level in levels]
        if self.pooled:
            levels.append(F.max_pool2d(levels[-1] if levels else features, kernel_size=1, stride=2))
        return levels


class PaddedFPN(FPN):
    """detectron2's FPN with images padded to multiples of 32, even if P5 comes from features of stride 16."""

    @property
    def size_divisibility(self) -> int:
        return max(super().size_divisibility, 32)


class PlainViTPyramid(SimpleFeaturePyramid):
    """ViTDet's pyramid, with a bottom-up network and a size divisibility that are named as in FPN."""

    def __init__(self, bottom_up: TimmBackbone, *args: Any, **options: Any) -> None:
        super().__init__(bottom_up, *args, **options)
        del self.net
        self.bottom_up = bottom_up

    @property
    def net(self) -> TimmBackbone:
        return self.bottom_up

    @property
    def size_divisibility(self) -> int:
        return self._size_divisibility


@BACKBONE_REGISTRY.register()
def build_transformer_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """Build FPN with levels P2 to P6 from stages 1 to 4, for Mask R-CNN. P6 is pooled.

    If the last stage has stride 16 (CvT), P5 is a convolution with stride 2 on P4.
    """
    return _build_fpn(cfg, build_transformer_backbone(cfg, input_shape), last_level=5)


@BACKBONE_REGISTRY.register()
def build_retinanet_transformer_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """Build FPN with levels P3 to P7 from stages 2 to 4, for RetinaNet. P6 and P7 are convolutions on the last stage.

    If the last stage has stride 16 (CvT), P5 is a convolution on its features too.
    """
    return _build_fpn(cfg, build_transformer_backbone(cfg, input_shape), last_level=7)


def _build_fpn(cfg: CfgNode, bottom_up: Backbone, *, last_level: int) -> FPN:
    """Build FPN and its extra levels, up to ``last_level`` by convolution.

    A plain ViT gets the pyramid of ViTDet instead of FPN. ``MODEL.FPN.IN_FEATURES`` then selects the levels by the
    strides of four-stage models, and RetinaNet's P6 is a convolution on P5.
    """
    node, shapes = cfg.MODEL.FPN, bottom_up.output_shape()
    last, is_plain = node.IN_FEATURES[-1], getattr(bottom_up, "is_plain", False)
    level = int(math.log2(TIMM_STAGES[last] if is_plain else shapes[last].stride))
    levels = range(level + 1, last_level + 1)
    if last_level == 7 and not is_plain:
        top_block = LastLevelConvs(shapes[last].channels, node.OUT_CHANNELS, last, levels, relu=node.P7_RELU)
    else:
        options = {"pooled": last_level == 5, "relu": node.P7_RELU}
        top_block = LastLevelConvs(node.OUT_CHANNELS, node.OUT_CHANNELS, f"p{level}", levels, **options)
    if is_plain:
        [(stage, shape)] = shapes.items()
        scales = [shape.stride / TIMM_STAGES[name] for name in node.IN_FEATURES]
        norm = node.NORM or "LN"
        return PlainViTPyramid(bottom_up, stage, node.OUT_CHANNELS, scales, top_block=top_block, norm=norm)
    options = {"norm": node.NORM, "top_block": top_block, "fuse_type": node.FUSE_TYPE}
    return PaddedFPN(bottom_up=bottom_up, in_features=node.IN_FEATURES, out_channels=node.OUT_CHANNELS, **options)


# -- models of a config, their image sizes and dtypes ----------------------------------------------


def build_on_meta(cfg: CfgNode) -> nn.Module:
    """Build the model of ``cfg`` on the meta device.

    Raises:
        ConfigError: If the model cannot be built because of the value of a key.
    """
    cfg = with_overrides(cfg, {"MODEL.DEVICE": "meta"})
    try:
        with torch.device("meta"):
            return build_model(cfg)
    except ConfigError:
        raise
    except (AssertionError, IndexError, KeyError, ValueError) as error:
        # detectron2's registries raise a KeyError with the value of a key.
        strings = [(key, value) for key, value in config_items(cfg) if isinstance(value, str)]
        keys = [f"{key} is {value!r}" for key, value in strings if f"'{value}'" in str(error)]
        what = " and ".join(keys) or " ".join(str(error).split())
        if isinstance(error, AssertionError):
            # The source line of detectron2's assertion names the key; the message may be empty.
            code = traceback.extract_tb(error.__traceback__)[-1].line
            what = " ".join([what, code.rstrip("\\( ,")]).strip()
        raise ConfigError(f"Cannot build the model: {what} ({type(error).__name__}). Correct the config.") from error


def stage_channels(name: str, stage: str) -> int:
    """Return the channels of a stage of a variant or timm model. LazyConfigs use it for the layers that follow.

    Raises:
        ConfigError: For an unknown variant or stage.
    """
    with torch.device("meta"):
        backbone = (TimmBackbone if name.startswith(TIMM_PREFIX) else TransformerBackbone)(name, out_features=(stage,))
    return backbone.output_shape()[stage].channels


def export_sides(detector: nn.Module) -> tuple[int, int]:
    """Return the shortest and longest image side, in pixels, of an exported detector.

    Absolute positions limit the longest side. For timm models the shortest side is one pixel larger: a feature map of
    1 x 1 may have another memory layout, and an exported program supports only one.
    """
    shortest = MIN_EXPORT_SIDE + any(isinstance(module, TimmBackbone) for module in detector.modules())
    return shortest, max_input_side(detector) or MAX_EXPORT_SIDE


def max_input_side(detector: nn.Module) -> int | None:
    """Return the longest image side, in pixels, that absolute positions allow; None if there is no limit."""
    has_tables = any(getattr(module, "resizing", None) == "once" for module in detector.modules())
    return detector.backbone.bottom_up.options["max_img_size"] if has_tables else None


def amp_dtype(cfg: CfgNode) -> torch.dtype:
    """Return the dtype of ``SOLVER.AMP.DTYPE`` on ``MODEL.DEVICE``, and log the choice of "auto"."""
    name, device = cfg.SOLVER.AMP.DTYPE, cfg.MODEL.DEVICE
    if name == "auto":
        is_old = device.startswith("cuda") and torch.cuda.get_device_capability(device) < (8, 0)
        name = "float16" if is_old else "bfloat16"
        # Every probe of the memory calls this function too.
        log_first_n(logging.INFO, f"Mixed precision: SOLVER.AMP.DTYPE auto is {name}", name=__name__)
    return getattr(torch, name)


def eval_dtype(cfg: CfgNode) -> torch.dtype:
    """Return the dtype of ``INFERENCE.DTYPE``. "auto" is the dtype of training on a GPU, and float32 on a CPU."""
    if cfg.INFERENCE.DTYPE != "auto":
        return getattr(torch, cfg.INFERENCE.DTYPE)
    is_mixed = cfg.SOLVER.AMP.ENABLED and cfg.MODEL.DEVICE.startswith("cuda")
    return amp_dtype(cfg) if is_mixed else torch.float32


@contextlib.contextmanager
def autocast_detector(dtype: torch.dtype, detector: nn.Module) -> Iterator[None]:
    """Run the backbone and all but the last layers of the heads under autocast, and the rest in float32.

    If ``dtype`` is float32, autocast is not used.
    """
    if dtype == torch.float32:
        yield
        return
    with contextlib.ExitStack() as handles:
        for part in [part for name, part in detector.named_modules() if re.fullmatch(_AUTOCAST_PARTS, name)]:
            autocast = torch.autocast(detector.device.type, dtype)
            handles.enter_context(part.register_forward_pre_hook(functools.partial(_enter_autocast, autocast)))
            # Called after an error too, so that autocast does not stay on.
            leave = functools.partial(_exit_autocast, autocast)
            handles.enter_context(part.register_forward_hook(leave, prepend=True, always_call=True))
        yield


def _enter_autocast(autocast: torch.autocast, part: nn.Module, inputs: tuple) -> None:
    autocast.__enter__()


def _exit_autocast(autocast: torch.autocast, part: nn.Module, inputs: tuple, outputs: Any) -> Any:
    """Leave autocast and return the outputs in float32."""
    autocast.__exit__(None, None, None)
    if isinstance(outputs, dict):
        return {name: output.float() for name, output in outputs.items()}
    return outputs if outputs is None else outputs.float()
