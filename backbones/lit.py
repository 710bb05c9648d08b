"""LIT, the Less attention vIsion Transformer: two stages of MLP blocks, two of full attention, and token merging."""

from collections.abc import Sequence

from torch import Tensor, nn

from backbones.attention.dense import BACKENDS, DenseAttention
from backbones.backbone import Backbone, FeatureInfo, Stage, drop_path_rates, init_linear
from backbones.errors import InputError, check_choice
from backbones.layers.block import Block
from backbones.layers.patch_embed import PatchEmbed
from backbones.layers.position import RESIZING, GridPositions
from backbones.layers.token_merging import DeformableTokenMerging, LinearTokenMerging
from backbones.variants import LITVariant

_PATCH_SIZE = 4
# The official code leaves the embedding's norm at PyTorch's value in LIT-Ti too, whose other norms have 1e-6.
_EMBED_NORM_EPS = 1e-5


class LIT(Backbone):
    """A LIT (section 3.2, Figure 1, Table 1): images in, a map for each asked stage out.

    Args:
        variant: the sizes, and the way in which tokens are merged.
        out_features: names of the stages to return, ``"stage1"`` to ``"stage4"``; None for all. Stages after the last
            one are not built.
        max_img_size: height and width of the largest image in pixels, for tables that are resized when weights are
            loaded: the variant's option ``position_resizing="load"``.
        position_img_size: the same for tables that are resized to each map, as usual; None for the variant's own.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 at the first.
        keep_global_tokens: as a classifier is built: LIT-Ti has a global token in its last stage, which
            :meth:`forward_tokens` returns, and the maps of the others are not normed on their way out.
        activation_checkpointing: compute the activations of a block again in the backward pass.
        attention_backend: ``"sdpa"`` or ``"reference"``.

    Raises:
        InputError: for an unknown stage or backend.
    """

    def __init__(
        self,
        variant: LITVariant,
        *,
        out_features: Sequence[str] | None = None,
        max_img_size: tuple[int, int] = (1333, 1333),
        position_img_size: tuple[int, int] | None = None,
        drop_path_rate: float = 0.0,
        keep_global_tokens: bool = False,
        activation_checkpointing: bool = False,
        attention_backend: str = "sdpa",
    ) -> None:
        strides = [_PATCH_SIZE * 2**index for index in range(len(variant.stages))]
        features = [FeatureInfo(spec.dim, stride) for spec, stride in zip(variant.stages, strides, strict=True)]
        super().__init__(features, out_features=out_features, drop_path_rate=drop_path_rate)
        check_choice("attention backend", attention_backend, BACKENDS)
        if position_img_size is None:
            position_img_size = (variant.position_img_size, variant.position_img_size)
        check_choice("position resizing", variant.position_resizing, RESIZING)
        table_img_size = max_img_size if variant.position_resizing == "load" else position_img_size

        rates = drop_path_rates(drop_path_rate, [spec.depth for spec in variant.stages])
        in_channels = 3
        for index, spec in enumerate(variant.stages[: self.num_stages]):
            is_last = index + 1 == self.num_stages
            num_global_tokens = int(keep_global_tokens and is_last and not variant.relative_bias)
            # As large as the map is: 50 and 25 tokens for 800 pixels, as in the official detector
            size = tuple(-(-side // strides[index]) for side in table_img_size)
            positions = None
            if not variant.relative_bias:
                positions = GridPositions(
                    size, spec.dim, num_global_tokens=num_global_tokens, resizing=variant.position_resizing
                )
            blocks = []
            for rate in rates[index]:
                attention = None
                if spec.heads:
                    attention = DenseAttention(
                        spec.dim,
                        num_heads=spec.heads,
                        num_global_tokens=num_global_tokens,
                        bias_size=size if variant.relative_bias else None,
                        bias_resize_mode="cubic",
                        bias_resizing=variant.position_resizing,
                        backend=attention_backend,
                    )
                blocks.append(
                    Block(
                        spec.dim,
                        attention,
                        expansion=spec.expansion,
                        norm_eps=variant.norm_eps,
                        drop_path_rate=rate,
                    )
                )
            self.stages.append(
                Stage(
                    _embedding(variant, index, in_channels),
                    blocks,
                    dim=spec.dim,
                    num_global_tokens=num_global_tokens,
                    positions=positions,
                    activation_checkpointing=activation_checkpointing,
                )
            )
            name = f"stage{index + 1}"
            if variant.output_norms and not keep_global_tokens and index > 0 and name in self.out_features:
                self.output_norms[name] = nn.LayerNorm(spec.dim, eps=variant.norm_eps)
            in_channels = spec.dim
        self.apply(init_linear)

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


def _embedding(variant: LITVariant, index: int, in_channels: int) -> nn.Module:
    """What a stage starts with; the starred models of Table 3 merge as PVT-S and as Swin-Ti do."""
    dim = variant.stages[index].dim
    if index == 0:
        return PatchEmbed(in_channels, dim, patch_size=_PATCH_SIZE, norm_eps=_EMBED_NORM_EPS)
    if variant.merging == "deformable":
        return DeformableTokenMerging(in_channels, dim, norm=variant.batch_norm)
    if variant.relative_bias:
        return LinearTokenMerging(in_channels, dim, norm_eps=_EMBED_NORM_EPS)
    return PatchEmbed(in_channels, dim, patch_size=2, norm_eps=_EMBED_NORM_EPS)
