"""Every size, once: what the names of :func:`backbones.create_backbone` stand for.

ViL: Tables 1, 9 and 15 of the paper. ``window_size`` is the side of a chunk, so that 7 is the paper's window of 15.
Transformer-LS: section 4.3 and the official launch scripts. LIT: Table 1.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from backbones.attention.kernels.chunks import MODES
from backbones.layers.batch_norm import BATCH_NORMS
from backbones.layers.position import RESIZING
from backbones.utils.errors import InputError, check_choice, closest

ATTENTIONS = (
    "sliding_chunk",
    "long_short",
    "dense",
    "global",
    "linformer",
    "spatial_reduction",
    "performer",
)
# Mechanisms that a stage may be switched to, since they need no size that the variant does not have.
_SWITCHABLE = ("sliding_chunk", "long_short", "dense")
_WITH_BIAS = _SWITCHABLE
# Which mechanisms read an option; the others have no use for it.
_READERS = {
    "window_size": ("sliding_chunk", "long_short"),
    "rank": ("long_short",),
    "attention_mode": ("sliding_chunk",),
    "shared_projections": ("sliding_chunk",),
}


@dataclasses.dataclass(frozen=True)
class ViLStage:
    """One E-ViT stage (ViL section 3.1): ``depth`` blocks of ``heads`` heads on ``dim`` channels.

    Attributes:
        attention: one of ``ATTENTIONS``.
        window_size: side of a chunk or segment, in tokens (sliding_chunk, long_short).
        rank: r of the dynamic projection (long_short).
        num_features: projected length (linformer), or random features of a head (performer).
        reduction: tokens that become one along an axis (spatial_reduction).
    """

    depth: int
    patch_size: int
    heads: int
    dim: int
    global_tokens: int = 1
    attention: str = "sliding_chunk"
    window_size: int = 7
    rank: int = 8
    num_features: int = 256
    reduction: int = 1

    expansion = 4


@dataclasses.dataclass(frozen=True)
class ViLVariant:
    """A multi-scale ViL, or a model of the same build with another attention.

    Attributes:
        stages: the sizes.
        relative_bias: in the place of absolute positions.
        attention_mode: of sliding chunks, one of their ``MODES``.
        shared_projections: of sliding chunks: whether global and local tokens share them.
        position_img_size: image side in pixels for tables that are resized to each map.
        position_resizing: ``"load"`` for tables that are made for the largest image, ``"map"`` for those that are
            resized to each map, or None as the papers have it: absolute positions at load, relative bias to each map.
    """

    stages: tuple[ViLStage, ...]
    relative_bias: bool = False
    attention_mode: str = "zero_pad"
    shared_projections: bool = True
    position_img_size: int = 224
    position_resizing: str | None = None

    options = (
        "attention",
        "attention_mode",
        "global_tokens",
        "position_resizing",
        "rank",
        "shared_projections",
        "window_size",
    )
    pool = "mean"
    norm_eps = 1e-6

    @property
    def steps(self) -> tuple[int, ...]:
        """By how much each stage shrinks the map before it, along an axis."""
        return tuple(stage.patch_size for stage in self.stages)

    @property
    def classifier_img_size(self) -> int:
        """Side in pixels of the images that the paper's classifier of this variant is trained on."""
        return self.position_img_size

    def with_options(
        self,
        *,
        attention: str | Sequence[str] | None = None,
        window_size: int | Sequence[int] | None = None,
        global_tokens: int | Sequence[int] | None = None,
        rank: int | Sequence[int] | None = None,
        attention_mode: str | None = None,
        shared_projections: bool | None = None,
        position_resizing: str | None = None,
    ) -> "ViLVariant":
        """The variant with what is not None in place of its own; a sequence has one entry for each stage.

        Raises:
            InputError: where a sequence has another length, an entry is too small or a mechanism is not to be chosen.
        """
        stages = self.stages
        if attention is not None:
            names = [attention] * len(stages) if isinstance(attention, str) else attention
            if not isinstance(names, list | tuple) or len(names) != len(stages):
                raise InputError(f"attention={attention!r}: it is one mechanism, or {len(stages)}, one a stage")
            for name in names:
                check_choice("attention", name, _SWITCHABLE)
            stages = _replaced(stages, "attention", names)
        for field, value, least in (
            ("window_size", window_size, 1),
            ("global_tokens", global_tokens, 0),
            ("rank", rank, 1),
        ):
            if value is not None:
                stages = _replaced(stages, field, _one_a_stage(field, value, len(stages), least))
        given = {"window_size": window_size, "rank": rank, "attention_mode": attention_mode}
        given["shared_projections"] = shared_projections
        for option, value in given.items():
            if value is not None and not any(stage.attention in _READERS[option] for stage in stages):
                raise InputError(f"{option} has no effect: no stage has {' or '.join(_READERS[option])} attention")
        if not isinstance(shared_projections, bool | None):
            raise InputError(f"shared_projections={shared_projections!r}: it is True or False")
        changes = {
            "attention_mode": attention_mode,
            "shared_projections": shared_projections,
            "position_resizing": position_resizing,
        }
        return dataclasses.replace(self, stages=stages, **{k: v for k, v in changes.items() if v is not None})

    def __post_init__(self) -> None:
        check_choice("attention mode", self.attention_mode, MODES)
        if self.position_resizing is not None:
            check_choice("position resizing", self.position_resizing, RESIZING)
        for stage in self.stages:
            check_choice("attention", stage.attention, ATTENTIONS)
            if self.relative_bias and stage.attention not in _WITH_BIAS:
                raise InputError(f"{stage.attention} attention has no relative bias: take absolute positions")
            if stage.attention == "global" and not stage.global_tokens:
                raise InputError("global attention needs a global token in every stage")


