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

from collections.abc import Sequence

from torch import Tensor, nn

from backbones.attention.dense import merge_heads
from backbones.attention.long_short import BACKENDS, DualNormAttention
from backbones.backbone import Backbone, FeatureInfo, Stage, drop_path_rates, init_linear
from backbones.errors import check_choice
from backbones.layers.block import Block
from backbones.layers.conv import ConvEmbed, SeparableProjection, StandardisedProjection
from backbones.variants import CvTVariant

_STRIDES = (4, 2, 2)
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
    """A CvT with long-short attention: images in, a map for each asked stage out.

    Args:
        variant: the sizes.
        out_features: names of the stages to return, ``"stage1"`` to ``"stage3"``; None for all. Stages after the last
            one are not built.
        max_img_size, position_img_size, keep_global_tokens: without effect: there are no positions and no global
            tokens.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 at the first.
        activation_checkpointing: compute the activations of a block again in the backward pass.
        attention_backend: ``"sdpa"`` or ``"reference"``.

    Raises:
        InputError: for an unknown stage or backend.
    """

    def __init__(
        self,
        variant: CvTVariant,
        *,
        out_features: Sequence[str] | None = None,
        max_img_size: tuple[int, int] | None = None,
        position_img_size: tuple[int, int] | None = None,
        drop_path_rate: float = 0.0,
        keep_global_tokens: bool = False,
        activation_checkpointing: bool = False,
        attention_backend: str = "sdpa",
    ) -> None:
        features, stride = [], 1
        for spec, step in zip(variant.stages, _STRIDES, strict=True):
            stride *= step
            features.append(FeatureInfo(spec.dim, stride))
        super().__init__(features, out_features=out_features, drop_path_rate=drop_path_rate)
        check_choice("attention backend", attention_backend, BACKENDS)

        rates = drop_path_rates(drop_path_rate, [spec.depth for spec in variant.stages])
        in_channels = 3
        for index, spec in enumerate(variant.stages[: self.num_stages]):
            blocks = []
            for rate in rates[index]:
                attention = ConvLongShortAttention(
                    spec.dim,
                    num_heads=spec.heads,
                    window_size=spec.window_size,
                    rank=spec.rank,
                    norm=variant.batch_norm,
                    backend=attention_backend,
                )
                blocks.append(Block(spec.dim, attention, norm_eps=variant.norm_eps, drop_path_rate=rate))
            embed = ConvEmbed(
                in_channels,
                spec.dim,
                kernel_size=_KERNELS[index],
                stride=_STRIDES[index],
                norm_eps=variant.norm_eps,
            )
            self.stages.append(Stage(embed, blocks, dim=spec.dim, activation_checkpointing=activation_checkpointing))
            in_channels = spec.dim
        self.apply(init_linear)
