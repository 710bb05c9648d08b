"""Names in, models out."""

import functools
from collections.abc import Sequence

from backbones.backbone import Backbone, Classifier, Settings
from backbones.cvt import CvT
from backbones.lit import LIT
from backbones.utils.errors import InputError, explain_unknown_keywords
from backbones.variants import OPTIONS, VARIANTS, CvTVariant, LITVariant, ViLVariant, get_variant, stage_names
from backbones.vil import ViL

_FAMILIES: dict[type, type[Backbone]] = {CvTVariant: CvT, LITVariant: LIT, ViLVariant: ViL}
_checked = functools.partial(explain_unknown_keywords, also=OPTIONS)


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
        max_img_size: largest image side, or (height, width), in pixels; sizes ViL's tables of absolute positions.
            Tables of other kinds are resized to each map, and have the size that the papers trained them at
            (``position_resizing`` changes that).
        activation_checkpointing: less memory in training for about a third more time.
        attention_backend: ``"auto"``, the fastest on the device, ``"sdpa"``, PyTorch's, ``"triton"``, kernels for
            CUDA that sliding chunks have, or ``"reference"``, which is quadratic and for debugging.
        options: in place of the variant's own, where not None; those of ``variants.VARIANTS[name].options``:

            - ViL and LS: ``window_size`` (side of a chunk in tokens; 7 is ViL's window of 15), ``global_tokens``,
              ``rank`` and ``attention`` (``"sliding_chunk"``, ``"long_short"`` or ``"dense"``), each for all stages or
              one a stage; ``attention_mode`` (``"zero_pad"``, ``"exact"`` or ``"cyclic"``, ViL appendix C);
              ``shared_projections`` (False for separate projections of the global tokens);
            - ViL, LS and LIT: ``position_resizing`` (``"load"`` for tables made for ``max_img_size``, ``"map"`` for
              tables that are resized to each map);
            - CvT: ``window_size``, ``rank`` and ``batch_norm``;
            - LIT: ``merging`` (``"deformable"`` or ``"uniform"``), ``batch_norm`` (``"batch"``, ``"frozen"`` or
              ``"sync"``).

    Raises:
        InputError: for an unknown name, keyword or value; the message names the closest known one.
    """
    variant = get_variant(name, options)
    if any(getattr(stage, "attention", None) == "linformer" for stage in variant.stages):
        raise InputError(
            f"{name} cannot be a backbone: Linformer's projections are tied to one map size (ViL section 3.3, Table 3);"
            " create_classifier makes it for one image size"
        )
    settings = Settings(
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
    and all tables of positions are made for it.
    """
    variant = get_variant(name, options)
    if type(num_classes) is not int or num_classes < 1:
        raise InputError(f"num_classes={num_classes!r}: it is a whole number, 1 or more")
    size = height_and_width("img_size", img_size)
    settings = Settings(
        out_features=stage_names(variant)[-1:],
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
    """A side, or height and width, in pixels -> both; ``name`` is what it is called where it is neither."""
    pair = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(pair) != 2 or not all(isinstance(side, int) and side >= 1 for side in pair):
        raise InputError(f"{name}={size!r}: it is a side, or a height and a width, in pixels")
    return pair