@dataclasses.dataclass(frozen=True)
class LITStage:
    """One stage of LIT: ``heads`` is 0 for a stage of MLP blocks alone."""

    depth: int
    dim: int
    heads: int = 0
    expansion: int = 4


@dataclasses.dataclass(frozen=True)
class LITVariant:
    """A LIT.

    Attributes:
        stages: the sizes; the first embeds patches of 4, the others merge 2 x 2 tokens.
        relative_bias: True for a relative bias (as Swin), False for absolute positions and a global token in the
            classifier (as PVT).
        norm_eps: of the LayerNorms.
        output_norms: the stages whose maps are normed on their way out of a detector or segmentor.
        position_img_size: image side in pixels for tables that are resized to each map.
        position_resizing: ``"map"``, or ``"load"`` for tables that are made for the largest image.
        merging: ``"deformable"`` or ``"uniform"`` (Table 3).
        batch_norm: of deformable merging, a key of ``BATCH_NORMS``.
    """

    stages: tuple[LITStage, ...]
    relative_bias: bool
    norm_eps: float
    output_norms: tuple[str, ...]
    position_img_size: int
    position_resizing: str = "map"
    merging: str = "deformable"
    batch_norm: str = "batch"

    options = ("merging", "batch_norm", "position_resizing")
    classifier_img_size = 224
    steps = (4, 2, 2, 2)

    @property
    def pool(self) -> str:
        return "mean" if self.relative_bias else "global_token"

    def with_options(
        self,
        *,
        merging: str | None = None,
        batch_norm: str | None = None,
        position_resizing: str | None = None,
    ) -> "LITVariant":
        """The variant with what is not None in place of its own."""
        changes = {"merging": merging, "batch_norm": batch_norm, "position_resizing": position_resizing}
        variant = dataclasses.replace(self, **{k: v for k, v in changes.items() if v is not None})
        if batch_norm is not None and variant.merging == "uniform":
            raise InputError("batch_norm is that of deformable merging, and merging is uniform: leave one of them out")
        return variant

    def __post_init__(self) -> None:
        check_choice("merging", self.merging, ("deformable", "uniform"))
        check_choice("batch norm", self.batch_norm, BATCH_NORMS)
        check_choice("position resizing", self.position_resizing, RESIZING)


