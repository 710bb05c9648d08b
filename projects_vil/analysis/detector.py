"""Parameters by part and FLOPs of a detector, beside what the papers state."""

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from detectron2.utils.analysis import FlopCountAnalysis
from torch import nn

from backbones import create_backbone
from backbones.variants import ViLVariant, get_variant
from projects_vil.analysis.counting import (
    count_parameters,
    count_with_features,
    deform_conv_multiply_adds,
    format_table,
    meta_classifier,
)
from projects_vil.analysis.published import PUBLISHED, PUBLISHED_CLASSIFIERS
from projects_vil.config import detector_name


@dataclasses.dataclass
class Analysis:
    """Counts of one detector.

    Attributes:
        name: the config's.
        parameters: of each part of the detector.
        total: of all parts, what is trained here.
        as_published: of the same detector as its paper counts it. That of ViL counts absolute positions (for images of
            up to 1333 pixels), and the classification head (1000 classes) and norm that the official detectors carry
            and never use; for the other families it is ``total``.
        published_parameters: in millions, or None.
        classifier: of the paper's classifier of that size, 1000 classes; of ViL with absolute positions.
        published_classifier: in millions, or None.
        flops: multiply-adds at ``size``, attention included, or None where they were not counted.
        flops_by_operator: the same by operator.
        published_flops: in 1e9, or None.
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


def analyze(cfg: CfgNode, name: str, *, size: tuple[int, int] = (800, 1333), with_flops: bool = True) -> Analysis:
    """Count the parameters of a detector and, on one image of ``size``, its multiply-adds.

    The image is dim noise, and the weights are random: what depends on the number of detections is small.
    """
    cfg = cfg.clone()
    cfg.defrost()
    # Without memory for the weights, and without drawing them, where they are not needed.
    cfg.MODEL.DEVICE = "cpu" if with_flops else "meta"
    with torch.device(cfg.MODEL.DEVICE):
        model = build_model(cfg).eval()
    variant = cfg.MODEL.TRANSFORMER.NAME.removesuffix("_rpb")
    classifier = meta_classifier(variant)
    parts = parameters_by_part(model)
    total = as_published = sum(parts.values())
    if _is_of_vil(variant):
        with torch.device("meta"):
            backbone = create_backbone(variant, max_img_size=1333)
        extra = sum(map(count_parameters, (backbone, classifier.norm, classifier.head)))
        as_published += extra - parts["backbone"]
    by_operator = count_flops(model, size) if with_flops else {}
    published = PUBLISHED.get((detector_name(cfg), variant), (None, None))
    published_classifier = PUBLISHED_CLASSIFIERS.get(variant)
    return Analysis(
        name=name,
        parameters=parts,
        total=total,
        as_published=as_published,
        published_parameters=published[0],
        classifier=count_with_features(classifier),
        published_classifier=None if published_classifier is None else published_classifier[0].value,
        flops=sum(by_operator.values()) if with_flops else None,
        flops_by_operator=by_operator,
        published_flops=published[1],
        size=size,
    )


def parameters_by_part(model: nn.Module) -> dict[str, int]:
    """Number of parameters of the backbone, of FPN, and of every other direct part of a detector."""
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        part = name.partition(".")[0]
        if part == "backbone":
            part = "backbone" if name.startswith("backbone.bottom_up.") else "fpn"
        parts[part] += parameter.numel()
    return dict(parts)


def count_flops(model: nn.Module, size: tuple[int, int]) -> dict[str, int]:
    """Multiply-adds by operator for one image (height, width), by fvcore; attention's two products are counted.

    The products are counted as they are computed, with the keys of padding and the channel that marks them. Unlike
    :func:`projects_vil.analysis.counting.multiply_adds`, which is for the meta device, this runs the whole detector,
    and fvcore counts norms too.
    """
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(3, *size, generator=generator) * 60
    counter = FlopCountAnalysis(model, [{"image": image}])
    counter.set_op_handle("aten::scaled_dot_product_attention", _attention_flops)
    counter.set_op_handle("torchvision::deform_conv2d", _deform_conv_flops)
    counter.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    logger = logging.getLogger("fvcore.nn.jit_analysis")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with torch.no_grad():
            return {operator: int(flops) for operator, flops in counter.by_operator().items()}
    finally:
        logger.setLevel(level)


def format_analyses(analyses: Sequence[Analysis]) -> str:
    """The counts as text: a block for each detector, or one table for several."""
    if len(analyses) == 1:
        return _format_one(analyses[0])
    header = ("config", "params M", "as published", "paper", "classifier M", "paper", "GFLOPs", "paper")
    rows = [header] + [
        (
            a.name,
            f"{a.total / 1e6:.2f}",
            f"{a.as_published / 1e6:.2f}",
            _optional(a.published_parameters),
            f"{a.classifier / 1e6:.2f}",
            _optional(a.published_classifier),
            _optional(None if a.flops is None else a.flops / 1e9, ".1f"),
            _optional(a.published_flops),
        )
        for a in analyses
    ]
    return format_table(rows)


def as_json(analyses: Sequence[Analysis]) -> list[dict[str, Any]]:
    """The counts as plain dictionaries."""
    return [dataclasses.asdict(analysis) for analysis in analyses]


def _format_one(a: Analysis) -> str:
    lines = [a.name] + [f"  {part:<22}{number / 1e6:9.3f} M" for part, number in a.parameters.items()]
    lines.append(f"  {'all':<22}{a.total / 1e6:9.3f} M  trained here")
    more = ""
    if a.as_published != a.total:
        more = "absolute positions, and the classification head and norm that the official detectors never use; "
    lines.append(
        f"  {'as published':<22}{a.as_published / 1e6:9.3f} M  {more}paper: {_optional(a.published_parameters)}"
    )
    lines.append(
        f"  {'classifier':<22}{a.classifier / 1e6:9.3f} M  1000 classes; paper: {_optional(a.published_classifier)}"
    )
    if a.flops is not None:
        lines.append(f"  multiply-adds at {a.size[0]} x {a.size[1]}, 1e9; paper: {_optional(a.published_flops)}")
        for operator, flops in sorted(a.flops_by_operator.items(), key=lambda item: -item[1]):
            lines.append(f"    {operator:<22}{flops / 1e9:9.2f}")
        lines.append(f"    {'all':<22}{a.flops / 1e9:9.2f}")
    return "\n".join(lines)


def _attention_flops(inputs: list[Any], outputs: list[Any]) -> Counter[str]:
    query, key, value = (_shape(entry) for entry in inputs[:3])
    pairs = math.prod(query[:-1]) * key[-2]
    return Counter({"attention": pairs * (query[-1] + value[-1])})


def _deform_conv_flops(inputs: list[Any], outputs: list[Any]) -> Counter[str]:
    return Counter({"conv": deform_conv_multiply_adds(_shape(inputs[1]), _shape(outputs[0]))})


def _shape(entry: Any) -> list[int]:
    return entry.type().sizes()


def _is_of_vil(name: str) -> bool:
    """Whether the ViL paper counts it: its models have absolute positions."""
    variant = get_variant(name)
    return isinstance(variant, ViLVariant) and not variant.relative_bias


def _optional(value: float | None, spec: str = "") -> str:
    return "-" if value is None else format(value, spec)
