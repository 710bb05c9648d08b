"""Parameters and multiply-adds of variants and detectors, next to the figures of the papers."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from detectron2.utils.analysis import parameter_count
from tabulate import tabulate
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from backbones import ConfigError, create_backbone, create_classifier, list_variants
from backbones.attention.efficient import PerformerAttention
from backbones.build import VARIANTS, get_variant
from backbones.errors import closest
from backbones.vil import ViLVariant
from projects_vil.analysis.published import PUBLISHED_CLASSIFIERS, PUBLISHED_DETECTORS, PublishedFigure, deviation_rows
from projects_vil.config import detector_name

# 800 x 1333, padded to the stride of the last feature map, as in a detector.
_DETECTOR_SIZE = (800, 1344)
_NOTE = "Marked rows differ by more than the rounding of the paper; docs/deviations.md has a row for each mark."


@dataclasses.dataclass
class VariantCounts:
    """Counts of one variant.

    Attributes:
        name: the variant's name.
        parameters: number of parameters of the classifier with 1000 classes, by :func:`count_classifier_parameters`.
        published_parameters: the paper's number in millions, or None.
        flops: multiply-adds of the classifier at ``img_size``.
        published_flops: the paper's number in 1e9, or None.
        img_size: side of the classifier's image in pixels.
        backbone_flops: multiply-adds of the backbone at 800 x 1333 pixels, padded to 800 x 1344; None for a
            variant that is not a backbone.
        differs: rows of docs/deviations.md, by :func:`.published.deviation_rows`.
    """

    name: str
    parameters: int
    published_parameters: float | None
    flops: int
    published_flops: float | None
    img_size: int
    backbone_flops: int | None
    differs: list[str]


@dataclasses.dataclass
class DetectorCounts:
    """Counts of one detector.

    Attributes:
        name: the config's name.
        parameters: number of parameters in each part of the detector.
        total: their sum.
        as_published: the number for the same detector as its paper counts it. For ViL with absolute positions (for
            images of up to 1333 pixels), and with the classification head (1000 classes) and norm that the official
            detectors carry and never use; for the other families ``total``.
        published_parameters: the paper's number in millions, or None.
        classifier: the number for the paper's classifier of that size, 1000 classes; for ViL with absolute positions.
        published_classifier: the paper's number in millions, or None.
        flops: multiply-adds at ``size``, or None where they were not counted.
        flops_by_operator: ``flops`` split by operator.
        published_flops: the paper's number in 1e9, or None.
        size: height and width in pixels of the image for ``flops``.
    """

    name: str
    parameters: dict[str, int]
    total: int
    as_published: int
    published_parameters: float | None
    classifier: int
    published_classifier: float | None
    flops: int | None
    flops_by_operator: dict[str, int]
    published_flops: float | None
    size: tuple[int, int]


def count_variants(prefixes: Sequence[str] = ()) -> list[VariantCounts]:
    """Count the variants that start with one of the prefixes, sorted by name; all of them without prefixes.

    Raises:
        ConfigError: for a prefix that no variant has.
    """
    names: set[str] = set()
    for prefix in prefixes or ("",):
        matches = list_variants(prefix)
        if not matches:
            raise ConfigError(f"no variant starts with {prefix!r}{closest(prefix, VARIANTS)}")
        names.update(matches)
    return [count_variant(name) for name in sorted(names)]


def count_variant(name: str) -> VariantCounts:
    """Count one variant on the meta device."""
    img_size = get_variant(name).classifier_img_size
    classifier = meta_classifier(name)
    parameters = count_classifier_parameters(classifier)
    flops = sum(count_flops(classifier, torch.empty(1, 3, img_size, img_size, device="meta")).values())
    backbone_flops = None
    try:
        with torch.device("meta"):
            backbone = create_backbone(name)
        backbone_flops = sum(count_flops(backbone, torch.empty(1, 3, *_DETECTOR_SIZE, device="meta")).values())
    except ConfigError:
        pass
    published = PUBLISHED_CLASSIFIERS.get(name)
    return VariantCounts(
        name=name,
        parameters=parameters,
        published_parameters=published and published[0].value,
        flops=flops,
        published_flops=published and published[1].value,
        img_size=img_size,
        backbone_flops=backbone_flops,
        differs=deviation_rows(name, parameters, flops),
    )


def count_detector(
    cfg: CfgNode, name: str, *, size: tuple[int, int] = (800, 1333), with_flops: bool = True
) -> DetectorCounts:
    """Count the parameters of a detector and, on one image of ``size``, its multiply-adds.

    The image is dark noise, and the weights are random: operators whose work depends on the detections have little.
    """
    cfg = cfg.clone()
    cfg.defrost()
    # Without flops the weights need no memory.
    cfg.MODEL.DEVICE = "cpu" if with_flops else "meta"
    with torch.device(cfg.MODEL.DEVICE):
        model = build_model(cfg).eval()
    numbers = parameter_count(model)
    parts = {part: numbers[part] for part, _ in model.named_children() if numbers[part]}
    parts["backbone"] = numbers["backbone.bottom_up"]
    parts["fpn"] = numbers["backbone"] - parts["backbone"]
    total = as_published = sum(parts.values())
    variant_name = cfg.MODEL.TRANSFORMER.NAME.removesuffix("_rpb")
    variant, classifier = get_variant(variant_name), meta_classifier(variant_name)
    if isinstance(variant, ViLVariant) and not variant.relative_bias:
        with torch.device("meta"):
            backbone = create_backbone(variant_name, max_img_size=1333)
        extra = sum(parameter_count(module)[""] for module in (backbone, classifier.norm, classifier.head))
        as_published += extra - parts["backbone"]
    by_operator: dict[str, int] = {}
    if with_flops:
        image = torch.rand(3, *size, generator=torch.Generator().manual_seed(0)) * 60
        by_operator = count_flops(model, [{"image": image}])
    published = PUBLISHED_DETECTORS.get((detector_name(cfg), variant_name), (None, None))
    published_classifier = PUBLISHED_CLASSIFIERS.get(variant_name)
    return DetectorCounts(
        name=name,
        parameters=parts,
        total=total,
        as_published=as_published,
        published_parameters=published[0],
        classifier=count_classifier_parameters(classifier),
        published_classifier=published_classifier and published_classifier[0].value,
        flops=sum(by_operator.values()) if with_flops else None,
        flops_by_operator=by_operator,
        published_flops=published[1],
        size=size,
    )


def meta_classifier(name: str) -> nn.Module:
    """Build the paper's classifier of a variant on the meta device."""
    with torch.device("meta"):
        return create_classifier(name, img_size=get_variant(name).classifier_img_size)