@dataclasses.dataclass(frozen=True)
class CvTStage:
    """One stage of CvT with long-short attention: window ``window_size``, dynamic projection of ``rank``."""

    depth: int
    dim: int
    heads: int
    rank: int
    window_size: int

    expansion = 4


@dataclasses.dataclass(frozen=True)
class CvTVariant:
    """A CvT-LS: three stages at strides 4, 8 and 16, without positions.

    Attributes:
        stages: the sizes.
        batch_norm: of the convolutional projections, a key of ``BATCH_NORMS``.
    """

    stages: tuple[CvTStage, ...]
    batch_norm: str = "batch"

    options = ("batch_norm", "rank", "window_size")
    classifier_img_size = 224
    pool = "mean"
    norm_eps = 1e-5
    steps = (4, 2, 2)

    def with_options(
        self,
        *,
        rank: int | Sequence[int] | None = None,
        window_size: int | Sequence[int] | None = None,
        batch_norm: str | None = None,
    ) -> "CvTVariant":
        """The variant with what is not None in place of its own; a sequence has one entry for each stage."""
        stages = self.stages
        for field, value in (("rank", rank), ("window_size", window_size)):
            if value is not None:
                stages = _replaced(stages, field, _one_a_stage(field, value, len(stages), 1))
        return dataclasses.replace(
            self, stages=stages, batch_norm=self.batch_norm if batch_norm is None else batch_norm
        )

    def __post_init__(self) -> None:
        check_choice("batch norm", self.batch_norm, BATCH_NORMS)


Variant = ViLVariant | LITVariant | CvTVariant


def _replaced(stages: tuple, field: str, values: Iterable) -> tuple:
    return tuple(dataclasses.replace(s, **{field: v}) for s, v in zip(stages, values, strict=True))


def _one_a_stage(field: str, value: int | Sequence[int], number: int, least: int) -> list[int]:
    values = list(value) if isinstance(value, Sequence) else [value] * number
    if len(values) != number or not all(type(v) is int and v >= least for v in values):
        raise InputError(f"{field}={value!r}: it is a whole number, {least} or more, or {number} of them, one a stage")
    return values


def _vil(*stages: tuple[int, int, int, int]) -> ViLVariant:
    """Stages as the paper's tables have them: (n, p, h, d). The last stage has no global token, as released."""
    last = len(stages) - 1
    return ViLVariant(tuple(ViLStage(n, p, h, d, global_tokens=int(i < last)) for i, (n, p, h, d) in enumerate(stages)))


def _by_depth(size: str, *depths: int) -> ViLVariant:
    """Tiny or small with other depths; three stages start at stride 8 (Table 9)."""
    widths = {"tiny": ((1, 48), (3, 96), (3, 192), (6, 384)), "small": ((3, 96), (3, 192), (6, 384), (12, 768))}[size]
    widths = widths[-len(depths) :]
    first_patch = 4 if len(depths) == 4 else 8
    patches = (first_patch,) + (2,) * (len(depths) - 1)
    return _vil(*((n, p, h, d) for n, p, (h, d) in zip(depths, patches, widths, strict=True)))


# Table 15, of the last three or four stages. Full attention is what "partial" leaves to the last two.
_MECHANISMS: dict[str, Mapping[str, Sequence]] = {
    "full": {"attention": ["dense"] * 4},
    "linformer": {"attention": ["linformer"] * 4},
    "sra64": {"attention": ["spatial_reduction"] * 4, "reduction": (16, 8, 4, 2)},
    "sra32": {"attention": ["spatial_reduction"] * 4, "reduction": (8, 4, 2, 1)},
    "global": {"attention": ["global"] * 4, "global_tokens": (256, 256, 64, 16)},
    "performer": {"attention": ["performer"] * 4},
}
_PARTIAL = ("vil", "linformer", "sra32", "global", "performer")


