"""Create models by the name of their variant."""

import inspect
from collections.abc import Iterable, Mapping, Sequence

from backbones import cvt, lit, litv2, vil
from backbones.backbone import Backbone, BackboneSettings, Classifier, Variant
from backbones.errors import ConfigError, check_choice, check_whole, closest

VARIANTS: dict[str, Variant] = {**vil.VARIANTS, **cvt.VARIANTS, **lit.VARIANTS, **litv2.VARIANTS}
_FAMILIES: dict[type[Variant], type[Backbone]] = {
    vil.ViLVariant: vil.ViL,
    cvt.CvTVariant: cvt.CvT,
    lit.LITVariant: lit.LIT,
    litv2.LITv2Variant: litv2.LITv2,
}
OPTIONS = {option for family in _FAMILIES for option in family.options}


def get_variant(name: str, options: Mapping[str, object] | None = None, *, keywords: Iterable[str] = ()) -> Variant:
    """Return the variant ``name`` with other options. Options of any family that are None are ignored.

    Args:
        name: One of :func:`list_variants`.
        options: The options by name.
        keywords: Other valid names, for the suggestion in an error.

    Raises:
        ConfigError: If the name is unknown, or the family does not have an option. The message suggests the closest
            valid name or keyword.
    """
    if name not in VARIANTS:
        such_as = ". Use one of list_variants() or 'vil analyze --variants', or 'timm:NAME' for a detector."
        hint = closest(str(name), VARIANTS, cutoff=0.6) or such_as
        raise ConfigError(f"Unknown variant {name!r}{hint}")
    variant, given = VARIANTS[name], {}
    for option, value in (options or {}).items():
        if option not in (OPTIONS if value is None else variant.options):
            hint = closest(option, (*variant.options, *keywords)) or "."
            raise ConfigError(f"{name} has no option {option!r}{hint} Its options are {', '.join(variant.options)}.")
        if value is not None:
            given[option] = value
    return variant.with_options(**given) if given else variant


def list_variants(prefix: str = "") -> list[str]:
    """Return the sorted names of the variants that start with ``prefix``.

    The ``linformer_`` and ``partial_linformer_`` variants can only be classifiers.

    Example:
        >>> list_variants("vil_small_rpb")
        ['vil_small_rpb']
    """
    return sorted(name for name in VARIANTS if name.startswith(prefix))


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
    """Create a backbone with random weights. It returns a feature map for each requested stage.

    Args:
        name: One of :func:`list_variants`.
        out_features: Names of the stages to return, such as ``"stage1"``. None for all.
        drop_path_rate: Stochastic depth of the last block. The rate grows linearly from 0 at the first block.
        max_img_size: Largest image side, or height and width, in pixels. It sizes the absolute position tables of ViL.
            Other tables are resized to each feature map, and have the size of the papers (see
            ``position_interpolation``).
        activation_checkpointing: Whether the backward pass recomputes activations. Training then needs less memory and
            about a third more time.
        attention_backend: ``"sdpa"`` is PyTorch's attention. ``"triton"`` is for sliding-chunk attention, long-short
            attention and full attention with a relative bias, on CUDA. ``"auto"`` is one of these two, see
            :func:`.resolve_backend`. ``"reference"`` is quadratic and for debugging.
        options: Options that override the variant if they are not None:

            - ViL and LS: ``chunk_size`` (side of a chunk in tokens; 7 is ViL's window of 15), ``global_tokens``,
              ``projection_rank`` and ``attention`` (``"sliding_chunk"``, ``"long_short"`` or ``"dense"``). Each takes
              one value, or one value per stage.
            - ViL: ``attention_mode`` (``"zero_pad"``, ``"exact"`` or ``"cyclic"``, ViL appendix C) and
              ``shared_projections`` (False for separate projections of the global tokens).
            - ViL, LS and LIT: ``position_interpolation`` (``"once"`` for tables of ``max_img_size``, or
              ``"per_feature_map"`` for tables that are resized to each feature map).
            - CvT: ``chunk_size``, ``projection_rank`` and ``norm``.
            - LIT: ``token_merging`` (``"deformable"`` or ``"uniform"``) and ``norm`` (``"BN"``, ``"FrozenBN"`` or
              ``"SyncBN"``).
            - LITv2: ``norm``.

    Returns:
        A module that takes images (B, 3, H, W) of any height and width, and returns a dict from stage names to feature
        maps (B, C, ceil(H / stride), ceil(W / stride)). ``feature_info`` has the channels and strides.

    Raises:
        ConfigError: If a name, keyword or value is unknown. The message suggests the closest valid one.

    Example:
        >>> model = create_backbone("vil_small_rpb", out_features=("stage2", "stage3", "stage4"))
        >>> features = model(torch.rand(1, 3, 480, 640))
        >>> features["stage4"].shape
        torch.Size([1, 768, 15, 20])
    """
    variant = get_variant(name, options, keywords=inspect.signature(create_backbone).parameters)
    if any(getattr(stage, "attention", None) == "linformer" for stage in variant.stages):
        raise ConfigError(f"{name} supports one image size only, so it cannot be a backbone. Use create_classifier.")
    settings = BackboneSettings(
        out_features=out_features,
        max_img_size=height_and_width("max_img_size", max_img_size),
        drop_path_rate=drop_path_rate,
        activation_checkpointing=activation_checkpointing,
        attention_backend=attention_backend,
    )
    return _FAMILIES[type(variant)](variant, settings)