def count_classifier_parameters(classifier: nn.Module) -> int:
    """Count parameters as the ViL paper does: with Performer's random features, which are not trained."""
    features = [m.features.numel() for m in classifier.modules() if isinstance(m, PerformerAttention)]
    return parameter_count(classifier)[""] + sum(features)


def count_flops(model: nn.Module, *inputs: Any) -> dict[str, int]:
    """Count multiply-adds by type of operator of a model in eval mode, which may be on the meta device.

    Matrix products and convolutions are counted as they are computed: those of attention with the keys of padding, the
    copies of the global tokens and the mask channel. Biases, norms, activations, softmax, and the interpolation of
    deformable convolution are not counted.
    """
    model.eval().requires_grad_(False)
    mapping = {torch.ops.torchvision.deform_conv2d: _deform_conv_flops}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        model(*inputs)
    counts: Counter[str] = Counter()
    for operator, flops in counter.get_flop_counts().get("Global", {}).items():
        # The counter takes a product and a sum for two operations.
        counts[operator_type(str(operator).rpartition(".")[2])] += flops // 2
    return dict(counts)


def operator_type(name: str) -> str:
    """Return the type of an operator of PyTorch: attention, matmul, convolution, norm, copy or other."""
    if name in ("mm", "addmm", "bmm", "baddbmm", "baddbmm_"):
        return "matmul"
    for part, label in (("attention", "attention"), ("conv", "convolution"), ("norm", "norm")):
        if part in name:
            return label
    return "copy" if name in _COPIES else "other"