def _with_mechanism(variant: ViLVariant, mechanism: str, *, partial: bool = False) -> ViLVariant:
    stages, number = variant.stages, len(variant.stages)
    for field, values in _MECHANISMS.get(mechanism, {}).items():
        stages = _replaced(stages, field, values[-number:])
    if partial:
        full = [dataclasses.replace(stage, attention="dense") for stage in stages[-2:]]
        stages = (*stages[:-2], *full)
    return dataclasses.replace(variant, stages=stages)


def _long_short(variant: ViLVariant, *, window_size: int = 7, img_size: int = 224) -> ViLVariant:
    """Long-short attention in stages 1 and 2, full attention with relative bias in 3 and 4 (official scripts)."""
    stages = _replaced(variant.stages, "attention", ("long_short", "long_short", "dense", "dense"))
    stages = _replaced(stages, "window_size", [window_size] * len(stages))
    return dataclasses.replace(variant, stages=stages, relative_bias=True, position_img_size=img_size)


_VIL = {
    "vil_tiny": _vil((1, 4, 1, 48), (1, 2, 3, 96), (9, 2, 3, 192), (1, 2, 6, 384)),
    "vil_small": _vil((1, 4, 3, 96), (2, 2, 3, 192), (8, 2, 6, 384), (1, 2, 12, 768)),
    "vil_medium_deep": _vil((1, 4, 3, 96), (4, 2, 3, 192), (16, 2, 6, 384), (1, 2, 12, 768)),
    "vil_medium_wide": _vil((1, 4, 3, 192), (2, 2, 6, 384), (8, 2, 8, 512), (1, 2, 12, 768)),
    "vil_base_deep": _vil((1, 4, 3, 96), (8, 2, 3, 192), (24, 2, 6, 384), (1, 2, 12, 768)),
    "vil_base_wide": _vil((1, 4, 3, 192), (2, 2, 6, 384), (8, 2, 12, 768), (1, 2, 16, 1024)),
} | {
    f"vil_{size}_{'_'.join(map(str, depths))}": _by_depth(size, *depths)
    for size in ("tiny", "small")
    for depths in ((1, 10, 1), (2, 9, 1), (1, 9, 2), (2, 8, 2), (1, 1, 9, 1), (1, 2, 8, 1))
}
# Table 14 has the other mechanisms in these sizes.
_COMPARED = [
    f"{size}{depths}" for size in ("tiny", "small") for depths in ("", "_1_10_1", "_2_9_1", "_1_1_9_1", "_1_2_8_1")
]
_OTHERS = {
    f"{mechanism}_{size}": _with_mechanism(_VIL[f"vil_{size}"], mechanism)
    for mechanism in _MECHANISMS
    for size in _COMPARED
} | {
    f"partial_{mechanism}_{size}": _with_mechanism(_VIL[f"vil_{size}"], mechanism, partial=True)
    for mechanism in _PARTIAL
    for size in _COMPARED
}
# Table 2, flat models: E-ViT(full x 12/16; h, d, 1) of section 3.1, one map at stride 16.
_EVIT = {
    f"evit_full_16_{size}": ViLVariant((ViLStage(12, 16, heads, dim, attention="dense"),))
    for size, heads, dim in (("tiny", 3, 192), ("small", 6, 384))
}
# For the demo: in no table of the paper.
_VIL["vil_tiny_1_1_3_1"] = _by_depth("tiny", 1, 1, 3, 1)

_LS = {
    "ls_tiny": _long_short(_VIL["vil_tiny"]),
    "ls_small": _long_short(_VIL["vil_small"]),
    "ls_medium": _long_short(_VIL["vil_medium_deep"]),
    "ls_base": _long_short(_VIL["vil_base_deep"]),
    "ls_medium_384": _long_short(_VIL["vil_medium_deep"], window_size=8, img_size=384),
}


