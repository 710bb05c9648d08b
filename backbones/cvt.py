"""CvT with long-short attention (Transformer-LS section 4.3 and appendix D): convolutions and LSTA in three stages.

Its code was never published. From the paper: the stages, heads and widths of CvT (Table 8 for 17 and 21s), queries,
keys and values by depth-wise separable convolutions, scores of the dynamic projection by one too, with standardized
spatial weights instead of BatchNorm, DualLN, and no positions. What it leaves open is chosen as follows:

- one projection P for keys and values, as in equation 3, and no bias in it, which the softmax over tokens would cancel;
- a depth-wise convolution has no bias, since BatchNorm follows; linear layers, embeddings and MLPs have one;
- one output projection in all stages, also where there is one head; no global token, and a head on the mean.

With r = (128, 32, 8), the ranks of 448 x 448, that gives 20.28, 23.74 and 32.09 million parameters, as reported for
13, 17 and 21 (20.3, 23.7, 32.1), and 30.98 for 21s, where the reported 30.1 M is not possible (31.0 with two digits
swapped?): the linear layers of its four blocks more than 17 have 7.1 million weights. With r = (64, 16, 4), those of
224 x 224 that the variants have, they are 20.17, 23.53, 31.90 and 30.74: the paper reports one count for all
resolutions.
"""

import dataclasses

from torch import Tensor, nn

from backbones.attention.dense import merge_heads, split_heads
from backbones.attention.long_short import DualNormAttention
from backbones.backbone import Backbone, Variant
from backbones.errors import check_choice, check_whole
from backbones.layers.conv import BATCH_NORMS, SeparableProjection, StandardizedProjection
from backbones.layers.patch_embed import PatchEmbed

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
    """A CvT-LS: three stages at strides 4, 8 and 16, without positions.

    Attributes:
        stages: a :class:`CvTStage` each.
        norm: norm of the convolutional projections, a key of ``BATCH_NORMS``.
    """

    norm: str = "BN"

    options = ("norm", "projection_rank", "chunk_size")
    norm_eps = 1e-5
    downsample_factors = (4, 2, 2)

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, BATCH_NORMS)


class ConvLongShortAttention(DualNormAttention):
    """Long-short attention with convolutional projections (appendix D), without global tokens.

    Args:
        dim: channels of a token.
        num_heads: divides ``dim``.
        chunk_size: side w of a segment.
        rank: r, projected keys of a head.
        norm: norm of the projections, a key of ``BATCH_NORMS``.
        backend: a key of ``BACKENDS`` of long-short attention.
    """

    def __init__(
        self, dim: int, *, num_heads: int, chunk_size: int, rank: int, norm: str = "BN", backend: str = "sdpa"
    ) -> None:
        super().__init__(dim, num_heads=num_heads, chunk_size=chunk_size, backend=backend)
        # To queries, keys and values
        self.conv_qkv = SeparableProjection(dim, dim, number=3, norm=norm)
        self.dynamic_projection = StandardizedProjection(dim, num_heads * rank)
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        """(B, H * W, C) and (H, W) -> (B, H * W, C)."""
        tokens = tokens.unflatten(1, size)
        query, keys_values = self.conv_qkv(tokens).split([1, 2])
        # (B, M, H * W, 2, D)
        keys_values = self.norm_local(keys_values).contiguous()
        query = split_heads(query.squeeze(0), self.num_heads).unflatten(2, size)
        output = self.attend(query, keys_values.unflatten(2, size), self.dynamic_projection(tokens))
        return self.proj(merge_heads(output).flatten(1, 2))


class CvT(Backbone):
    """A CvT with long-short attention, by a :class:`.CvTVariant`.

    It has no positions and no global tokens, so that settings of those have no effect.
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


def _cvt(*stages: tuple[int, int, int]) -> CvTVariant:
    """Stages as (blocks, channels, heads), with r and w of appendix D at 224 x 224."""
    long_short = ((64, 8), (16, 4), (4, 2))
    return CvTVariant(tuple(CvTStage(n, d, h, r, w) for (n, d, h), (r, w) in zip(stages, long_short, strict=True)))


VARIANTS = {
    "cvt_ls_13": _cvt((1, 64, 1), (2, 192, 3), (10, 384, 6)),
    "cvt_ls_17": _cvt((3, 128, 2), (4, 256, 4), (10, 384, 6)),
    "cvt_ls_21": _cvt((1, 64, 1), (4, 192, 3), (16, 384, 6)),
    "cvt_ls_21s": _cvt((3, 128, 2), (4, 256, 4), (14, 384, 6)),
}