def create_classifier(
    name: str,
    *,
    num_classes: int = 1000,
    img_size: int | tuple[int, int] = 224,
    pool: str | None = None,
    drop_path_rate: float = 0.0,
    activation_checkpointing: bool = False,
    attention_backend: str = "auto",
    **options: object,
) -> Classifier:
    """Create a classifier with random weights and the head of the papers.

    Args:
        name: One of :func:`list_variants`.
        num_classes: Number of classes.
        img_size: Image side, or height and width, of training in pixels. It sizes all position tables.
        pool: ``"mean"`` of all tokens, or ``"global_token"``, the first global token of the last stage (ViL Tables 11
            and 12: "CLS"). ViL needs ``global_tokens=1`` for it. None for the pooling of the variant.
        drop_path_rate: See :func:`create_backbone`.
        activation_checkpointing: See :func:`create_backbone`.
        attention_backend: See :func:`create_backbone`.
        options: See :func:`create_backbone`.

    Returns:
        A module that takes images (B, 3, H, W) and returns logits (B, num_classes).

    Raises:
        ConfigError: If a name, keyword or value is unknown. The message suggests the closest valid one.

    Example:
        >>> logits = create_classifier("vil_small_rpb", num_classes=10)(torch.rand(2, 3, 224, 224))
        >>> logits.shape
        torch.Size([2, 10])
    """
    variant = get_variant(name, options, keywords=inspect.signature(create_classifier).parameters)
    check_whole("num_classes", num_classes)
    pool = variant.pool if pool is None else pool
    check_choice("pool", pool, ("mean", "global_token"))
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
    if pool == "global_token" and backbone.stages[-1].global_tokens is None:
        raise ConfigError(f"pool='global_token': the last stage of '{name}' has no global token. Set global_tokens=1.")
    return Classifier(backbone, num_classes=num_classes, pool=pool, norm_eps=variant.norm_eps)


def height_and_width(name: str, size: int | Sequence[int]) -> tuple[int, int]:
    """Return height and width in pixels from one side or from both.

    Args:
        name: Name of the argument, for the error.
        size: The side, or height and width.

    Raises:
        ConfigError: If ``size`` is neither.
    """
    pair = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(pair) != 2 or not all(isinstance(side, int) and side >= 1 for side in pair):
        raise ConfigError(f"{name}={size!r} is not an image size. Give one side, or height and width, in pixels.")
    return pair