def _cvt(*stages: tuple[int, int, int]) -> CvTVariant:
    """Stages as (blocks, channels, heads), with r and w of appendix D at 224 x 224."""
    long_short = ((64, 8), (16, 4), (4, 2))
    return CvTVariant(tuple(CvTStage(n, d, h, r, w) for (n, d, h), (r, w) in zip(stages, long_short, strict=True)))


_CVT = {
    "cvt_ls_13": _cvt((1, 64, 1), (2, 192, 3), (10, 384, 6)),
    "cvt_ls_17": _cvt((3, 128, 2), (4, 256, 4), (10, 384, 6)),
    "cvt_ls_21": _cvt((1, 64, 1), (4, 192, 3), (16, 384, 6)),
    "cvt_ls_21s": _cvt((3, 128, 2), (4, 256, 4), (14, 384, 6)),
}


def _lit(dim: int, heads: int, depths: Sequence[int]) -> LITVariant:
    """LIT-S, -M and -B: channels and heads double from stage to stage; the official detector's tables are for 800."""
    stages = tuple(LITStage(depth, dim * 2**i, heads * 2**i if i >= 2 else 0) for i, depth in enumerate(depths))
    norms = ("stage2", "stage3", "stage4")
    return LITVariant(stages, relative_bias=True, norm_eps=1e-5, output_norms=norms, position_img_size=800)


def _for_segmentation(variant: LITVariant) -> LITVariant:
    """The official segmentation backbone norms stage 1 too, and its tables are for 512 pixels."""
    return dataclasses.replace(variant, output_norms=("stage1", *variant.output_norms), position_img_size=512)


_LIT = {
    "lit_ti": LITVariant(
        (LITStage(3, 64, 0, 8), LITStage(4, 128, 0, 8), LITStage(6, 320, 5), LITStage(3, 512, 8)),
        relative_bias=False,
        norm_eps=1e-6,
        output_norms=(),
        position_img_size=224,
    ),
    "lit_s": _lit(96, 3, (2, 2, 6, 2)),
    "lit_m": _lit(96, 3, (2, 2, 18, 2)),
    "lit_b": _lit(128, 4, (2, 2, 18, 2)),
}
_SEGMENTATION = "_seg"
_LIT |= {f"{name}{_SEGMENTATION}": _for_segmentation(_LIT[name]) for name in ("lit_s", "lit_m", "lit_b")}

VARIANTS: dict[str, Variant] = (
    _VIL
    | {f"{name}_rpb": dataclasses.replace(variant, relative_bias=True) for name, variant in _VIL.items()}
    | _OTHERS
    | _EVIT
    | _LS
    | _CVT
    | _LIT
)
OPTIONS = {option for variant in (ViLVariant, LITVariant, CvTVariant) for option in variant.options}


def get_variant(name: str, options: Mapping[str, object] | None = None) -> Variant:
    """The variant of that name, with the options that are not None in place of its own.

    Raises:
        InputError: for an unknown name, with the closest one, or an option that the family does not have.
    """
    if name not in VARIANTS:
        hint = closest(str(name), VARIANTS) or f"; there are: {', '.join(sorted(VARIANTS))}"
        raise InputError(f"unknown variant {name!r}{hint}")
    variant = VARIANTS[name]
    given = {option: value for option, value in (options or {}).items() if value is not None}
    for option in given:
        if option not in variant.options:
            raise InputError(f"{name} has no option {option}: its options are {', '.join(variant.options)}")
    return variant.with_options(**given)


def classifier_variant(name: str) -> str:
    """The variant of the classifiers that a backbone starts from: a segmentor's starts from a detector's."""
    return name.removesuffix(_SEGMENTATION)


def stage_names(variant: Variant) -> tuple[str, ...]:
    """What the maps of its stages are called, from the largest: ``"stage1"`` onwards."""
    return tuple(f"stage{number}" for number in range(1, len(variant.stages) + 1))
