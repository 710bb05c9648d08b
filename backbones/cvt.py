"""CvT with long-short attention (Transformer-LS section 4.3 and appendix D), in three stages.

The official code was never published. The paper specifies the stages, heads and widths of CvT (Table 8 for 17 and 21s),
DualLN, and no positions. Depth-wise separable convolutions compute queries, keys and values. Another one computes the
scores of the dynamic projection, with standardized spatial weights instead of BatchNorm. The paper does not specify
these details:

- Keys and values share one projection P, as in equation 3. It has no bias, because the softmax over tokens would cancel
  it.
- Depth-wise convolutions have no bias, because BatchNorm follows. Linear layers, embeddings and MLPs have one.
- All stages have an output projection, even with one head. There is no global token, and the head uses the mean.

With r = (128, 32, 8), the ranks for 448 x 448, the models 13, 17 and 21 have 20.28, 23.74 and 32.09 million parameters.
The paper reports 20.3, 23.7 and 32.1. Model 21s has 30.98 million. The reported 30.1 is not possible, because the
linear layers of its four additional blocks alone have 7.1 million weights. With r = (64, 16, 4), the ranks for
224 x 224 that the variants have, the counts are 20.17, 23.53, 31.90 and 30.74. The paper reports one count for all
resolutions.
"""

import dataclasses

from torch import Tensor, nn

from backbones.attention.dense import merge_heads, split_heads
from backbones.attention.long_short import DualNormAttention
from backbones.backbone import Backbone, Variant
from backbones.errors import check_whole
from backbones.layers.block import PatchEmbed
from backbones.layers.conv import SeparableProjection, StandardizedProjection

_KERNELS = (7, 3, 3)


@dataclasses.dataclass(frozen=True)
class CvTStage:
    """One stage of CvT with long-short attention."""

    depth: int
    dim: int
    heads: int
    projection_rank: int
    chunk_size: int

    expansion = 4

    def __post_init__(self) -> None:
        check_whole("projection_rank", self.projection_rank)
        check_whole("chunk_size", self.chunk_size)


@dataclasses.dataclass(frozen=True)
class CvTVariant(Variant):
    """A CvT-LS with three stages at strides 4, 8 and 16, and without positions.

    Attributes:
        stages: One :class:`CvTStage` per stage.
        norm: Norm of the convolutional projections, a key of ``BATCH_NORMS``.
        classifier_img_size: Image side in pixels on which the paper's classifier is trained.
    """

    norm: str = "BN"
    classifier_img_size: int = 224

    options = ("norm", "projection_rank", "chunk_size")
    norm_eps = 1e-5
    downsample_factors = (4, 2, 2)


class ConvLongShortAttention(DualNormAttention):
    """Long-short attention with convolutional projections (appendix D), without global tokens.

    Args:
        dim: Channels of a token.
        rank: Number r of projected keys of a head.
        norm: Norm of the projections, a key of ``BATCH_NORMS``.
        common: See :class:`.DualNormAttention`.
    """

    def __init__(self, dim: int, *, rank: int, norm: str = "BN", **common: int | bool | str) -> None:
        super().__init__(dim, **common)
        # Queries, keys and values
        self.conv_qkv = SeparableProjection(dim, dim, number=3, norm=norm)
        self.dynamic_projection = StandardizedProjection(dim, self.num_heads * rank)
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the updated tokens (B, H * W, C)."""
        tokens = tokens.unflatten(1, size)
        query, keys_values = self.conv_qkv(tokens).split([1, 2])
        # (B, M, H * W, 2, D)
        keys_values = self.norm_local(keys_values).contiguous()
        query = split_heads(query.squeeze(0), self.num_heads).unflatten(2, size)
        output = self.attend(query, keys_values.unflatten(2, size), self.dynamic_projection(tokens))
        return self.proj(merge_heads(output).flatten(1, 2))


class CvT(Backbone):
    """A CvT with long-short attention. See :class:`.CvTVariant`.

    It has no positions and no global tokens, so their settings have no effect.
    """

    variant: CvTVariant

    def _make_embedding(self, index: int, in_channels: int) -> PatchEmbed:
        dim, patch_size = self.variant.stages[index].dim, self.variant.downsample_factors[index]
        options = {"norm_eps": self.variant.norm_eps, "kernel_size": _KERNELS[index]}
        return PatchEmbed(in_channels, dim, patch_size=patch_size, **options)

    def _make_attention(self, index: int, number: int) -> ConvLongShortAttention:
        spec = self.variant.stages[index]
        return ConvLongShortAttention(
            spec.dim,
            num_heads=spec.heads,
            chunk_size=spec.chunk_size,
            rank=spec.projection_rank,
            norm=self.variant.norm,
            backend=self.settings.attention_backend,
        )


def _cvt(*stages: tuple[int, int, int], chunk_sizes: tuple[int, ...] = (8, 4, 2), img_size: int = 224) -> CvTVariant:
    """Return a variant from stages (blocks, channels, heads), with r of appendix D for 224 x 224."""
    numbers = zip(stages, (64, 16, 4), chunk_sizes, strict=True)
    sizes = tuple(CvTStage(n, d, h, r, w) for (n, d, h), r, w in numbers)
    # No paper trains CvT-LS as a detector. 0.2 is the rate of vil_small in Mask R-CNN.
    return CvTVariant(sizes, drop_path_rate=0.2, classifier_img_size=img_size)


_CVT_21 = ((1, 64, 1), (4, 192, 3), (16, 384, 6))
VARIANTS = {
    "cvt_ls_13": _cvt((1, 64, 1), (2, 192, 3), (10, 384, 6)),
    "cvt_ls_17": _cvt((3, 128, 2), (4, 256, 4), (10, 384, 6)),
    "cvt_ls_21": _cvt(*_CVT_21),
    "cvt_ls_21s": _cvt((3, 128, 2), (4, 256, 4), (14, 384, 6)),
    # Chunk sizes of appendix D. At 448 pixels it has r = (128, 32, 8), but Table 3 counts the multiply-adds with
    # r = (64, 16, 4), as at the other sizes.
    "cvt_ls_21_384": _cvt(*_CVT_21, chunk_sizes=(12, 6, 3), img_size=384),
    "cvt_ls_21_448": _cvt(*_CVT_21, chunk_sizes=(16, 8, 4), img_size=448),
}