_COPIES = {
    *("_to_copy", "as_strided_scatter", "cat", "clone", "constant_pad_nd", "copy_", "fill_", "flip", "index"),
    *("index_put", "index_put_", "index_select", "new_zeros", "repeat", "roll", "select_backward", "slice_backward"),
    *("stack", "zero_", "zeros", "zeros_like"),
}


def format_variants(counts: Sequence[VariantCounts]) -> str:
    """Format counts as a table, with a note where they differ from a paper."""
    headers = ["variant", "params M", "paper", "diff", "1e9 mult-adds", "paper", "diff", "800 x 1333", "differs"]
    rows = []
    for each in counts:
        row = [each.name]
        published = PUBLISHED_CLASSIFIERS.get(each.name, (None, None))
        for count, figure in ((each.parameters / 1e6, published[0]), (each.flops / 1e9, published[1])):
            row += [f"{count:.2f}", *(["-", "-"] if figure is None else _difference(count, figure))]
        row += ["-" if each.backbone_flops is None else f"{each.backbone_flops / 1e9:.1f}", ", ".join(each.differs)]
        rows.append(row)
    table = _table(headers, rows)
    return f"{table}\n{_NOTE}" if any(each.differs for each in counts) else table


def format_detectors(counts: Sequence[DetectorCounts]) -> str:
    """Format counts as text: a block for one detector, or a table for several."""
    if len(counts) > 1:
        headers = ["config", "params M", "as published", "paper", "classifier M", "paper", "GFLOPs", "paper"]
        rows = [
            [
                *(each.name, f"{each.total / 1e6:.2f}", f"{each.as_published / 1e6:.2f}"),
                *(_optional(each.published_parameters), f"{each.classifier / 1e6:.2f}"),
                *(_optional(each.published_classifier), _optional(each.flops and round(each.flops / 1e9, 1))),
                _optional(each.published_flops),
            ]
            for each in counts
        ]
        return _table(headers, rows)
    (one,) = counts
    rows = [[part, f"{number / 1e6:.3f} M", ""] for part, number in one.parameters.items()]
    more = "absolute positions, and the classification head and norm that the official detectors never use; "
    more = more if one.as_published != one.total else ""
    rows += [
        ["all", f"{one.total / 1e6:.3f} M", "trained here"],
        ["as published", f"{one.as_published / 1e6:.3f} M", f"{more}paper: {_optional(one.published_parameters)}"],
        ["classifier", f"{one.classifier / 1e6:.3f} M", f"1000 classes; paper: {_optional(one.published_classifier)}"],
    ]
    if one.flops is not None:
        size = f"{one.size[0]} x {one.size[1]}"
        rows.append(
            [f"multiply-adds at {size}", f"{one.flops / 1e9:.2f} G", f"paper: {_optional(one.published_flops)}"]
        )
        by_operator = sorted(one.flops_by_operator.items(), key=lambda item: -item[1])
        rows += [[f"  {operator}", f"{flops / 1e9:.2f} G", ""] for operator, flops in by_operator]
    return f"{one.name}\n{_table([], rows)}"


def as_dicts(counts: Sequence[VariantCounts | DetectorCounts]) -> list[dict[str, Any]]:
    """Return counts as plain dictionaries, for JSON."""
    return [dataclasses.asdict(each) for each in counts]


def _table(headers: list[str], rows: list[list[str]]) -> str:
    alignment = ["left", *["right"] * (len(rows[0]) - 2), "left"]
    return tabulate(
        rows, headers, tablefmt="plain", disable_numparse=True, colalign=alignment, preserve_whitespace=True
    )


def _difference(count: float, figure: PublishedFigure) -> list[str]:
    return [figure.text, f"{count - figure.value:+.2f}"]


def _optional(value: float | None) -> str:
    return "-" if value is None else str(value)


def _deform_conv_flops(image: Any, weight: Sequence[int], *_: Any, out_shape: Sequence[int], **__: Any) -> int:
    """Return twice the multiply-adds from the shapes of the weight (D, C, h, w) and of the output (B, D, H, W)."""
    batch, channels, height, width = out_shape
    return 2 * batch * height * width * channels * weight[1] * weight[2] * weight[3]
