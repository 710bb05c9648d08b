"""LITv2: two stages of MLPs, one of HiLo attention and one of full attention, with deformable token merging.

The MLPs have a depth-wise convolution, which replaces the positions of LIT (Pan et al., NeurIPS 2022,
arXiv:2205.13213).
"""

import dataclasses

from torch import nn

from backbones import lit
from backbones.attention.efficient import SpatialReductionAttention
from backbones.attention.hilo import HiLoAttention
from backbones.backbone import Variant


@dataclasses.dataclass(frozen=True)
class LITv2Stage(lit.LITStage):
    """One stage of LITv2. A window size of 1 is full attention."""

    window_size: int = 1


@dataclasses.dataclass(frozen=True)
class LITv2Variant(Variant):
    """A variant of LITv2.

    Attributes:
        stages: One :class:`LITv2Stage` per stage.
        norm: Norm of token merging, a key of ``BATCH_NORMS``.
    """

    norm: str = "BN"

    options = ("norm",)
    norm_eps = 1e-5
    has_depthwise_mlp = True
    downsample_factors = (4, 2, 2, 2)
    token_merging = "deformable"
    output_norms = ("stage2", "stage3", "stage4")


class LITv2(lit.LIT):
    """A LITv2 (appendix A, Figure I). See :class:`.LITv2Variant`.

    It has no positions and no global tokens, so their settings have no effect.
    """

    variant: LITv2Variant

    def _make_positions(self, index: int) -> None:
        return None

    def _make_attention(self, index: int, number: int) -> nn.Module | None:
        spec, common = self.variant.stages[index], {"backend": self.common_backend}
        if not spec.heads:
            return None
        if spec.window_size > 1:
            return HiLoAttention(spec.dim, num_heads=spec.heads, window_size=spec.window_size, **common)
        return SpatialReductionAttention(spec.dim, reduction=1, num_heads=spec.heads, num_global_tokens=0, **common)


def _litv2(dim: int, heads: int, depths: tuple[int, ...], drop_path_rate: float, *, window_size: int) -> LITv2Variant:
    """Return LITv2-S, -M or -B. Channels and heads double at each stage."""
    windows = (1, 1, window_size, 1)
    stages = tuple(
        LITv2Stage(depth, dim * 2**i, heads * 2**i if i >= 2 else 0, window_size=windows[i])
        for i, depth in enumerate(depths)
    )
    return LITv2Variant(stages, drop_path_rate=drop_path_rate)


# The last value is the stochastic depth of the official detection code.
_SIZES = {
    "litv2_s": (96, 3, (2, 2, 6, 2), 0.2),
    "litv2_m": (96, 3, (2, 2, 18, 2), 0.2),
    "litv2_b": (128, 4, (2, 2, 18, 2), 0.3),
}
VARIANTS = {
    f"{name}{suffix}": _litv2(*sizes, window_size=window_size)
    for name, sizes in _SIZES.items()
    for suffix, window_size in (("", 2), ("_ws4", 4))
}


# -- Official checkpoints --------------------------------------------------------------------------

# Official names -> ours, in addition to LIT's. Hi-Fi is h, Lo-Fi and full attention are l.
OFFICIAL_NAMES = (
    *lit.OFFICIAL_NAMES,
    (r"dwconv\.dwconv", "depthwise"),
    ("h_qkv", "high_qkv"),
    ("h_proj", "high_proj"),
    ("l_q", "query"),
    ("l_kv", "key_value"),
    ("l_proj", "proj"),
)
convert_tensor = lit.convert_tensor
initial_values = lit.initial_values
