"""CvT with long-short attention (Transformer-LS section 4.3 and appendix D): convolutions and LSTA in three stages.

Its code was never published. As the paper says: the stages, heads and widths of CvT (Table 8 for 17 and 21s), queries,
keys and values by depth-wise separable convolutions, scores of the dynamic projection by one too, with standardised
spatial weights in the place of BatchNorm, DualLN, and no positions. What it leaves open is chosen so:

- one projection P for keys and values, as in equation 3, and no bias in it, which the softmax over tokens would cancel;
- a depth-wise convolution has no bias, since BatchNorm follows; linear layers, embeddings and MLPs have one;
- one output projection in all stages, also where there is one head; no global token, and a head on the mean.

With r = (128, 32, 8), the ranks of 448 x 448, that gives 20.28, 23.74 and 32.09 million parameters, as printed for 13,
17 and 21 (20.3, 23.7, 32.1), and 30.98 for 21s, whose printed 30.1 cannot hold (31.0 with two digits swapped?): its
four blocks more than 17 have 7.1 million weights in linear layers alone. With r = (64, 16, 4), those of 224 x 224 that
the variants have, they are 20.17, 23.53, 31.90 and 30.74: the paper prints one count for all resolutions.
"""

from torch import Tensor, nn

from backbones.attention.dense import merge_heads
from backbones.attention.long_short import DualNormAttention
from backbones.backbone import Backbone
from backbones.layers.conv import ConvEmbed, SeparableProjection, StandardisedProjection
from backbones.variants import CvTVariant

_KERNELS = (7, 3, 3)


class ConvLongShortAttention(DualNormAttention):
    """Long-short attention with convolutional projections (appendix D), without global tokens.

    Args:
        dim: channels of a token.
        num_heads: divides ``dim``.
        window_size: side w of a segment.
        rank: r, projected keys of a head.
        norm: of the projections, a key of ``BATCH_NORMS``.
        backend: a key of ``BACKENDS`` of long-short attention.
    """

    def __init__(
        self, dim: int, *, num_heads: int, window_size: int, rank: int, norm: str = "batch", backend: str = "sdpa"
    ) -> None:
        super().__init__(dim, num_heads=num_heads, window_size=window_size, backend=backend)
        self.query = SeparableProjection(dim, dim, norm=norm)
        self.key = SeparableProjection(dim, dim, norm=norm)
        self.value = SeparableProjection(dim, dim, norm=norm)
        self.dynamic_projection = StandardisedProjection(dim, num_heads * rank)
        self.projection = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, global_tokens: None) -> tuple[Tensor, None]:
        """(B, H, W, C) and None -> the same."""
        scores = self.dynamic_projection(tokens)
        output = self.attend(self.query(tokens), self.key(tokens), self.value(tokens), scores)
        return self.projection(merge_heads(output)), None


class CvT(Backbone):
    """A CvT with long-short attention, by a :class:`.CvTVariant`.

    It has no positions and no global tokens, so that settings of those have no effect.
    """

    variant: CvTVariant

    def _make_embedding(self, index: int, in_channels: int) -> ConvEmbed:
        return ConvEmbed(
            in_channels,
            self.variant.stages[index].dim,
            kernel_size=_KERNELS[index],
            stride=self.variant.steps[index],
            norm_eps=self.variant.norm_eps,
        )

    def _make_attention(self, index: int, number: int) -> ConvLongShortAttention:
        spec = self.variant.stages[index]
        return ConvLongShortAttention(
            spec.dim,
            num_heads=spec.heads,
            window_size=spec.window_size,
            rank=spec.rank,
            norm=self.variant.batch_norm,
            backend=self.common_backend,
        )
