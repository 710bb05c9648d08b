"""ViL, the Multi-Scale Vision Longformer: stages of efficient attention, each at half the previous resolution.

The sizes are from Tables 1, 9 and 15 of the ViL paper. The ``ls_`` variants are from section 4.3 of Transformer-LS and
its official launch scripts. ``chunk_size`` is the side of a chunk: 7 is the paper's window of 15.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from backbones.attention import efficient
from backbones.attention.dense import DenseAttention
from backbones.attention.long_short import LongShortAttention
from backbones.attention.sliding_chunk import SlidingChunkAttention
from backbones.backbone import Backbone, Variant, with_stage_values
from backbones.errors import ConfigError, check_choice, check_whole
from backbones.layers.block import PatchEmbed
from backbones.layers.position import RESIZING, AbsolutePositions

# A user may switch a stage to these mechanisms. The others need sizes that a variant may not have. Only these support a
# relative bias.
_SWITCHABLE = ("sliding_chunk", "long_short", "dense")
ATTENTIONS = (*_SWITCHABLE, "global", "linformer", "spatial_reduction", "performer")
# The mechanisms that use an option. The others ignore it.
_USED_BY = {
    "chunk_size": ("sliding_chunk", "long_short"),
    "projection_rank": ("long_short",),
    "attention_mode": ("sliding_chunk",),
    "shared_projections": ("sliding_chunk",),
}


@dataclasses.dataclass(frozen=True)
class ViLStage:
    """One E-ViT stage (ViL section 3.1).

    Attributes:
        depth: Number of blocks.
        patch_size: Side of a patch of the embedding.
        heads: Number of heads.
        dim: Channels of a token.
        global_tokens: Number of global tokens.
        attention: One of ``ATTENTIONS``.
        chunk_size: Side of a chunk or segment, in tokens (sliding_chunk, long_short).
        projection_rank: Rank r of the dynamic projection (long_short).
        num_features: Projected length (linformer), or random features of a head (performer).
        reduction: Factor by which the height and width of keys and values are reduced (spatial_reduction).
    """

    depth: int
    patch_size: int
    heads: int
    dim: int
    global_tokens: int = 1
    attention: str = "sliding_chunk"
    chunk_size: int = 7
    projection_rank: int = 8
    num_features: int = 256
    reduction: int = 1

    expansion = 4

    def __post_init__(self) -> None:
        check_choice("attention", self.attention, ATTENTIONS)
        check_whole("chunk_size", self.chunk_size)
        check_whole("projection_rank", self.projection_rank)
        check_whole("global_tokens", self.global_tokens, least=0)
        if self.attention == "global" and not self.global_tokens:
            raise ConfigError("global_tokens=0 is not valid. Global attention needs a global token in every stage.")


@dataclasses.dataclass(frozen=True)
class ViLVariant(Variant):
    """A variant of the multi-scale ViL, or of a model with the same stages and another attention.

    Attributes:
        stages: One :class:`ViLStage` per stage.
        relative_bias: Whether there is a relative bias instead of absolute positions.
        attention_mode: Mode of sliding chunks. See :class:`.SlidingChunkAttention`.
        shared_projections: Whether global and local tokens share the projections of sliding chunks.
        position_img_size: Image side in pixels for tables that are resized to each feature map.
        position_interpolation: ``"once"`` for tables of the largest image, or ``"per_feature_map"`` for tables that are
            resized to each feature map. With None, as in the papers, absolute positions are resized once and a relative
            bias to each feature map.
    """

    relative_bias: bool = False
    attention_mode: str = "zero_pad"
    shared_projections: bool = True
    position_img_size: int = 224
    position_interpolation: str | None = None

    options = ("attention", "global_tokens", "position_interpolation", *_USED_BY)
    norm_eps = 1e-6

    @property
    def downsample_factors(self) -> tuple[int, ...]:
        return tuple(stage.patch_size for stage in self.stages)

    @property
    def classifier_img_size(self) -> int:
        return self.position_img_size

    @property
    def has_fixed_input_size(self) -> bool:
        mechanisms = {stage.attention for stage in self.stages}
        if "linformer" in mechanisms:
            return True
        if self.relative_bias:
            return self.position_interpolation == "once" and "dense" in mechanisms
        return self.position_interpolation != "per_feature_map"

    def with_options(self, **options: object) -> "ViLVariant":
        """Return the variant with other fields. See :meth:`.Variant.with_options`.

        Raises:
            ConfigError: If a mechanism needs other sizes, or an option has no effect.
        """
        variant = super().with_options(**options)
        mechanisms = {stage.attention for stage in variant.stages}
        if "attention" in options:
            for mechanism in mechanisms:
                check_choice("attention", mechanism, _SWITCHABLE)
        for option in options.keys() & _USED_BY:
            if not mechanisms & set(_USED_BY[option]):
                needed = _USED_BY[option][0]
                raise ConfigError(f"{option} has no effect, because no stage has {needed} attention. Leave it out.")
        return variant

    def __post_init__(self) -> None:
        check_choice("shared_projections", self.shared_projections, (True, False))
        check_choice("position_interpolation", self.position_interpolation, (*RESIZING, None))
        for stage in self.stages:
            if self.relative_bias and stage.attention not in _SWITCHABLE:
                raise ConfigError(f"{stage.attention} attention has no relative bias. Use absolute positions.")


class ViL(Backbone):
    """A multi-scale ViL (section 3.1, equation 1). See :class:`.ViLVariant`."""

    variant: ViLVariant

    def _make_embedding(self, index: int, in_channels: int) -> PatchEmbed:
        spec = self.variant.stages[index]
        return PatchEmbed(in_channels, spec.dim, patch_size=spec.patch_size, norm_eps=self.variant.norm_eps)

    def _make_positions(self, index: int) -> AbsolutePositions | None:
        if self.variant.relative_bias:
            return None
        spec, resizing = self.variant.stages[index], self.variant.position_interpolation or "once"
        size = self._table_size(index, resizing)
        return AbsolutePositions(size, spec.dim, num_global_tokens=spec.global_tokens, resizing=resizing)

    def _make_attention(self, index: int, number: int) -> nn.Module:
        variant, spec = self.variant, self.variant.stages[index]
        common = {
            "num_heads": spec.heads,
            "num_global_tokens": spec.global_tokens,
            "update_globals": self._keeps_global_tokens(index) or number + 1 < spec.depth,
            "backend": self.settings.attention_backend,
        }
        if spec.attention == "dense":
            resizing = variant.position_interpolation or "per_feature_map"
            bias_size = self._table_size(index, resizing) if variant.relative_bias else None
            return DenseAttention(spec.dim, bias_size=bias_size, bias_resizing=resizing, **common)
        window = {"chunk_size": spec.chunk_size, "relative_bias": variant.relative_bias}
        if spec.attention == "sliding_chunk":
            options = {"mode": variant.attention_mode, "shared_projections": variant.shared_projections}
            return SlidingChunkAttention(spec.dim, **window, **options, **common)
        if spec.attention == "long_short":
            return LongShortAttention(spec.dim, rank=spec.projection_rank, **window, **common)
        common |= {"backend": self.common_backend}
        if spec.attention == "linformer":
            map_size = self._table_size(index, "once")
            return efficient.LinformerAttention(spec.dim, map_size=map_size, num_features=spec.num_features, **common)
        if spec.attention == "spatial_reduction":
            return efficient.SpatialReductionAttention(spec.dim, reduction=spec.reduction, **common)
        if spec.attention == "performer":
            return efficient.PerformerAttention(spec.dim, num_features=spec.num_features, **common)
        return efficient.GlobalMemoryAttention(spec.dim, **common)


def _vil(*stages: tuple[int, int, int, int], drop_path_rate: float = 0.1) -> ViLVariant:
    """Return a variant from stages (n, p, h, d), as in the paper's tables. The last one has no global token.

    The drop path rates are from the README of the official detection repository.
    """
    last = len(stages) - 1
    specs = (ViLStage(n, p, h, d, global_tokens=int(i < last)) for i, (n, p, h, d) in enumerate(stages))
    return ViLVariant(tuple(specs), drop_path_rate=drop_path_rate)


def _with_depths(size: str, *depths: int) -> ViLVariant:
    """Return tiny or small with other depths. Models of three stages start at stride 8 (Table 9)."""
    widths = {"tiny": ((1, 48), (3, 96), (3, 192), (6, 384)), "small": ((3, 96), (3, 192), (6, 384), (12, 768))}[size]
    widths = widths[-len(depths) :]
    patches = (4 if len(depths) == 4 else 8,) + (2,) * (len(depths) - 1)
    return _vil(*((n, p, h, d) for n, p, (h, d) in zip(depths, patches, widths, strict=True)))


# Fields that replace the fields of ViL's stages (Table 15). In a "partial" model, the last two stages have full
# attention.
_OVERRIDES: dict[str, Mapping[str, Sequence]] = {
    "full": {"attention": ["dense"] * 4},
    "linformer": {"attention": ["linformer"] * 4},
    "sra64": {"attention": ["spatial_reduction"] * 4, "reduction": (16, 8, 4, 2)},
    "sra32": {"attention": ["spatial_reduction"] * 4, "reduction": (8, 4, 2, 1)},
    "global": {"global_tokens": (256, 256, 64, 16), "attention": ["global"] * 4},
    "performer": {"attention": ["performer"] * 4},
}


def _with_mechanism(variant: ViLVariant, mechanism: str, *, partial: bool = False) -> ViLVariant:
    stages = variant.stages
    for field, values in _OVERRIDES.get(mechanism, {}).items():
        stages = with_stage_values(stages, field, values[-len(stages) :])
    if partial:
        stages = (*stages[:-2], *with_stage_values(stages[-2:], "attention", "dense"))
    return dataclasses.replace(variant, stages=stages)


def _long_short(variant: ViLVariant, *, chunk_size: int = 7, img_size: int = 224) -> ViLVariant:
    """Return the official ViL-LS: long-short attention in stages 1 and 2, full attention in 3 and 4, relative bias."""
    stages = with_stage_values(variant.stages, "attention", ("long_short", "long_short", "dense", "dense"))
    stages = with_stage_values(stages, "chunk_size", chunk_size)
    return dataclasses.replace(variant, stages=stages, relative_bias=True, position_img_size=img_size)


_VIL = {
    "vil_tiny": _vil((1, 4, 1, 48), (1, 2, 3, 96), (9, 2, 3, 192), (1, 2, 6, 384), drop_path_rate=0.05),
    "vil_small": _vil((1, 4, 3, 96), (2, 2, 3, 192), (8, 2, 6, 384), (1, 2, 12, 768)),
    "vil_medium_deep": _vil((1, 4, 3, 96), (4, 2, 3, 192), (16, 2, 6, 384), (1, 2, 12, 768), drop_path_rate=0.2),
    "vil_medium_wide": _vil((1, 4, 3, 192), (2, 2, 6, 384), (8, 2, 8, 512), (1, 2, 12, 768), drop_path_rate=0.2),
    "vil_base_deep": _vil((1, 4, 3, 96), (8, 2, 3, 192), (24, 2, 6, 384), (1, 2, 12, 768), drop_path_rate=0.3),
    "vil_base_wide": _vil((1, 4, 3, 192), (2, 2, 6, 384), (8, 2, 12, 768), (1, 2, 16, 1024), drop_path_rate=0.3),
    # For the demo, not in the paper
    "vil_tiny_1_1_3_1": _with_depths("tiny", 1, 1, 3, 1),
} | {
    f"vil_{size}_{'_'.join(map(str, depths))}": _with_depths(size, *depths)
    for size in ("tiny", "small")
    for depths in ((1, 10, 1), (2, 9, 1), (1, 9, 2), (2, 8, 2), (1, 1, 9, 1), (1, 2, 8, 1), (1, 1, 8, 2))
}
# Table 14 compares the mechanisms in these sizes.
_COMPARED = [
    f"{size}{depths}" for size in ("tiny", "small") for depths in ("", "_1_10_1", "_2_9_1", "_1_1_9_1", "_1_2_8_1")
]
# The flat models of Table 2, E-ViT(full x 12/16; h, d, 1) of section 3.1, have one feature map at stride 16.
_EVIT = {
    f"evit_full_16_{size}": ViLVariant((ViLStage(12, 16, heads, dim, attention="dense"),))
    for size, heads, dim in (("tiny", 3, 192), ("small", 6, 384))
}
_LS = {
    "ls_tiny": _long_short(_VIL["vil_tiny"]),
    "ls_small": _long_short(_VIL["vil_small"]),
    "ls_medium": _long_short(_VIL["vil_medium_deep"]),
    "ls_base": _long_short(_VIL["vil_base_deep"]),
    "ls_medium_384": _long_short(_VIL["vil_medium_deep"], chunk_size=8, img_size=384),
}
VARIANTS: dict[str, ViLVariant] = (
    _VIL
    | {f"{name}_rpb": dataclasses.replace(variant, relative_bias=True) for name, variant in _VIL.items()}
    | {f"{m}_{size}": _with_mechanism(_VIL[f"vil_{size}"], m) for m in _OVERRIDES for size in _COMPARED}
    | {
        f"partial_{m}_{size}": _with_mechanism(_VIL[f"vil_{size}"], m, partial=True)
        for m in ("vil", "linformer", "sra32", "global", "performer")
        for size in _COMPARED
    }
    | _EVIT
    | _LS
)


# -- Official checkpoints --------------------------------------------------------------------------

# Names of vision-longformer and transformer-ls -> ours (see backbones/convert.py). Module 0 of a layer is the
# embedding, odd modules are attention, and even ones are MLPs.
OFFICIAL_NAMES = (
    (r"^layer(\d)\.0(?=\.(?:proj|norm_embed)\.)", lambda m: f"stages.{int(m[1]) - 1}.patch_embed"),
    (r"^layer(\d)\.0", lambda m: f"stages.{int(m[1]) - 1}"),
    (
        r"^layer(\d)\.(\d+)\.(norm|attn|mlp)",
        lambda m: (
            f"stages.{int(m[1]) - 1}.blocks.{(int(m[2]) - 1) // 2}."
            f"{'attention' if int(m[2]) % 2 else 'mlp'}{'_norm' if m[3] == 'norm' else ''}"
        ),
    ),
    ("cls_token", "global_tokens"),
    ("cls_pos_embed", "positions.global_tokens"),
    ("x_pos_embed", "positions.rows"),
    ("y_pos_embed", "positions.cols"),
    ("norm_embed", "norm"),
    ("kv", "key_value"),
    ("query_global", "global_query"),
    ("kv_global", "global_key_value"),
    ("proj_global", "global_proj"),
    ("local_relative_position_bias_table", "relative_bias.table"),
    (r"fast_attention\.projection_matrix", "features"),
    ("proj_k|proj_v", "project_length"),
    ("proj_sr", "reduce"),
    ("dual_ln_full", "local_norm"),
    ("dual_ln_dp", "projected_norm"),
    ("to_dynamic_projection", "dynamic_projection"),
)
_COMPUTED = "not a weight: the model or its trainer computes it"
_UNUSED = "never used: the global tokens are dropped after the stage"


def convert_tensor(name: str, key: str, tensor: Tensor, modules: Mapping[str, nn.Module]) -> dict[str, Tensor | str]:
    """Return our tensors for an official tensor, or reasons to drop it.

    Args:
        name: Its official name.
        key: Our name, by ``OFFICIAL_NAMES``.
        tensor: Its values, of any shape.
        modules: The modules of the backbone, by name.

    Returns:
        Our names and tensors. For a part that is dropped: its index (``""`` for the whole tensor) and the reason.
    """
    if name.endswith(("relative_position_index", "calls_since_last_redraw")):
        return {"": _COMPUTED}
    if key.endswith(("positions.rows", "positions.cols")):
        return {key: tensor[0]}
    path, _, leaf = key.partition(".attention.")
    module = modules.get(f"{path}.attention") if leaf else None
    if module is None:
        return {key: tensor}
    path += ".attention"
    if leaf.startswith("qkv.") and not hasattr(module, "qkv"):
        dim, leaf = len(tensor) // 3, leaf.removeprefix("qkv.")
        return {f"{path}.query.{leaf}": tensor[:dim], f"{path}.key_value.{leaf}": tensor[dim:]}
    if not module.update_globals and (leaf == "g2g_relative_position_bias" or leaf.startswith("global_")):
        return {"": _UNUSED}
    bias = f"{path}.relative_bias" if isinstance(module, DenseAttention) else path
    if leaf == "g2g_relative_position_bias":
        return {f"{bias}.global_to_global": tensor}
    if leaf == "g2l_relative_position_bias":
        # A tensor of another shape is passed on, and its shape is reported.
        to_local, to_global = tensor.unbind() if len(tensor) == 2 else (tensor, tensor)
        used = {f"{bias}.local_to_global": to_global}
        return {f"{bias}.global_to_local": to_local} | used if module.update_globals else used | {"[0]": _UNUSED}
    if leaf.startswith("global_") and module.shared_projections:
        leaf = leaf.removeprefix("global_")
    return {f"{path}.{leaf}": tensor}


def initial_values(missing: Mapping[str, Tensor], official: Collection[str]) -> dict[str, tuple[Tensor, str]]:
    """Sample random features for a Performer whose checkpoint has full attention in some stages (Table 8)."""
    reason = "full attention has no random features: they are sampled"
    features = {key: tensor.shape for key, tensor in missing.items() if key.endswith("attention.features")}
    return {key: (efficient.sample_features(*shape), reason) for key, shape in features.items()}
