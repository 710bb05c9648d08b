"""LIT, the Less attention vIsion Transformer: two stages of MLPs, two of full attention, with token merging."""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from backbones.attention.dense import DenseAttention
from backbones.backbone import Backbone, Variant
from backbones.errors import ConfigError, check_choice
from backbones.layers.block import PatchEmbed
from backbones.layers.position import RESIZING, GridPositions
from backbones.layers.token_merging import DeformableTokenMerging, LinearTokenMerging

# PyTorch's default, as in the official code. In LIT-Ti the other norms have 1e-6.
_EMBED_NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class LITStage:
    """One stage of LIT. A stage with 0 heads has only MLP blocks."""

    depth: int
    dim: int
    heads: int = 0
    expansion: int = 4


@dataclasses.dataclass(frozen=True)
class LITVariant(Variant):
    """A variant of LIT.

    Attributes:
        stages: One :class:`LITStage` per stage. The first embeds patches of 4 x 4, the others merge 2 x 2 tokens.
        relative_bias: True for a relative bias, as in Swin. False for absolute positions and a global token in the
            classifier, as in PVT.
        norm_eps: Epsilon of the LayerNorms.
        output_norms: The stages whose feature maps are normalized in a detector or segmentor.
        position_img_size: Image side in pixels for tables that are resized to each feature map.
        position_interpolation: ``"per_feature_map"``, or ``"once"`` for tables of the largest image.
        token_merging: ``"deformable"`` or ``"uniform"`` (Table 3).
        norm: Norm of deformable merging, a key of ``BATCH_NORMS``.
    """

    relative_bias: bool
    norm_eps: float
    output_norms: tuple[str, ...]
    position_img_size: int
    position_interpolation: str = "per_feature_map"
    token_merging: str = "deformable"
    norm: str = "BN"

    options = ("token_merging", "norm", "position_interpolation")
    downsample_factors = (4, 2, 2, 2)

    @property
    def pool(self) -> str:
        return "mean" if self.relative_bias else "global_token"

    @property
    def has_fixed_input_size(self) -> bool:
        return self.position_interpolation == "once"

    def __post_init__(self) -> None:
        check_choice("token_merging", self.token_merging, ("deformable", "uniform"))
        check_choice("position_interpolation", self.position_interpolation, RESIZING)
        if self.token_merging == "uniform" and self.norm != "BN":
            raise ConfigError(f"norm={self.norm!r} has no effect without deformable token merging. Leave it out.")


class LIT(Backbone):
    """A LIT (section 3.2, Figure 1, Table 1). See :class:`.LITVariant`.

    LIT-Ti has a global token in the last stage of a classifier, but none in a detector.
    """

    variant: LITVariant

    def _make_embedding(self, index: int, in_channels: int) -> nn.Module:
        """Return the embedding. With uniform merging, LIT-Ti* merges as PVT-S and LIT-S* as Swin-Ti (Table 3)."""
        variant, dim = self.variant, self.variant.stages[index].dim
        if index > 0 and variant.token_merging == "deformable":
            return DeformableTokenMerging(in_channels, dim, norm=variant.norm)
        if index > 0 and variant.relative_bias:
            return LinearTokenMerging(in_channels, dim)
        return PatchEmbed(in_channels, dim, patch_size=variant.downsample_factors[index], norm_eps=_EMBED_NORM_EPS)

    def _make_positions(self, index: int) -> GridPositions | None:
        variant = self.variant
        if variant.relative_bias:
            return None
        return GridPositions(
            self._map_size(index),
            variant.stages[index].dim,
            num_global_tokens=self._num_global_tokens(index),
            resizing=variant.position_interpolation,
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
            bias_resizing=variant.position_interpolation,
            backend=self.settings.attention_backend,
        )

    def _make_output_norm(self, index: int) -> nn.LayerNorm | None:
        variant = self.variant
        if variant.stage_names[index] not in variant.output_norms or self.settings.keep_global_tokens:
            return None
        return nn.LayerNorm(variant.stages[index].dim, eps=variant.norm_eps)

    def _num_global_tokens(self, index: int) -> int:
        return int(self._keeps_global_tokens(index) and self.variant.pool == "global_token")

    def _map_size(self, index: int) -> tuple[int, int]:
        """Return height and width of the tables in tokens: 50 and 25 for 800 pixels, as in the official detector."""
        return self._table_size(index, self.variant.position_interpolation, unit=self.strides[index])

    def sampling_offsets(self, images: Tensor) -> dict[str, Tensor]:
        """Return the offsets of each merging module, for :func:`.token_merging.sampled_positions`.

        Args:
            images: (B, 3, H, W).

        Returns:
            A dict from the name of each merging stage, such as ``"stage2"``, to (B, ceil(H / 8), ceil(W / 8), 2, 2, 2):
            merged token, row and column of its 2 x 2 tokens, (y, x), in tokens of the previous stage.

        Raises:
            ConfigError: If the model merges tokens uniformly.
        """
        offsets, features = {}, images
        for index, stage in enumerate(self.stages):
            if index:
                if not isinstance(stage.patch_embed, DeformableTokenMerging):
                    raise ConfigError("Uniform merging has no offsets. Use token_merging='deformable'.")
                offsets[f"stage{index + 1}"] = stage.patch_embed.offsets(features)
            if index + 1 < len(self.stages):
                features = stage(features)[0].permute(0, 3, 1, 2)
        return offsets


