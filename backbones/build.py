"""Create models by the names of their variants."""

from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from backbones import cvt, lit, vil
from backbones.backbone import Backbone, BackboneSettings, Classifier, Variant
from backbones.errors import ConfigError, check_whole, closest, explain_unknown_keywords

VARIANTS: dict[str, Variant] = {**vil.VARIANTS, **cvt.VARIANTS, **lit.VARIANTS}
_FAMILIES: dict[type[Variant], type[Backbone]] = {
    vil.ViLVariant: vil.ViL,
    cvt.CvTVariant: cvt.CvT,
    lit.LITVariant: lit.LIT,
}
OPTIONS = {option for family in _FAMILIES for option in family.options}
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _checked(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    return explain_unknown_keywords(function, also=OPTIONS)


def get_variant(name: str, options: Mapping[str, object] | None = None) -> Variant:
    """Return the variant of that name, with the options that are not None instead of its own.

    Raises:
        ConfigError: for an unknown name, with the closest one, or an option that the family does not have.
    """
    if name not in VARIANTS:
        hint = closest(str(name), VARIANTS) or f"; known: {', '.join(sorted(VARIANTS))}"
        raise ConfigError(f"unknown variant {name!r}{hint}")
    variant = VARIANTS[name]
    given = {option: value for option, value in (options or {}).items() if value is not None}
    for option in given:
        if option not in variant.options:
            raise ConfigError(f"{name} has no option {option}: its options are {', '.join(variant.options)}")
    return variant.with_options(**given)


def list_variants(prefix: str = "") -> list[str]:
    """The names that :func:`create_backbone` and :func:`create_classifier` know, sorted, that start with ``prefix``.

    The ``linformer_`` and ``partial_linformer_`` ones are classifiers only.
    """
    return sorted(name for name in VARIANTS if name.startswith(prefix))


@_checked
def create_backbone(
    name: str,
    *,
    out_features: Sequence[str] | None = None,
    drop_path_rate: float = 0.0,
    max_img_size: int | tuple[int, int] = 1333,
    activation_checkpointing: bool = False,
    attention_backend: str = "auto",
    **options: object,
) -> Backbone:
    """A backbone with random weights: images (B, 3, H, W) of any size -> {stage name: (B, C, H / stride, W / stride)}.

    Args:
        name: one of :func:`list_variants`.
        out_features: names of the stages to return, ``"stage1"`` onwards; None for all.
        drop_path_rate: stochastic depth of the last block, growing linearly from 0 at the first.
        max_img_size: largest image side, or (height, width), in pixels; it sizes ViL's tables of absolute positions.
            Other tables are resized to each feature map, and have the size that the papers trained them at
            (``position_interpolation`` changes that).
        activation_checkpointing: less memory in training for about a third more time.
        attention_backend: ``"auto"`` or ``"sdpa"``, PyTorch's, ``"triton"``, kernels for CUDA that sliding chunks and
            long-short attention have, ``"flex"``, PyTorch's FlexAttention on CUDA, which sliding chunks have, or
            ``"reference"``, which is quadratic and for debugging.
        options: instead of the variant's own if not None; those of ``VARIANTS[name].options``:

            - ViL and LS: ``chunk_size`` (side of a chunk in tokens; 7 is ViL's window of 15), ``global_tokens``,
              ``projection_rank`` and ``attention`` (``"sliding_chunk"``, ``"long_short"`` or ``"dense"``), each for all
              stages or one per stage; ``attention_mode`` (``"zero_pad"``, ``"exact"`` or ``"cyclic"``, ViL appendix C);
              ``shared_projections`` (False for separate projections of the global tokens);
            - ViL, LS and LIT: ``position_interpolation`` (``"once"`` for tables of ``max_img_size``, or
              ``"per_feature_map"`` for tables that are resized to each feature map);
            - CvT: ``chunk_size``, ``projection_rank`` and ``norm``;
            - LIT: ``token_merging`` (``"deformable"`` or ``"uniform"``), ``norm`` (``"BN"``, ``"FrozenBN"`` or
              ``"SyncBN"``).

    Raises:
        ConfigError: for an unknown name, keyword or value; the message names the closest known one.
    """
    variant = get_variant(name, options)
    if any(getattr(stage, "attention", None) == "linformer" for stage in variant.stages):
        raise ConfigError(
            f"{name} cannot be a backbone: Linformer's projections are tied to one image size (ViL section 3.3,"
            " Table 3); create_classifier creates it for one"
        )
    settings = BackboneSettings(
        out_features=out_features,
        max_img_size=height_and_width("max_img_size", max_img_size),
        drop_path_rate=drop_path_rate,
        activation_checkpointing=activation_checkpointing,
        attention_backend=attention_backend,
    )
    return _FAMILIES[type(variant)](variant, settings)


@_checked
def create_classifier(
    name: str,
    *,
    num_classes: int = 1000,
    img_size: int | tuple[int, int] = 224,
    drop_path_rate: float = 0.0,
    activation_checkpointing: bool = False,
    attention_backend: str = "auto",
    **options: object,
) -> Classifier:
    """A classifier with random weights and the paper's head: (B, 3, H, W) -> (B, num_classes).

    Arguments as for :func:`create_backbone`; ``img_size`` is the training size in pixels, a side or (height, width),
    and determines the size of all tables of positions.
    """
    variant = get_variant(name, options)
    check_whole("num_classes", num_classes)
    size = height_and_width("img_size", img_size)
    settings = BackboneSettings(
        out_features=variant.stage_names[-1:],
        max_img_size=size,
        position_img_size=size,
        drop_path_rate=drop_path_rate,
        keep_global_tokens=True,
        activation_checkpointing=activation_checkpointing,
        attention_backend=attention_backend,
    )
    backbone = _FAMILIES[type(variant)](variant, settings)
    return Classifier(backbone, num_classes=num_classes, pool=variant.pool, norm_eps=variant.norm_eps)


def height_and_width(name: str, size: int | Sequence[int]) -> tuple[int, int]:
    """Return height and width in pixels from a side or from both; ``name`` is the argument that an error names."""
    pair = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(pair) != 2 or not all(isinstance(side, int) and side >= 1 for side in pair):
        raise ConfigError(f"{name}={size!r}: give a side, or height and width, in pixels")
    return pair
