"""Parameters and multiply-adds of every variant, beside what the papers print; nothing is computed."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from backbones import InputError, create_backbone, create_classifier, list_variants
from backbones.attention.alternatives.performer import PerformerAttention
from backbones.utils.errors import closest
from backbones.variants import VARIANTS, get_variant
from projects_vil.analysis.published import PUBLISHED_CLASSIFIERS, Printed, why_different

# 800 x 1333, padded to the stride of the coarsest map, as in a detector.
_DETECTOR_SIZE = (800, 1344)
_ON_THE_LAST_COLUMN = (
    "Marked rows differ by more than the paper's rounding; the mark is the row of docs/deviations.md that says why."
)


@dataclasses.dataclass
class VariantCounts:
    """Counts of one variant.

    Attributes:
        name: the variant's.
        parameters: of the classifier with 1000 classes, by :func:`count_with_features`.
        published_parameters: in millions, or None.
        flops: multiply-adds of the classifier at ``img_size``.
        published_flops: in 1e9, or None.
        img_size: side of the classifier's image in pixels.
        backbone_flops: multiply-adds of the backbone alone for an image of 800 x 1333 pixels, padded to 800 x 1344;
            None for a variant that is no backbone.
        differs: what :func:`.published.why_different` says.
    """

    name: str
    parameters: int
    published_parameters: float | None
    flops: int
    published_flops: float | None
    img_size: int
    backbone_flops: int | None
    differs: list[str]


def count_variants(prefixes: Sequence[str] = ()) -> list[VariantCounts]:
    """Count the variants that start with one of ``prefixes``, sorted by name; all for no prefix.

    Raises:
        InputError: for a prefix that no variant has.
    """
    names: set[str] = set()
    for prefix in prefixes or ("",):
        matches = list_variants(prefix)
        if not matches:
            raise InputError(f"no variant starts with {prefix!r}{closest(prefix, VARIANTS)}")
        names.update(matches)
    return [count_variant(name) for name in sorted(names)]


def count_variant(name: str) -> VariantCounts:
    """The counts of one variant."""
    classifier, img_size = meta_classifier(name), classifier_img_size(name)
    parameters = count_with_features(classifier)
    flops = sum(multiply_adds(classifier, _image(img_size, img_size)).values())
    printed = PUBLISHED_CLASSIFIERS.get(name)
    return VariantCounts(
        name=name,
        parameters=parameters,
        published_parameters=None if printed is None else printed[0].value,
        flops=flops,
        published_flops=None if printed is None else printed[1].value,
        img_size=img_size,
        backbone_flops=_backbone_flops(name),
        differs=why_different(name, parameters, flops),
    )


def classifier_img_size(name: str) -> int:
    """Side in pixels of the images that the papers count a classifier for."""
    return get_variant(name).classifier_img_size


def meta_classifier(name: str) -> nn.Module:
    """The papers' classifier of that name, without memory for its weights."""
    with torch.device("meta"):
        return create_classifier(name, img_size=classifier_img_size(name))


def count_parameters(module: nn.Module) -> int:
    """Number of parameters, trained or not."""
    return sum(parameter.numel() for parameter in module.parameters())


def count_with_features(classifier: nn.Module) -> int:
    """Number of parameters as the ViL paper counts them: with Performer's random features, which are not trained."""
    features = [m.features.numel() for m in classifier.modules() if isinstance(m, PerformerAttention)]
    return count_parameters(classifier) + sum(features)


def multiply_adds(model: nn.Module, *inputs: Tensor) -> dict[str, int]:
    """Multiply-adds by operator of a model in eval mode; it and its inputs may be on the meta device.

    Products of matrices and convolutions are counted as they are computed: those of attention with the keys of
    padding, the copies of the global tokens and the channel that marks hidden keys. Biases, norms, activations and
    softmax are not counted, nor is the interpolation of deformable convolution.
    """
    model.eval().requires_grad_(False)
    mapping = {torch.ops.torchvision.deform_conv2d: _deform_conv_flops}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        model(*inputs)
    # The counter takes a product and a sum for two operations.
    return {str(operator): flops // 2 for operator, flops in counter.get_flop_counts().get("Global", {}).items()}


def deform_conv_multiply_adds(weight: Sequence[int], output: Sequence[int]) -> int:
    """Of a deformable convolution, by the shapes of its weight (D, C, h, w) and of its output (B, D, H, W)."""
    batch, channels, height, width = output
    return batch * height * width * channels * weight[1] * weight[2] * weight[3]


def format_counts(counts: Sequence[VariantCounts]) -> str:
    """The counts as a table, with a line on its last column where that has an entry."""
    header = ("variant", "params M", "paper", "diff", "1e9 mult-adds", "paper", "diff", "800 x 1333", "differs")
    rows = [header] + [
        (
            c.name,
            f"{c.parameters / 1e6:.2f}",
            *_compared(c.name, 0, c.parameters / 1e6),
            f"{c.flops / 1e9:.2f}",
            *_compared(c.name, 1, c.flops / 1e9),
            "-" if c.backbone_flops is None else f"{c.backbone_flops / 1e9:.1f}",
            ", ".join(c.differs),
        )
        for c in counts
    ]
    table = format_table(rows, left=(0, len(header) - 1))
    if any(c.differs for c in counts):
        table += "\n" + _ON_THE_LAST_COLUMN
    return table


def format_table(rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """Rows of cells in columns, aligned on the right but for those whose numbers are ``left``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _compared(name: str, column: int, count: float) -> tuple[str, str]:
    printed: Printed | None = PUBLISHED_CLASSIFIERS.get(name, (None, None))[column]
    return ("-", "-") if printed is None else (printed.text, f"{count - printed.value:+.2f}")


def _backbone_flops(name: str) -> int | None:
    try:
        with torch.device("meta"):
            backbone = create_backbone(name)
    except InputError:
        return None
    return sum(multiply_adds(backbone, _image(*_DETECTOR_SIZE)).values())


def _image(height: int, width: int) -> Tensor:
    return torch.empty(1, 3, height, width, device="meta")


def _deform_conv_flops(image: Any, weight: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return 2 * deform_conv_multiply_adds(weight, out_shape)
