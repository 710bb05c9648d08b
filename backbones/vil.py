"""ViL, the Multi-Scale Vision Longformer: stages of efficient attention, each at half the resolution of the last."""

from torch import nn

from backbones.attention.alternatives.global_memory import GlobalMemoryAttention
from backbones.attention.alternatives.linformer import LinformerAttention
from backbones.attention.alternatives.performer import PerformerAttention
from backbones.attention.alternatives.spatial_reduction import SpatialReductionAttention
from backbones.attention.dense import DenseAttention
from backbones.attention.long_short import LongShortAttention
from backbones.attention.sliding_chunk import SlidingChunkAttention
from backbones.backbone import Backbone
from backbones.layers.patch_embed import PatchEmbed
from backbones.layers.position import AbsolutePositions
from backbones.variants import ViLVariant


class ViL(Backbone):
    """A multi-scale ViL (section 3.1, equation 1), by a :class:`.ViLVariant`."""

    variant: ViLVariant

    def _make_embedding(self, index: int, in_channels: int) -> PatchEmbed:
        spec = self.variant.stages[index]
        return PatchEmbed(in_channels, spec.dim, patch_size=spec.patch_size, norm_eps=self.variant.norm_eps)

    def _make_positions(self, index: int) -> AbsolutePositions | None:
        if self.variant.relative_bias:
            return None
        spec, resizing = self.variant.stages[index], self.variant.position_resizing or "load"
        height, width = self._map_size(index, resizing)
        return AbsolutePositions(
            spec.dim,
            max_height=height,
            max_width=width,
            num_global_tokens=spec.global_tokens,
            resizing=resizing,
        )

    def _num_global_tokens(self, index: int) -> int:
        return self.variant.stages[index].global_tokens

    def _map_size(self, index: int, resizing: str) -> tuple[int, int]:
        """Of tables, in tokens; whole places at the largest stride: 1333 pixels are 42 of 32 and 336 of 4."""
        last, stride = self.strides[-1], self.strides[index]
        sides = self.settings.table_img_size(resizing, self.variant.position_img_size)
        height, width = (-(-side // last) * last // stride for side in sides)
        return height, width

    def _make_attention(self, index: int, number: int) -> nn.Module:
        variant, spec = self.variant, self.variant.stages[index]
        keep_globals = self.settings.keep_global_tokens and self._is_last(index)
        common = {
            "num_heads": spec.heads,
            "num_global_tokens": spec.global_tokens,
            "update_globals": keep_globals or number + 1 < spec.depth,
            "backend": self.common_backend,
        }
        if spec.attention == "dense":
            resizing = variant.position_resizing or "map"
            bias_size = self._map_size(index, resizing) if variant.relative_bias else None
            return DenseAttention(spec.dim, bias_size=bias_size, bias_resizing=resizing, **common)
        if spec.attention == "sliding_chunk":
            return SlidingChunkAttention(
                spec.dim,
                window_size=spec.window_size,
                mode=variant.attention_mode,
                relative_bias=variant.relative_bias,
                shared_projections=variant.shared_projections,
                **common | {"backend": self.settings.attention_backend},
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
            map_size = self._map_size(index, "load")
            return LinformerAttention(spec.dim, map_size=map_size, num_features=spec.num_features, **common)
        if spec.attention == "spatial_reduction":
            return SpatialReductionAttention(spec.dim, reduction=spec.reduction, **common)
        return PerformerAttention(spec.dim, num_features=spec.num_features, **common)
