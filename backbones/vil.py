"""ViL, the Multi-Scale Vision Longformer: stages of efficient attention, each at half the resolution of the last."""

from collections.abc import Mapping, Sequence

from torch import nn

from backbones.attention.dense import DenseAttention
from backbones.attention.global_memory import GlobalMemoryAttention
from backbones.attention.linformer import LinformerAttention
from backbones.attention.long_short import LongShortAttention
from backbones.attention.performer import PerformerAttention
from backbones.attention.sliding_chunk import BACKENDS, MODES, SlidingChunkAttention
from backbones.attention.spatial_reduction import SpatialReductionAttention
from backbones.backbone import Backbone, FeatureInfo, Stage, drop_path_rates, init_linear
from backbones.errors import check_choice
from backbones.layers.block import Block
from backbones.layers.patch_embed import PatchEmbed
from backbones.layers.position import RESIZING, AbsolutePositions
from backbones.variants import ViLStage, ViLVariant


class ViL(Backbone):
    """A multi-scale ViL (section 3.1, equation 1): images in, a map for each asked stage out.

    Args:
        variant: the sizes, and the attention of each stage.
        out_features: names of the stages to return, ``"stage1"`` to ``"stage4"``; None for all. Stages after the last
            one are not built.
        max_img_size: height and width of the largest image in pixels, for tables that are resized when weights are
            loaded.
        position_img_size: the same for tables that are resized to each map; None for the variant's own.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 at the first.
        keep_global_tokens: whether the last stage returns its global tokens too (:meth:`forward_tokens`).
        activation_checkpointing: compute the activations of a block again in the backward pass.
        attention_backend: ``"sdpa"`` or ``"reference"``.

    Raises:
        InputError: for an unknown stage, mode or backend.
    """

    def __init__(
        self,
        variant: ViLVariant,
        *,
        out_features: Sequence[str] | None = None,
        max_img_size: tuple[int, int] = (1333, 1333),
        position_img_size: tuple[int, int] | None = None,
        drop_path_rate: float = 0.0,
        keep_global_tokens: bool = False,
        activation_checkpointing: bool = False,
        attention_backend: str = "sdpa",
    ) -> None:
        strides = [1]
        for spec in variant.stages:
            strides.append(strides[-1] * spec.patch_size)
        features = [FeatureInfo(spec.dim, stride) for spec, stride in zip(variant.stages, strides[1:], strict=True)]
        super().__init__(features, out_features=out_features, drop_path_rate=drop_path_rate)
        check_choice("attention mode", variant.attention_mode, MODES)
        check_choice("attention backend", attention_backend, BACKENDS)
        if position_img_size is None:
            position_img_size = (variant.position_img_size, variant.position_img_size)

        rates = drop_path_rates(drop_path_rate, [spec.depth for spec in variant.stages])
        in_channels = 3
        for index, spec in enumerate(variant.stages[: self.num_stages]):
            keep_globals = keep_global_tokens and index + 1 == self.num_stages
            sizes = {
                "load": _map_size(max_img_size, strides[index + 1], strides[-1]),
                "map": _map_size(position_img_size, strides[index + 1], strides[-1]),
            }
            positions, resizing = None, variant.position_resizing or "load"
            check_choice("position resizing", resizing, RESIZING)
            if not variant.relative_bias:
                positions = AbsolutePositions(
                    spec.dim,
                    max_height=sizes[resizing][0],
                    max_width=sizes[resizing][1],
                    num_global_tokens=spec.global_tokens,
                    resizing=resizing,
                )
            blocks = []
            for number, rate in enumerate(rates[index]):
                attention = _attention(
                    spec,
                    variant,
                    sizes=sizes,
                    update_globals=keep_globals or number + 1 < spec.depth,
                    backend=attention_backend,
                )
                blocks.append(Block(spec.dim, attention, norm_eps=variant.norm_eps, drop_path_rate=rate))
            self.stages.append(
                Stage(
                    PatchEmbed(in_channels, spec.dim, patch_size=spec.patch_size, norm_eps=variant.norm_eps),
                    blocks,
                    dim=spec.dim,
                    num_global_tokens=spec.global_tokens,
                    positions=positions,
                    activation_checkpointing=activation_checkpointing,
                )
            )
            in_channels = spec.dim
        self.apply(init_linear)


def _map_size(img_size: tuple[int, int], stride: int, last_stride: int) -> tuple[int, int]:
    """Height and width in tokens; whole places at the largest stride: 1333 pixels are 42 of 32 and 336 of 4."""
    height, width = (-(-side // last_stride) * last_stride // stride for side in img_size)
    return height, width


def _attention(
    spec: ViLStage,
    variant: ViLVariant,
    *,
    sizes: Mapping[str, tuple[int, int]],
    update_globals: bool,
    backend: str,
) -> nn.Module:
    """The attention that ``spec`` names, of one block; ``sizes`` are those of tables, by the way they are resized."""
    common = {
        "num_heads": spec.heads,
        "num_global_tokens": spec.global_tokens,
        "update_globals": update_globals,
        "backend": backend,
    }
    if spec.attention == "dense":
        resizing = variant.position_resizing or "map"
        bias_size = sizes[resizing] if variant.relative_bias else None
        return DenseAttention(spec.dim, bias_size=bias_size, bias_resizing=resizing, **common)
    if spec.attention == "sliding_chunk":
        return SlidingChunkAttention(
            spec.dim,
            window_size=spec.window_size,
            mode=variant.attention_mode,
            relative_bias=variant.relative_bias,
            shared_projections=variant.shared_projections,
            **common,
        )
    if spec.attention == "long_short":
        return LongShortAttention(
            spec.dim,
            window_size=spec.window_size,
            rank=spec.rank,
            relative_bias=variant.relative_bias,
            **common,
        )
    if spec.attention == "global":
        return GlobalMemoryAttention(spec.dim, **common)
    if spec.attention == "linformer":
        return LinformerAttention(spec.dim, map_size=sizes["load"], num_features=spec.num_features, **common)
    if spec.attention == "spatial_reduction":
        return SpatialReductionAttention(spec.dim, reduction=spec.reduction, **common)
    return PerformerAttention(spec.dim, num_features=spec.num_features, **common)