def _lit(dim: int, heads: int, depths: tuple[int, ...], drop_path_rate: float) -> LITVariant:
    """Return LIT-S, -M or -B. Channels and heads double at each stage. The official tables are for 800 pixels."""
    stages = tuple(LITStage(depth, dim * 2**i, heads * 2**i if i >= 2 else 0) for i, depth in enumerate(depths))
    norms = ("stage2", "stage3", "stage4")
    sizes = {"norm_eps": 1e-5, "output_norms": norms, "position_img_size": 800}
    return LITVariant(stages, drop_path_rate=drop_path_rate, relative_bias=True, **sizes)


_DETECTION = {
    # The last value is the stochastic depth of the official detection code for S, and of the classification code for M
    # and B.
    "lit_s": _lit(96, 3, (2, 2, 6, 2), 0.2),
    "lit_m": _lit(96, 3, (2, 2, 18, 2), 0.3),
    "lit_b": _lit(128, 4, (2, 2, 18, 2), 0.5),
}
# The official segmentation backbones also normalize stage 1. Their tables are for 512 pixels.
_SEGMENTATION = {
    f"{name}_seg": dataclasses.replace(variant, output_norms=variant.stage_names, position_img_size=512)
    for name, variant in _DETECTION.items()
}
_TI = LITVariant(
    (LITStage(3, 64, 0, 8), LITStage(4, 128, 0, 8), LITStage(6, 320, 5), LITStage(3, 512, 8)),
    relative_bias=False,
    norm_eps=1e-6,
    output_norms=(),
    position_img_size=224,
)
VARIANTS = {"lit_ti": _TI} | _DETECTION | _SEGMENTATION


# -- Official checkpoints --------------------------------------------------------------------------

# Official names -> ours (see backbones/convert.py). LIT-Ti has block3.0 and patch_embed3, the others have
# layers.2.blocks.0 and layers.1.downsample. Their stages end with a merging layer. Ours begin with it.
OFFICIAL_NAMES = (
    (r"^block([1-4])\.(\d+)", lambda m: f"stages.{int(m[1]) - 1}.blocks.{m[2]}"),
    (r"^layers\.([0-3])\.blocks", r"stages.\1.blocks"),
    (r"^layers\.([0-2])\.downsample", lambda m: f"stages.{int(m[1]) + 1}.patch_embed"),
    (r"^patch_embed([1-4]?)", lambda m: f"stages.{int(m[1] or 1) - 1}.patch_embed"),
    (r"^norm([0-3])", lambda m: f"output_norms.stage{int(m[1]) + 1}"),
    (r"^pos_embed([1-4])$", lambda m: f"stages.{int(m[1]) - 1}.positions.table"),
    ("^cls_token$", "stages.3.global_tokens"),
    ("norm1", "attention_norm"),
    ("norm2", "mlp_norm"),
    ("attn", "attention"),
    ("relative_position_bias_table", "relative_bias.table"),
    ("norm_layer", "norm"),
    (r"dconv\.conv_offset", "offset"),
    (r"dconv\.(weight|bias)", r"\1"),
)
GLOBAL_TOKEN = "only a classifier has a global token"


def convert_tensor(name: str, key: str, tensor: Tensor, modules: Mapping[str, nn.Module]) -> dict[str, Tensor | str]:
    """Return our tensors for an official tensor; see :func:`backbones.vil.convert_tensor`."""
    if name.endswith("attn.relative_position_index"):
        return {"": "not a weight: the model computes it"}
    if key.endswith("num_batches_tracked") and not hasattr(modules.get(key.rpartition(".")[0]), "num_batches_tracked"):
        return {"": "a frozen norm counts no batches"}
    has_global_token = getattr(modules.get("stages.3"), "global_tokens", None) is not None
    if name == "cls_token" and not has_global_token:
        return {"": GLOBAL_TOKEN}
    if not key.endswith("positions.table"):
        return {key: tensor}
    # (1, H * W, C). In the last stage the position of the global token comes first.
    num_global = int(name == "pos_embed4")
    number = tensor.shape[1] - num_global if tensor.ndim == 3 and len(tensor) == 1 else 0
    side = math.isqrt(max(number, 0))
    if not side or side**2 != number:
        raise ConfigError(f"'{name}' of shape {tuple(tensor.shape)} is not a square table. Use another file.")
    pieces = {key: tensor[0, num_global:].unflatten(0, (side, side))}
    if num_global and has_global_token:
        return pieces | {"stages.3.positions.global_tokens": tensor[:, :1]}
    return pieces | ({"[:, 0]": GLOBAL_TOKEN} if num_global else {})


def initial_values(missing: Mapping[str, Tensor], official: Collection[str]) -> dict[str, tuple[Tensor, str]]:
    """Return initial output norms (ones and zeros) for a backbone with the weights of a classifier, which has none."""
    names = {name.removeprefix("module.") for name in official}
    if "head.weight" not in names or any(re.match(r"norm[0-3]\.", name) for name in names):
        return {}
    reason = "a classifier has no norms of feature maps: they start as ones and zeros"
    norms = {key: tensor.shape for key, tensor in missing.items() if key.startswith("output_norms.")}
    return {key: (torch.full(shape, float(key.endswith("weight"))), reason) for key, shape in norms.items()}
