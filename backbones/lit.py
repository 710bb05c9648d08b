"""LIT, the Less attention vIsion Transformer: two stages of MLP blocks, two of full attention, and token merging."""

from torch import Tensor, nn

from backbones.attention.dense import DenseAttention
from backbones.backbone import Backbone
from backbones.layers.patch_embed import PatchEmbed
from backbones.layers.position import GridPositions
from backbones.layers.token_merging import DeformableTokenMerging, LinearTokenMerging
from backbones.utils.errors import InputError
from backbones.variants import LITVariant, stage_names

# The official code leaves the embedding's norm at PyTorch's value in LIT-Ti too, whose other norms have 1e-6.
_EMBED_NORM_EPS = 1e-5


class LIT(Backbone):
    """A LIT (section 3.2, Figure 1, Table 1), by a :class:`.LITVariant`.

    LIT-Ti has a global token in the last stage of a classifier, and none in a detector.
    """

    variant: LITVariant

    def _make_embedding(self, index: int, in_channels: int) -> nn.Module:
        """The starred models of Table 3 merge as PVT-S and as Swin-Ti do."""
        variant, dim = self.variant, self.variant.stages[index].dim
        if index > 0 and variant.merging == "deformable":
            return DeformableTokenMerging(in_channels, dim, norm=variant.batch_norm)
        if index > 0 and variant.relative_bias:
            return LinearTokenMerging(in_channels, dim, norm_eps=_EMBED_NORM_EPS)
        return PatchEmbed(in_channels, dim, patch_size=variant.steps[index], norm_eps=_EMBED_NORM_EPS)

    def _make_positions(self, index: int) -> GridPositions | None:
        variant = self.variant
        if variant.relative_bias:
            return None
        return GridPositions(
            self._map_size(index),
            variant.stages[index].dim,
            num_global_tokens=self._num_global_tokens(index),
            resizing=variant.position_resizing,
        )

    def _make_attention(self, index: int, number: int) -> DenseAttention | None:
        variant, spec = self.variant, self.variant.stages[index]
        if not spec.heads:
            return None
        return DenseAttention(
            spec.dim,
            num_heads=spec.heads,
            num_global_tokens=self._num_global_tokens(index),
            bias_size=self._map_size(index) if variant.relative_bias else None,
            bias_resize_mode="cubic",
            bias_resizing=variant.position_resizing,
            backend=self.common_backend,
        )

    def _make_output_norm(self, index: int) -> nn.LayerNorm | None:
        variant = self.variant
        if stage_names(variant)[index] not in variant.output_norms or self.settings.keep_global_tokens:
            return None
        return nn.LayerNorm(variant.stages[index].dim, eps=variant.norm_eps)

    def _num_global_tokens(self, index: int) -> int:
        return int(self.settings.keep_global_tokens and self._is_last(index) and not self.variant.relative_bias)

    def _map_size(self, index: int) -> tuple[int, int]:
        """Of tables, in tokens, as large as the map is: 50 and 25 for 800 pixels, as in the official detector."""
        sides = self.settings.table_img_size(self.variant.position_resizing, self.variant.position_img_size)
        height, width = (-(-side // self.strides[index]) for side in sides)
        return height, width

    def sampling_offsets(self, images: Tensor) -> dict[str, Tensor]:
        """What each merging module adds to its regular grid, for :func:`.token_merging.sampled_positions`.

        Images (B, 3, H, W) -> {"stage2": (B, ceil(H / 8), ceil(W / 8), 2, 2, 2), ...}: merged token, row and column of
        the 2 x 2 tokens, (y, x), in tokens of the stage before.

        Raises:
            InputError: where tokens are merged uniformly.
        """
        offsets, maps = {}, images
        for index, stage in enumerate(self.stages):
            if index:
                if not isinstance(stage.patch_embed, DeformableTokenMerging):
                    raise InputError("uniform merging has no offsets: create the model with merging='deformable'")
                offsets[f"stage{index + 1}"] = stage.patch_embed.offsets(maps)
            if index + 1 < len(self.stages):
                maps = stage(maps)[0].permute(0, 3, 1, 2)
        return offsets
