"""Names in, models out."""

from collections.abc import Sequence

from backbones.errors import InputError, explain_unknown_keywords
from backbones.variants import VARIANTS, get_variant
from backbones.vil import ViL, ViLClassifier


def list_variants(prefix: str = "") -> list[str]:
    """The names that :func:`create_backbone` knows, sorted, of those that start with ``prefix``."""
    return sorted(name for name in VARIANTS if name.startswith(prefix))


@explain_unknown_keywords
def create_backbone(
    name: str,
    *,
    out_features: Sequence[str] | None = None,
    drop_path_rate: float = 0.0,
    max_img_size: int | tuple[int, int] = 1333,
    activation_checkpointing: bool = False,
    attention_backend: str = "sdpa",
    attention_mode: str | None = None,
    window_size: int | Sequence[int] | None = None,
    global_tokens: int | Sequence[int] | None = None,
    shared_projections: bool | None = None,
) -> ViL:
    """A backbone with random weights: images (B, 3, H, W) of any size -> {stage name: (B, C, H / stride, W / stride)}.

    Args:
        name: one of :func:`list_variants`.
        out_features: names of the stages to return, ``"stage1"`` onwards; None for all.
        drop_path_rate: stochastic depth of the last block, growing linearly from 0 at the first.
        max_img_size: largest image side, or (height, width), in pixels; sizes the tables of absolute positions.
        activation_checkpointing: less memory in training for about a third more time.
        attention_backend: ``"sdpa"``, or ``"reference"``, which is quadratic and for debugging.
        attention_mode: ``"zero_pad"``, ``"exact"`` or ``"cyclic"`` (ViL appendix C).
        window_size: side of a chunk in tokens, for all stages or one a stage; 7 is the paper's window of 15.
        global_tokens: number of global tokens, for all stages or one a stage.
        shared_projections: False for separate projections of the global tokens.
            The last four are the variant's own where they are None.

    Raises:
        InputError: for an unknown name, keyword or value; the message names the closest known one.
    """
    variant = get_variant(name).with_options(
        window_size=window_size,
        global_tokens=global_tokens,
        attention_mode=attention_mode,
        shared_projections=shared_projections,
    )
    return ViL(
        variant,
        out_features=out_features,
        max_img_size=_height_and_width("max_img_size", max_img_size),
        drop_path_rate=drop_path_rate,
        activation_checkpointing=activation_checkpointing,
        attention_backend=attention_backend,
    )


@explain_unknown_keywords
def create_classifier(
    name: str,
    *,
    num_classes: int = 1000,
    img_size: int | tuple[int, int] = 224,
    drop_path_rate: float = 0.0,
    activation_checkpointing: bool = False,
    attention_backend: str = "sdpa",
    attention_mode: str | None = None,
    window_size: int | Sequence[int] | None = None,
    global_tokens: int | Sequence[int] | None = None,
    shared_projections: bool | None = None,
) -> ViLClassifier:
    """A classifier with random weights and the paper's average-pooled head: (B, 3, H, W) -> (B, num_classes).

    Arguments as for :func:`create_backbone`; ``img_size`` is the training size in pixels, a side or (height, width).
    """
    variant = get_variant(name).with_options(
        window_size=window_size,
        global_tokens=global_tokens,
        attention_mode=attention_mode,
        shared_projections=shared_projections,
    )
    backbone = ViL(
        variant,
        out_features=(f"stage{len(variant.stages)}",),
        max_img_size=_height_and_width("img_size", img_size),
        drop_path_rate=drop_path_rate,
        keep_global_tokens=True,
        activation_checkpointing=activation_checkpointing,
        attention_backend=attention_backend,
    )
    return ViLClassifier(backbone, num_classes=num_classes)


def _height_and_width(name: str, size: int | tuple[int, int]) -> tuple[int, int]:
    pair = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(pair) != 2 or not all(isinstance(side, int) and side >= 1 for side in pair):
        raise InputError(f"{name}={size!r}: it is a side, or a height and a width, in pixels")
    return pair
